"""From a checked request and its prompts to the constraints on its output and the response to write."""

from __future__ import annotations

from collections.abc import Sequence

from router.completions_api.parsed_chat import FullParsedChat, ParsedChatEncoder, StreamedParsedChat
from router.completions_api.request_bodies import ChatBody, CompletionBody, GenerateBody
from router.completions_api.response_encoders import ChatEncoder, CompletionEncoder, ResponseEncoder
from router.completions_api.response_writers import FullResponse, Response, ResponseOptions, StreamedResponse
from router.generation.job import Job
from router.responses_api.output_writers import FullOutputItems, StreamedOutputItems, new_response
from router.responses_api.request import ResponsesBody
from router.served_model import ServedModel
from router.text.chat.dialect import Opening
from router.text.chat.forced_calls import Marker, after_reasoning, forced_calls_grammar
from router.text.chat.messages import join_parts
from router.text.chat.output_reading import OutputReading, find_reading, plain_reading
from router.text.chat.tools import ToolUse
from router.text.prompt import Prompt
from router.text.structured.output_formats import Wanted


def output_grammar(model: ServedModel, body: GenerateBody, prompt: Prompt) -> Wanted:
    """The grammar of the output: of the request's fields, or of forced tool calls. Reasoning may come first."""
    wanted = body.structure
    if not isinstance(body, ChatBody):
        return wanted
    if body.tool_use.forced:
        wanted = Wanted(forced_calls_grammar(body.tool_use), "tools")
    opening = _opening(model, body, prompt)
    form = opening.reasoning
    if not wanted.grammar or form is None:
        return wanted
    start, end = (Marker(text, model.tokenizer.added_token_id(text)) for text in (form.start, form.end))
    return Wanted(after_reasoning(wanted.grammar, start, end, opening.opened), wanted.field)


def output_reading(model: ServedModel, body: GenerateBody, prompt: Prompt) -> OutputReading | None:
    """How to parse reasoning and tool calls; None where the output is sent as plain text."""
    if not isinstance(body, ChatBody):
        return None
    use = ToolUse() if body.structure.grammar else body.tool_use  # output under another grammar holds no calls
    found = find_reading(use, model.dialect, _opening(model, body, prompt), body.include_reasoning)
    if found is None and isinstance(body, ResponsesBody):
        return plain_reading(model.dialect)
    return found


def _opening(model: ServedModel, body: ChatBody, prompt: Prompt) -> Opening:
    continued = join_parts(body.messages[-1].get("content")) if body.continue_final_message else None
    return model.dialect.opening_after(prompt.text or "", continued)


def visible_special_tokens(body: GenerateBody, reading: OutputReading | None) -> tuple[str, ...] | None:
    """Special tokens that become text; None: all."""
    if not body.skip_special_tokens:
        return None
    return () if reading is None else reading.markers


def make_response(
    model: ServedModel, body: GenerateBody, jobs: Sequence[Job], request_id: str, reading: OutputReading | None
) -> Response:
    name = body.model or model.name
    if isinstance(body, ResponsesBody):
        assert reading is not None
        head = new_response(body, name, request_id)
        return (StreamedOutputItems if body.stream else FullOutputItems)(head, body, jobs, reading, model.tokenizer)
    options = _options(body)

    def encoder(kind: type[ResponseEncoder]) -> ResponseEncoder:
        return kind(model.tokenizer, name, request_id, max(body.num_logprobs, 0), options.include_usage)

    if reading is not None:
        chat = StreamedParsedChat if body.stream else FullParsedChat
        return chat(encoder(ParsedChatEncoder), options, jobs, reading)
    plain = StreamedResponse if body.stream else FullResponse
    return plain(encoder(ChatEncoder if isinstance(body, ChatBody) else CompletionEncoder), options, jobs)


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
