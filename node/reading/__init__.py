"""Reads KV from peers: connections, streams and the state machine of a handoff. Common to all nodes."""
