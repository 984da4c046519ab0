"""Weights between processes: orders to change them, and weights that nodes read from each other."""
