"""Request bodies of completions and chats, and the checks that need neither model nor prompt."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Literal

import msgspec

from pdserve.errors import RequestError, cut
from pdserve.records import MAX_PROMPT_LOGPROBS
from router.completions_api.body_parsing import convert, parse_json
from router.text.chat.template import RenderRequest
from router.text.chat.tools import ToolUse, tool_use
from router.text.prompt import pack_prompts
from router.text.structured.structured_outputs import OutputGrammar, StructuredOutputs, requested_grammar

MAX_CHOICES = 128  # per prompt
MAX_STOP_STRINGS = 16


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # accepted, never done


class GenerateBody(msgspec.Struct, kw_only=True, frozen=True, dict=True):
    """Fields of both completions and chats."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None  # None, here and below: the model's default
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    n: int = 1
    user: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    priority: int = 0  # lower runs earlier
    response_format: dict[str, Any] = {}
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None  # keeps the last tokens; -1: as many as fit

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def usage_in_stream(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    @cached_property  # conversion takes time
    def structure(self) -> OutputGrammar:
        """The grammar of the output. Raises RequestError."""
        guided = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        given = {name: value for name, value in guided.items() if value is not None}
        return requested_grammar(self.response_format, self.structured_outputs, given)

    @property
    def output_limit(self) -> int | None:
        """The client's limit of output tokens, if any."""
        return self.max_tokens

    @property
    def lowers_max_tokens(self) -> bool:
        """Whether a limit beyond the context is lowered to the room that the prompt leaves; else it is an error."""
        return False

    @property
    def num_logprobs(self) -> int:
        """Alternatives per output token; -1: no log-probabilities."""
        raise NotImplementedError

    @property
    def most_prompt_logprobs(self) -> int:
        """Alternatives per prompt token that the response needs; -1: none."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def continues_prompt(self) -> bool:
        """Whether the output continues the prompt's text; a chat message begins a new text."""
        return True


class CompletionBody(GenerateBody, kw_only=True, frozen=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def most_prompt_logprobs(self) -> int:
        return max(super().most_prompt_logprobs, self.num_logprobs if self.echo else -1)

    @property
    def num_prompts(self) -> int:
        """A list of token ids is one prompt."""
        if not self.prompt and not isinstance(self.prompt, str):
            raise RequestError("prompt is empty; give at least one token", "prompt")
        return 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)

    def pack_prompts(self) -> list[str | bytes]:
        """The prompts one by one: texts, or packed token ids. Raises RequestError for a mixture."""
        return pack_prompts(self.prompt, "prompt")


class ChatBody(GenerateBody, kw_only=True, frozen=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    documents: list[dict[str, Any]] = []
    add_generation_prompt: bool | None = None  # default: true, unless the last message is to be continued
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def continues_prompt(self) -> bool:
        return self.continue_final_message

    @property
    def tool_use(self) -> ToolUse:
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def opens_message(self) -> bool:
        """Whether the prompt ends with the header of the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":  # as Qwen3 and DeepSeek name it
            variables |= {"enable_thinking": False, "thinking": False}
        return variables | self.chat_template_kwargs

    @property
    def render_request(self) -> RenderRequest:
        """The arguments of the chat template."""
        return RenderRequest(
            self.messages,
            self.opens_message,
            self.template_variables,
            self.tool_use.tools,
            self.documents,
            self.continue_final_message,
        )

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1


def parse_completion(data: bytes) -> CompletionBody:
    body = convert(parse_json(data), CompletionBody)
    check_ranges(body)
    if body.logprobs is not None:
        within("logprobs", body.logprobs, 0, MAX_PROMPT_LOGPROBS)
    if body.best_of is not None and body.best_of != body.n:
        raise RequestError(f"best_of {body.best_of} must equal n {body.n}; leave best_of out", "best_of")
    if body.num_prompts * body.n > 8 * MAX_CHOICES:
        text = f"{body.num_prompts} prompts × n {body.n} exceed {8 * MAX_CHOICES} choices; send fewer"
        raise RequestError(text, "prompt")
    return body


def parse_chat(data: bytes) -> ChatBody:
    body = convert(parse_json(data), ChatBody)
    check_chat(body)
    return body


def check_chat(body: ChatBody) -> None:
    """Check fields and their combinations. Raises RequestError."""
    check_ranges(body)
    if body.top_logprobs is not None:
        within("top_logprobs", body.top_logprobs, 0, MAX_PROMPT_LOGPROBS)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    field = body.structure.field
    if body.tool_use.must_call and field not in ("", "response_format"):  # that one is of messages, not of calls
        raise RequestError(f"{field} excludes a tool_choice that forces calls; leave one out", field)
    if body.continue_final_message and body.opens_message:
        remedy = "set add_generation_prompt to false"
        raise RequestError(f"continue_final_message continues the last message; {remedy}", "continue_final_message")


def check_ranges(body: GenerateBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true; leave it out", "stream_options")
    if body.prompt_logprobs is not None:
        within("prompt_logprobs", body.prompt_logprobs, 0, MAX_PROMPT_LOGPROBS)
        if body.stream:
            text = "prompt_logprobs cannot be streamed; leave out prompt_logprobs or stream"
            raise RequestError(text, "prompt_logprobs")
    if body.output_limit is not None:  # 0 scores the prompt only
        within("max_tokens", body.output_limit, 0 if body.most_prompt_logprobs >= 0 else 1, math.inf)
    within("min_tokens", body.min_tokens, 0, math.inf)
    within("temperature", body.temperature or 0.0, 0.0, 2.0)
    within("top_p", 1.0 if body.top_p is None else body.top_p, 0.0, 1.0, above=True)
    within("top_k", body.top_k or 0, -1, 2**31 - 1)
    within("min_p", body.min_p or 0.0, 0.0, 1.0)
    within("seed", body.seed or 0, -(2**63), 2**64 - 1)
    within(
        "repetition_penalty",
        1.0 if body.repetition_penalty is None else body.repetition_penalty,
        0.0,
        100.0,
        above=True,
    )
    within("presence_penalty", body.presence_penalty, -2.0, 2.0)
    within("frequency_penalty", body.frequency_penalty, -2.0, 2.0)
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens != -1:
        within("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, math.inf)
    within("priority", body.priority, -(2**31), 2**31 - 1)
    within("n", body.n, 1, MAX_CHOICES)
    for token_id, bias in body.logit_bias.items():
        within(f"logit_bias of token {cut(token_id)}", bias, -100.0, 100.0, param="logit_bias")
    within("number of stop strings", len(body.stops), 0, MAX_STOP_STRINGS, param="stop")
    if "" in body.stops:
        raise RequestError("a stop string is empty; leave it out", "stop")
    body.structure  # noqa: B018 - converted where the body is parsed, for large bodies on a thread


def within(name: str, value: float, low: float, high: float, *, above: bool = False, param: str | None = None) -> None:
    if (low < value if above else low <= value) and value <= high:
        return
    floor = f"above {low:g}" if above else f"at least {low:g}"
    ceiling = "" if high == math.inf else f" and at most {high:g}"
    raise RequestError(f"{name} is {cut(str(value))}; it must be {floor}{ceiling}", param or name)
