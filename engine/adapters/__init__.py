"""LoRA adapters in the engine: which ones the node has, and which slot on the device holds each."""
