"""Communication between the ranks of a node: tensor shards and pipeline stages."""
