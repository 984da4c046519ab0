"""Load a checkpoint: weights, memory checks and KV cache size."""
