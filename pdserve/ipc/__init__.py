"""Messages between the frontend process and the engine process of a node."""
