"""Images of requests: decoded and resized in processes of their own, and sent to the node that computes the prompt."""
