"""The endpoints: those that compute with a model as plain ASGI, the others as routes of FastAPI."""
