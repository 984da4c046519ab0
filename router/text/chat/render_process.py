"""``python -m router.text.chat.render_process``: renders chats for template_renderer.py until stdin ends."""

from __future__ import annotations

import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from pdserve.errors import RequestError
from pdserve.process import end_with_parent
from router.text.chat.template import ChatTemplate
from router.text.chat.template_renderer import LENGTH_BYTES, RendererConfig, RenderRequest, RenderResult


def main() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router, which ends this process
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    config = msgspec.json.decode(_read(requests), type=RendererConfig)
    template = ChatTemplate(config.source, config.special_tokens)
    resource.setrlimit(resource.RLIMIT_AS, (config.max_memory, config.max_memory))
    _write(results, RenderResult())
    while data := _read(requests):
        _write(results, _render(template, data))


def _render(template: ChatTemplate, data: bytes) -> RenderResult:
    try:
        request = msgspec.json.decode(data, type=RenderRequest)
        return RenderResult(
            template.render(
                request.messages,
                request.add_generation_prompt,
                request.variables,
                tools=request.tools,
                documents=request.documents,
                continue_final_message=request.continue_final_message,
            )
        )
    except RequestError as exc:
        return RenderResult(error=str(exc), param=exc.param)
    except MemoryError:
        return RenderResult(error="the chat template takes too much memory with these messages", param="messages")
    except Exception as exc:  # a template may raise anything
        text = f"the chat template fails with these messages: {type(exc).__name__}: {exc}"
        return RenderResult(error=text, param="messages")


def _read(stream: BinaryIO) -> bytes:
    """Return the next message; empty at the end."""
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    return stream.read(length)


def _write(stream: BinaryIO, rendered: RenderResult) -> None:
    data = msgspec.json.encode(rendered)
    stream.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    stream.flush()


if __name__ == "__main__":
    main()
