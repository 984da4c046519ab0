"""HTTP: the ASGI application, its endpoints, authentication and errors."""
