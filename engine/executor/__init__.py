"""The ranks of a node: start them, run steps on all of them, aggregate their outputs."""
