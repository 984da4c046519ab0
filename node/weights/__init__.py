"""Weights of a running node: changes that operators order, and peers that send and receive them."""
