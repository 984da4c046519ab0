"""Recurrent states of a model with linear attention: slots beside the blocks of its KV cache."""
