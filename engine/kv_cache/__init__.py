"""The KV cache of a node in blocks: allocation, prefix cache, leases and reads."""
