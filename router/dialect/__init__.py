"""Base of the HTTP protocols: what each one declares, and the responses and events that it writes."""
