"""A request from token ids to output tokens: choices, calls to nodes and migration."""
