"""Turns of clients: a queue by cost, and slots in turn."""
