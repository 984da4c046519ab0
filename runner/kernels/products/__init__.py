"""Matrix products of few rows and of FP8 weights."""
