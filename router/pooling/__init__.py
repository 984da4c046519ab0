"""Embeddings, scores and rankings, which prefill nodes compute alone."""
