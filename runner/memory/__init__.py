"""Memory of a device: how much is free, how much this process holds, and the size of the KV cache."""
