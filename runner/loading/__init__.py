"""Load a checkpoint, offer its weights to peers, and change the weights of a running model."""
