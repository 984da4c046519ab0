"""The nodes behind a router: discovery, state, policy and prefix index."""
