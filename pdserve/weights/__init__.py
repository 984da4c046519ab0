"""``pdserve weights``: show and change the weights of running nodes."""
