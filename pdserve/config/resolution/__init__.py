"""The functions that ``resolve`` calls, by subject. Each returns a value and the reason for it."""
