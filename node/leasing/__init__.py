"""Leases KV to peers: the PrefillNode service, its streams and leases. Common to all nodes."""
