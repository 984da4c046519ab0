"""Bounds the work of decoding a JSON text, by a scan of its bytes.

A decoder holds the interpreter until its end: 6 s for 12 MB of empty lists. The scan goes piece by piece, so on a
thread it delays the event loop by a few milliseconds only.
"""

from __future__ import annotations

from pdserve.errors import RequestError

SMALL_BYTES = 64 * 1024  # decoded in 30 ms at worst, so neither scanned nor moved to a thread
MAX_ITEMS = 100_000  # objects, lists and keys: the costliest parts
_MAX_EXPONENTS = 1000  # numbers with an exponent; one takes up to 10 µs
_MAX_DIGITS = 100  # digits per number; the cost grows with their square

_PIECE_BYTES = 256 * 1024
_ZEROS = bytes.maketrans(b"123456789", b"000000000")


def check_json(text: bytes | bytearray, max_scalars: int) -> None:
    """Raises RequestError if a text of any validity may take long to decode. ``max_scalars``: further values in lists.

    A counted sign is outside strings: a colon per key, a bracket per object or list, a comma per further value.
    """
    if len(text) <= SMALL_BYTES:
        return
    num_items = num_commas = num_exponents = 0
    inside = False  # inside a string
    start = 0
    while start < len(text):
        piece = bytes(text[start : start + _PIECE_BYTES])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:
            piece = piece[:-1]  # do not cut between a backslash and the escaped character
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
        num_items += outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        num_commas += outside.count(b",")
        num_exponents += outside.count(b"E") + _count_small_e(outside)
        if num_items > MAX_ITEMS:
            raise RequestError(f"the JSON has more than {MAX_ITEMS} objects, lists and keys; send fewer")
        if num_commas > MAX_ITEMS + max_scalars:
            raise RequestError(f"the JSON has more than {MAX_ITEMS + max_scalars} values; send fewer")
        if num_exponents > _MAX_EXPONENTS:
            raise RequestError(f"the JSON has more than {_MAX_EXPONENTS} numbers with an exponent; write them without")
        if b"0" * (_MAX_DIGITS + 1) in outside.translate(_ZEROS):
            raise RequestError(f"a number in the JSON has more than {_MAX_DIGITS} digits; send fewer")


def _count_small_e(outside: bytes) -> int:
    """Count the letter, except in ``true`` and ``false``."""
    return outside.count(b"e") - outside.count(b"ue") - outside.count(b"se")
