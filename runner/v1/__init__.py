"""Runner V1: batch state on the host, plain torch on the device, on any device."""
