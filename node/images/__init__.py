"""Uploads of pixels to a node that encodes images: its engine keeps them until their prompts are computed."""
