"""The scheduler: decides which sequences compute how many tokens in each step."""
