"""Chat templates: Jinja in a sandbox, rendering what transformers' ``apply_chat_template`` renders.

Templates come with checkpoints and are not trusted: the sandbox is immutable and sees plain JSON values only. The
router compiles and renders them in separate processes (template_renderer.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import msgspec

from pdserve.errors import CheckpointError, RequestError
from router.text.chat.messages import check_image_order
from router.text.chat.template_messages import template_messages

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
RESERVED |= {"chat_template"}
MAX_SOURCE = 1 << 20  # characters; real templates have less than 50,000

# Marks the end of the last message in a rendered text. Its space shows whether the template strips contents.
_END = "\ue000end of the last message\ue001 "


class RenderRequest(msgspec.Struct, frozen=True):
    """The variables of a template; ``variables`` holds those beyond the common ones."""

    messages: Sequence[dict[str, Any]]
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = {}
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    continue_final_message: bool = False
    template: str = ""  # replaces the model's template
    field: str = "messages"  # field of the client's body with the conversation, for errors
    image_token: str = ""  # text of the placeholder of an image; empty: the model takes none
    image_mark: str = ""  # text that a template writes in its place

    def template_source(self, model_template: str) -> str:
        """Return the template of this request, with the mark of images."""
        source = self.template or model_template
        return source.replace(self.image_token, self.image_mark) if self.image_token else source


class ChatTemplate:
    """A template, compiled on first use. ``special_tokens`` (bos_token, eos_token …) are variables in it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CheckpointError for a source that is too long."""
        if len(source) > MAX_SOURCE:
            raise CheckpointError(
                f"the chat template has {len(source)} characters, the limit is {MAX_SOURCE}; shorten it"
            )
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None

    @property
    def compiled(self) -> jinja2.Template:
        """Raises CheckpointError. A hostile source takes long, or much memory."""
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled

    def _compile(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as exc:
            raise CheckpointError(f"the chat template does not compile: {exc} (line {exc.lineno})") from exc
        except RecursionError as exc:
            raise CheckpointError("the chat template does not compile: it is nested too deeply; simplify it") from exc
        except (SyntaxError, ValueError, OverflowError) as exc:  # errors in the Python code that Jinja makes
            raise CheckpointError(f"the chat template does not compile: {exc}; correct it") from exc

    def render(self, request: RenderRequest) -> str:
        """Return the prompt's text; with ``continue_final_message`` it ends with the last message's content.

        Raises RequestError when the template refuses the messages.
        """
        chat = template_messages(request.messages, self.source)
        check_image_order(chat)
        if request.continue_final_message:
            chat[-1]["content"] = _marked(chat[-1].get("content"))
        values = {
            **self.special_tokens,
            **request.variables,
            "tools": request.tools or None,
            "documents": request.documents or None,
            "add_generation_prompt": request.add_generation_prompt,
        }
        try:
            text = self._text(chat, values)
        except RequestError:
            # Messages that only call tools or reason have no content, which simple templates cannot render.
            filled = [
                {"content": "", **message} if {"tool_calls", "thinking"} & message.keys() else message
                for message in chat
            ]
            if filled == chat:
                raise
            text = self._text(filled, values)
        return _cut(text) if request.continue_final_message else text

    def _text(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        try:
            return self.compiled.render(messages=messages, **values)
        except jinja2.TemplateError as exc:
            raise RequestError(f"the chat template refuses these messages: {exc}", "messages") from exc
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as exc:
            raise RequestError(f"the chat template cannot render these messages: {exc}", "messages") from exc


def either_template(with_tools: str, without: str) -> str:
    """Return a template that chooses by whether there are tools. A source's final newline is not part of its text."""
    sources = [source.removesuffix("\n") for source in (with_tools, without)]
    return "{% if tools %}{{ '' }}" + sources[0] + "{% else %}{{ '' }}" + sources[1] + "{% endif %}"


def _marked(content: Any) -> Any:
    """Return the content of a last message, a text or chunks that end with one, with the mark of its end."""
    if isinstance(content, list) and content and content[-1].get("type") == "text":
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END}]
    if not isinstance(content, str) or not content:
        raise RequestError("continue_final_message needs a last message with content", "continue_final_message")
    return content + _END


def _cut(text: str) -> str:
    """Cut a text after its last message, as transformers does."""
    at = text.rfind(_END.strip())
    if at < 0:
        raise RequestError("the chat template leaves the last message out; it cannot be continued", "messages")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


class _GenerationTag(jinja2.ext.Extension):
    """Renders the body of ``{% generation %}…{% endgeneration %}``, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a set on the instance

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=lineno)]


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        # Compilation must not evaluate constant expressions, which may take very long.
        optimized=False,
        finalize=_unchanged,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@jinja2.pass_context
def _unchanged(context: jinja2.runtime.Context, value: Any) -> Any:
    """Takes the context, so that Jinja does not call it at compile time."""
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode plain JSON with transformers' parameters; Jinja's own filter escapes HTML characters and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
