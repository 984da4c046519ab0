"""From a checked request and its prompts to the response that will be written, of the kind that was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from router.generation.job import Job, Prompt
from router.http.request_bodies import ChatBody, CompletionBody, GenerateBody
from router.http.response_formats import ChatFormat, CompletionFormat, Format
from router.http.response_writers import Response, ResponseOptions, StreamResponse, WholeResponse
from router.responses_api.items_body import ItemsBody
from router.responses_api.items_responses import ItemsStream, ItemsWhole, ResponseObject
from router.text.chat.chat_responses import ReadChatFormat, ReadChatStream, ReadChatWhole
from router.text.chat.dialect import Dialect, Opening
from router.text.chat.forced_calls import Marker, after_reasoning, forced_calls_grammar
from router.text.chat.messages import join_parts
from router.text.chat.output_reading import OutputReading, find_reading, plain_reading
from router.text.chat.tools import ToolUse
from router.text.structured.output_formats import Wanted
from router.text.tokenizer import Tokenizer


class Answerer:
    """Knows how a model writes and how it is called."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect, model: str) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._model = model

    def structure(self, body: GenerateBody, prompt: Prompt) -> Wanted:
        """What the output is held to: what the fields ask for, or calls of tools. Reasoning may come first."""
        wanted = body.structure
        if not isinstance(body, ChatBody):
            return wanted
        if body.tool_use.forced:
            wanted = Wanted(forced_calls_grammar(body.tool_use), "tools")
        opening = self._opening(body, prompt)
        form = opening.reasoning
        if not wanted.grammar or form is None:
            return wanted
        start, end = (Marker(text, self._tokenizer.added_token_id(text)) for text in (form.start, form.end))
        return Wanted(after_reasoning(wanted.grammar, start, end, opening.opened), wanted.field)

    def _opening(self, body: ChatBody, prompt: Prompt) -> Opening:
        continued = join_parts(body.messages[-1].get("content")) if body.continue_final_message else None
        return self._dialect.opening_after(prompt.text or "", continued)

    def reading(self, body: GenerateBody, prompt: Prompt) -> OutputReading | None:
        """None where the output is text and nothing else, and is sent as such."""
        if not isinstance(body, ChatBody):
            return None
        use = ToolUse() if body.structure.grammar else body.tool_use  # held to something else, it cannot call
        found = find_reading(use, self._dialect, self._opening(body, prompt), body.include_reasoning)
        if found is None and isinstance(body, ItemsBody):
            return plain_reading(self._dialect)
        return found

    def response(
        self, body: GenerateBody, jobs: Sequence[Job], request_id: str, reading: OutputReading | None
    ) -> Response:
        if isinstance(body, ItemsBody):
            assert reading is not None
            head = ResponseObject(body, body.model or self._model, request_id)
            items = ItemsStream if body.stream else ItemsWhole
            return items(head, body, jobs, reading, self._tokenizer)
        options = _options(body)
        if reading is not None:
            form = self._format(ReadChatFormat, body, request_id, options)
            return (ReadChatStream if body.stream else ReadChatWhole)(form, options, jobs, reading)
        kind = ChatFormat if isinstance(body, ChatBody) else CompletionFormat
        form = self._format(kind, body, request_id, options)
        return (StreamResponse if body.stream else WholeResponse)(form, options, jobs)

    def _format(self, kind: type[Format], body: GenerateBody, request_id: str, options: ResponseOptions) -> Format:
        model = body.model or self._model
        return kind(self._tokenizer, model, request_id, max(body.num_logprobs, 0), options.include_usage)


def shown_tokens(body: GenerateBody, reading: OutputReading | None) -> tuple[str, ...] | None:
    """Special tokens that become text; None: all."""
    if not body.skip_special_tokens:
        return None
    return () if reading is None else reading.markers


def _options(body: GenerateBody) -> ResponseOptions:
    include_usage = body.stream and body.stream_options.include_usage
    return ResponseOptions(
        num_logprobs=body.num_logprobs,
        echo=isinstance(body, CompletionBody) and body.echo,
        return_token_ids=body.return_token_ids,
        prompt_logprobs=body.prompt_logprobs,
        include_usage=include_usage,
        continuous_usage=include_usage and body.stream_options.continuous_usage_stats,
    )
