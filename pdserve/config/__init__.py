"""Flags of nodes, and ``resolve``: from flags, the checkpoint and the device to one frozen configuration."""
