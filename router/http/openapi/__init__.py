"""What the router serves, as an OpenAPI document at /openapi.json."""
