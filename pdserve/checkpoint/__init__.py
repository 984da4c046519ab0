"""The files of a checkpoint, which are not trusted: bounded reads, headers and digests of weights."""
