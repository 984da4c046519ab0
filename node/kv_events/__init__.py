"""Publishes changes of the prefix cache over ZeroMQ, in the form of vLLM's KV events: for routers of other projects.

    engine ──Batch.cache_changes──► event loop ──deque──► thread ─┬─ PUB     topic, sequence number, payload
                                                                  └─ ROUTER  replays of what a subscriber has missed

The payload is msgpack: ``[timestamp, events, data_parallel_rank]``. Sequence numbers (8 bytes, big-endian) count from 0
at the start of the node. A request for a replay is the first wanted number; the answers are (number, payload) of each
kept batch from there on, then number -1. If a wanted batch is no longer kept, a snapshot takes its place: one batch
with the number of a later one. It clears the cache, then stores all that readers knew after that batch. So a replay is
always exact, and memory is bounded.

docs/cluster.md describes it for readers.
"""
