"""``python -m router.text.chat.render_process``: renders chats for template_renderer.py until stdin ends."""

from __future__ import annotations

import gc
import resource
import signal
from functools import lru_cache

import msgspec

from pdserve.errors import CheckpointError, RequestError, cut
from pdserve.host.process import end_with_parent
from router.freed_memory import map_large_blocks, trim
from router.text.chat.messages import check_messages
from router.text.chat.template import ChatTemplate, RenderRequest
from router.text.chat.template_renderer import COMPILE_SECONDS, RendererConfig, RenderResult
from router.text.worker_process import read_message, write_message

_LARGE_BYTES = 1 << 20  # memory is collected and trimmed after larger messages
_MAX_ERROR = 1000  # characters; a template may quote a message


def main() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router, which ends this process
    config = msgspec.json.decode(read_message() or b"", type=RendererConfig)
    resource.setrlimit(resource.RLIMIT_AS, (config.max_memory, config.max_memory))
    template = ChatTemplate(config.source, config.special_tokens)
    try:
        _compile(template)
    except CheckpointError as exc:
        write_message(msgspec.json.encode(RenderResult(error=str(exc))))
        return
    write_message(msgspec.json.encode(RenderResult()))
    map_large_blocks()
    while (size := _answer(template)) is not None:
        if size > _LARGE_BYTES:
            gc.collect()  # Jinja leaves cycles
            trim()


def _answer(template: ChatTemplate) -> int | None:
    """Return the size of the next message, once it is answered; None at the end of the input."""
    message = read_message()
    if message is None:
        return None
    write_message(_render(template, message))
    return len(message)


def _compile(template: ChatTemplate) -> None:
    """Compile within COMPILE_SECONDS of CPU, which do not depend on the load of the machine."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_SECONDS, most))
    assert template.compiled
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _render(template: ChatTemplate, message: bytes) -> bytes:
    """Return a RenderResult."""
    try:
        request = msgspec.json.decode(message, type=RenderRequest)
        checked = msgspec.structs.replace(
            request, messages=check_messages(request.messages, images=bool(request.image_token))
        )
        source = request.template_source(template.source)
        if source != template.source:
            template = _own_template(source, template)
        return msgspec.json.encode(RenderResult(template.render(checked)))
    except RequestError as exc:
        result = RenderResult(error=cut(str(exc), _MAX_ERROR), param=exc.param)
    except MemoryError:
        result = RenderResult(error="the chat template takes too much memory with these messages", param="messages")
    except Exception as exc:  # a template may raise any exception
        text = f"the chat template fails with these messages: {type(exc).__name__}: {cut(str(exc))}"
        result = RenderResult(error=text, param="messages")
    return msgspec.json.encode(result)


@lru_cache(maxsize=4)
def _own_template(source: str, model: ChatTemplate) -> ChatTemplate:
    """Return the template of a request, or of requests with images. Raises RequestError."""
    try:
        template = ChatTemplate(source, model.special_tokens)
        assert template.compiled
    except CheckpointError as exc:
        raise RequestError(str(exc), "chat_template") from exc
    return template


if __name__ == "__main__":
    main()
