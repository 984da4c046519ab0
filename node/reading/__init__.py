"""Reads KV from peers: connections, streams, the state machine of a handoff, and the driver of pulls. Common to all nodes."""
