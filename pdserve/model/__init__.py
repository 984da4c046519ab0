"""A model as its config.json describes it: layers, heads, rope, experts, pooling, weight formats. Torch-free."""
