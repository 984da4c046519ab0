"""Base of the HTTP protocols: the declaration of a protocol, its responses and its events."""
