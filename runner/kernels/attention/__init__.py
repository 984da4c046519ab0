"""Attention and what it reads: pages of the KV cache, rotary embedding, sinks."""
