"""KV of other nodes: loads from them, leases to them. The core knows it as ``PeerKV`` alone."""
