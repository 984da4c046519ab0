"""LoRA adapters of a node: their names, loads and reloads, and the service that takes orders."""
