"""OpenAI's Responses protocol: a chat whose input and output are lists of items."""
