"""The ranks of a node, where it has several: the leader's end of them, theirs, and what they report put together."""
