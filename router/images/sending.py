"""Sends images to the nodes that compute their prompts: ImageNode.Put, once per image and node at a time."""
