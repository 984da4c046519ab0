"""Connector back ends: NIXL, in-process, simulated and none."""
