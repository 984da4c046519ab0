"""From a checked request and its prompts to the constraints on its output and the response to write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pdserve.rpc.protobuf import unpack_tokens
from router.completions_api.generate_body import GenerateBody
from router.completions_api.parsed_chat import FullParsedChat, ParsedChatEncoder, StreamedParsedChat
from router.completions_api.request_bodies import ChatBody
from router.completions_api.response_encoders import ChatEncoder, CompletionEncoder, ResponseEncoder
from router.completions_api.response_objects import TokenIdNames, TokenNames
from router.completions_api.response_writers import FullResponse, Response, StreamedResponse
from router.completions_api.token_params import thinking_params
from router.generation.job import Job
from router.messages_api.message_writers import FullMessage, StreamedMessage
from router.messages_api.request import MessagesBody
from router.responses_api.request import ResponsesBody
from router.service import ServedModel
from router.text.chat.messages import join_parts
from router.text.chat.output_parsing import OutputParsing, plain_text_parsing, select_parsing
from router.text.chat.parsers import ReasoningState
from router.text.chat.strict_tools import has_strict
from router.text.chat.tool_grammar import Marker, after_reasoning, tool_call_grammar
from router.text.chat.tools import ToolUse
from router.text.prompt import Prompt
from router.text.structured.structured_outputs import OutputGrammar

_MARKER_TOKENS = 16  # at the end of a prompt, among which a marker of reasoning may be


async def output_grammar(model: ServedModel, body: GenerateBody, prompt: Prompt) -> OutputGrammar:
    """The grammar of the output: of the request's fields, or of forced or strict tools. Reasoning may come first."""
    if not isinstance(body, ChatBody):
        return await model.grammars.translated(body.structure)
    use, form = body.tool_use, model.parsers.tools
    if use.must_call:
        grammar = OutputGrammar(tool_call_grammar(use), "tools")
    elif has_strict(use) and form is not None and not body.structure.text:
        grammar = OutputGrammar(form.grammar(use, partial(_marker, model)), "tools")
    else:
        grammar = await model.grammars.translated(body.structure)
    grammar.check_size()
    state = _reasoning_state(model, body, prompt)
    if not grammar.text or state.markers is None:
        return grammar
    start, end = _marker(model, state.markers.start), _marker(model, state.markers.end)
    return OutputGrammar(after_reasoning(grammar.text, start, end, state.opened), grammar.field)


def _marker(model: ServedModel, text: str) -> Marker:
    return Marker(text, model.tokenizer.added_token_id(text))


def select_output_parsing(model: ServedModel, body: GenerateBody, prompt: Prompt) -> OutputParsing | None:
    """Select the parsing of reasoning and tool calls; None for plain text."""
    if not isinstance(body, ChatBody):
        return None
    use = body.tool_use
    if body.structure.text and not use.must_call:  # output under another grammar holds no calls
        use = ToolUse()
    state = _reasoning_state(model, body, prompt)
    found = select_parsing(use, model.parsers, state, body.include_reasoning, body.separate_reasoning)
    if found is None and isinstance(body, ResponsesBody | MessagesBody):
        return plain_text_parsing(model.parsers)
    return found


def _reasoning_state(model: ServedModel, body: ChatBody, prompt: Prompt) -> ReasoningState:
    continued = join_parts(body.messages[-1].get("content")) if body.continue_final_message else None
    return model.parsers.state_after(prompt.text or "", continued)


def thinking(model: ServedModel, body: GenerateBody, prompt: Prompt) -> dict[str, Any]:
    """The budget of reasoning as fields of SamplingParams. Raises RequestError."""
    budget, state = body.thinking_token_budget, None
    if budget is None or budget == -1:
        return {}
    if isinstance(body, MessagesBody) and model.parsers.reasoning is None:
        return {}  # agents ask all models to think
    if isinstance(body, ChatBody):
        state = _reasoning_state(model, body, prompt)
    elif model.parsers.reasoning is not None:
        state = model.parsers.state_after(model.tokenizer.decode(unpack_tokens(prompt.last(_MARKER_TOKENS))))
    return thinking_params(budget, model.tokenizer, state if model.parsers.reasoning else None)


def visible_special_tokens(body: GenerateBody, parsing: OutputParsing | None) -> tuple[str, ...] | None:
    """Special tokens that become text; None: all."""
    if not body.skip_special_tokens:
        return None
    return () if parsing is None else parsing.markers


def make_response(
    model: ServedModel, body: GenerateBody, jobs: Sequence[Job], request_id: str, parsing: OutputParsing | None
) -> Response:
    name = model.name
    if isinstance(body, MessagesBody):
        assert parsing is not None
        message = StreamedMessage if body.stream else FullMessage
        return message(body, name, request_id, jobs, parsing)
    kind = _encoder_kind(body, parsing)
    include_usage = bool(body.usage_in_stream.include_usage)
    names: TokenNames = TokenIdNames() if body.return_tokens_as_token_ids else model.tokenizer
    encoder = kind(names, name, request_id, max(jobs[0].sampling.logprobs, 0), include_usage)
    if parsing is not None:
        assert isinstance(body, ChatBody)
        chat = StreamedParsedChat if body.stream else FullParsedChat
        return chat(encoder, body, jobs, parsing)
    plain = StreamedResponse if body.stream else FullResponse
    return plain(encoder, body, jobs)


def _encoder_kind(body: GenerateBody, parsing: OutputParsing | None) -> type[ResponseEncoder]:
    if parsing is not None:
        return ParsedChatEncoder
    return ChatEncoder if isinstance(body, ChatBody) else CompletionEncoder
