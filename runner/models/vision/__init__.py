"""Vision towers: pixels of an image to embeddings of its tokens, and their way into a decoder."""
