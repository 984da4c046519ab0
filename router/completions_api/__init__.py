"""/v1/completions and /v1/chat/completions: request bodies, sampling parameters, response objects and their writers."""
