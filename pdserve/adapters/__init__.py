"""LoRA adapters: files in PEFT's format, their content digests, and the records that nodes exchange. Never torch."""
