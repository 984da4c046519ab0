"""Reads KV from peers, on all nodes: connections, streams, the state machine of a handoff, the driver of pulls."""
