"""Images in steps: their pixels, the embeddings on the device, and which step encodes which image."""
