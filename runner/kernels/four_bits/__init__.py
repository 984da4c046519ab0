"""Products with 4-bit weights: their layout in memory, and kernels for one, few and many rows, and for experts."""
