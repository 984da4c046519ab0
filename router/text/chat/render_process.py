"""``python -m router.text.chat.render_process``: renders chats until its stdin ends. Started by rendering.py."""

from __future__ import annotations

import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from pdserve.errors import RequestError
from pdserve.process import end_with_parent
from router.text.chat.renderers import LENGTH_BYTES, Order, Rendered, Setup
from router.text.chat.template import ChatTemplate


def main() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router, which ends this process
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = msgspec.json.decode(_read(source), type=Setup)
    template = ChatTemplate(setup.source, setup.special_tokens)
    resource.setrlimit(resource.RLIMIT_AS, (setup.max_memory, setup.max_memory))
    _write(sink, Rendered())
    while data := _read(source):
        _write(sink, _render(template, data))


def _render(template: ChatTemplate, data: bytes) -> Rendered:
    try:
        order = msgspec.json.decode(data, type=Order)
        return Rendered(
            template.render(
                order.messages,
                order.add_generation_prompt,
                order.variables,
                tools=order.tools,
                documents=order.documents,
                continue_final_message=order.continue_final_message,
            )
        )
    except RequestError as exc:
        return Rendered(error=str(exc), param=exc.param)
    except MemoryError:
        return Rendered(error="the chat template takes too much memory with these messages", param="messages")
    except Exception as exc:  # of a template anything may come
        text = f"the chat template fails with these messages: {type(exc).__name__}: {exc}"
        return Rendered(error=text, param="messages")


def _read(source: BinaryIO) -> bytes:
    """The next message; empty at the end."""
    length = int.from_bytes(source.read(LENGTH_BYTES), "little")
    return source.read(length)


def _write(sink: BinaryIO, rendered: Rendered) -> None:
    data = msgspec.json.encode(rendered)
    sink.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    sink.flush()


if __name__ == "__main__":
    main()
