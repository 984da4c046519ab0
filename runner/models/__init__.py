"""Model definitions, shared by all runners."""
