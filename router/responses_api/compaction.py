"""Compaction: the model summarizes a conversation, and an item with the summary replaces it in later inputs.

conversation, PROMPT ──► model ──► summary ──► {"type": "compaction", "encrypted_content": …}
as input: user: PROMPT, assistant: summary
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from pdserve.errors import RequestError

PROMPT = (
    "Summarize our conversation so far. The summary will replace it, so keep every instruction, fact, decision, name, "
    "number and result that may matter later, and what remains to be done. Write only the summary."
)
_FORMAT = b"pdserve summary 1\n"  # before the text


def encode_summary(text: str) -> str:
    """Return the ``encrypted_content`` of an item. It is encoded, not encrypted: its client knows the conversation."""
    return base64.b64encode(_FORMAT + text.encode()).decode()


def decode_summary(content: Any, where: str) -> str:
    """Raises RequestError."""
    try:
        data = base64.b64decode(content, validate=True)
        if data.startswith(_FORMAT):
            return data.removeprefix(_FORMAT).decode()
    except (TypeError, ValueError, binascii.Error):
        pass
    text = f"{where}.encrypted_content is not of /v1/responses/compact here; send the items that it replaced"
    raise RequestError(text, where)
