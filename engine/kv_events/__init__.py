"""Records what KV events tell of the prefix cache. The core knows it as ``CacheRecorder`` alone."""
