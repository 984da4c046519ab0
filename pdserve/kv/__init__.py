"""KV caches and recurrent states in bytes, their groups, and the records of their copies and transfers."""
