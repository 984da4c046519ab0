"""Messages of a conversation and its sampling parameters. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Conversation:
    """``system`` may change at any time; "" is none."""

    def __init__(self, model: str, system: str = "", sampling: Mapping[str, float] | None = None) -> None:
        self.model = model
        self.system = system
        self._sampling = dict(sampling or {})
        self._messages: list[dict[str, str]] = []

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self._messages.clear()

    def body(self, message: str) -> dict[str, Any]:
        """Return the request for an answer to the conversation and a new message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self._messages, {"role": "user", "content": message}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": messages, **self._sampling, **options}

    def add(self, message: str, answer: str) -> None:
        """Keep a message with its answer, which may be cut. Messages without any answer are not kept."""
        if answer:
            self._messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

    def take_last(self) -> str | None:
        """Remove the last message with its answer and return the message; None without one."""
        if not self._messages:
            return None
        message = self._messages[-2]["content"]
        del self._messages[-2:]
        return message
