"""Largest gRPC messages, by direction. protobuf parses a message in one piece: up to 16 ms per MB while all else waits.

    client ──request_limit(max_model_len)──► node     a node refuses larger ones with RESOURCE_EXHAUSTED
    client ◄────────ANSWER_LIMIT──────────── node     StreamWriter and NodeReports stay below it

A request holds at most the token ids of the longest context and ``_OTHER_FIELDS``. The choices of a resumed request may
exceed that together: choices beyond ``RESUME_LIMIT`` travel ahead of it in messages of their own.
"""

from __future__ import annotations

from pdserve.records import TOKEN_BYTES

ANSWER_LIMIT = 4 << 20  # bytes; the largest messages report or announce 65,536 blocks
BATCH_LIMIT = 1 << 20  # bytes of the entries in a message of a stream; a single entry is smaller
ENTRY_BYTES = 64  # most bytes of an entry without its long fields; each entry counts as so many
MAX_ENTRIES = BATCH_LIMIT // ENTRY_BYTES  # entries in a message of a stream
MAX_REPORTED_BLOCKS = 65_536  # cached blocks of a node that are reported, on average over hashes
MAX_REPORTED_IMAGES = 16_384  # images of a node that are reported, the newest ones
RESUME_LIMIT = 128 << 10  # bytes of several resumed choices in a message
_OTHER_FIELDS = 512 << 10  # bytes: a grammar (128 KiB), RESUME_LIMIT, biases, stop ids, trace context


def request_limit(max_model_len: int) -> int:
    """Return the bytes of the largest message to a node."""
    return TOKEN_BYTES * max_model_len + _OTHER_FIELDS
