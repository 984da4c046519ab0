"""Kernels that are compiled on the hosts of a node: whether they run there, and how they get compiled."""
