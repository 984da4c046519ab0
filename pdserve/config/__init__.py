"""Configuration: command-line flags, the checkpoint's config and the device, resolved to one frozen value."""
