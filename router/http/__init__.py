"""HTTP: endpoints, request bodies, responses and errors."""
