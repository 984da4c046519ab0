"""Request bodies of completions and chats."""
# ruff: noqa: RUF012 - msgspec copies mutable defaults

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from pdserve.errors import RequestError
from pdserve.ranges import within
from pdserve.sampling_params import MAX_CHOICES, MAX_PROMPT_LOGPROBS
from router.completions_api.body_parsing import convert, parse_json
from router.completions_api.generate_body import ALL_LOGPROBS, GenerateBody
from router.completions_api.request_checks import check_ranges
from router.text.chat.messages import join_parts
from router.text.chat.template import RenderRequest
from router.text.chat.tools import ToolUse, tool_use
from router.text.prompt import pack_prompts


class CompletionBody(GenerateBody, kw_only=True, frozen=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    logprobs_field = "logprobs"
    usual_tokens = 16  # OpenAI's default
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else ALL_LOGPROBS if self.logprobs == -1 else self.logprobs

    @property
    def most_prompt_logprobs(self) -> int:
        return max(super().most_prompt_logprobs, self.num_logprobs if self.echo else -1)

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def num_prompts(self) -> int:
        """A list of token ids is one prompt."""
        if not self.prompt and not isinstance(self.prompt, str):
            raise RequestError("prompt is empty; give at least one token", "prompt")
        return 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)

    def pack_prompts(self) -> list[str | bytes]:
        """The prompts one by one: texts, or packed token ids. Raises RequestError for a mixture."""
        return pack_prompts(self.prompt, "prompt")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingField(Struct, kw_only=True, frozen=True):
    """``thinking`` of the chat APIs of DeepSeek, GLM and Kimi."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class ReasoningField(Struct, kw_only=True, frozen=True):
    """``reasoning`` of OpenRouter's chats."""

    effort: Effort | None = None
    enabled: bool | None = None


class ChatBody(GenerateBody, kw_only=True, frozen=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_field = "messages"
    logprobs_field = "top_logprobs"
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    reasoning: Annotated[ReasoningField | None, Meta(description="OpenRouter; as reasoning_effort.")] = None
    thinking: Annotated[bool | ThinkingField | None, Meta(description="DeepSeek, GLM; whether to reason.")] = None
    enable_thinking: Annotated[bool | None, Meta(description="Qwen; whether to reason.")] = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None, Meta(description="Ollama; whether to reason, or how much.")
    ] = None
    include_reasoning: bool = True
    separate_reasoning: Annotated[
        bool, Meta(description="SGLang; false: reasoning stays in the content, with its markers.")
    ] = True
    stream_reasoning: Annotated[
        bool, Meta(description="SGLang; false: a stream has all reasoning in one chunk, after its end.")
    ] = True
    echo: bool = False
    chat_template: str = ""
    documents: list[dict[str, Any]] = []
    add_generation_prompt: Annotated[
        bool | None, Meta(description="Default: true, unless the last message is continued.")
    ] = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def continues_prompt(self) -> bool:
        return self.continue_final_message

    @property
    def echoes(self) -> bool:
        return bool(self.echo and self.echoed_text)

    @property
    def echoed_text(self) -> str:
        """The content of a last message that has the answer's role."""
        last = self.messages[-1]
        return join_parts(last.get("content")) or "" if last.get("role") == "assistant" else ""

    @property
    def tool_use(self) -> ToolUse:
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def opens_message(self) -> bool:
        """Whether the prompt ends with the header of the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def effort(self) -> Effort | None:
        """Reasoning effort, from the first field that sets it."""
        of_reasoning = None if self.reasoning is None else self.reasoning.effort
        of_think = None if isinstance(self.think, bool) else self.think
        return self.reasoning_effort or of_reasoning or of_think

    @property
    def reasons(self) -> bool | None:
        """Whether to reason, from the first field that sets it; None: the template decides."""
        thinking = self.thinking
        if isinstance(thinking, ThinkingField):
            thinking = {"enabled": True, "disabled": False}.get(thinking.type)
        of_reasoning = None if self.reasoning is None else self.reasoning.enabled
        of_think = self.think if isinstance(self.think, bool) else None
        of_effort = False if self.effort == "none" else None
        said = (thinking, self.enable_thinking, of_think, of_reasoning, of_effort)
        return next((choice for choice in said if choice is not None), None)

    @property
    def template_variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {} if self.effort is None else {"reasoning_effort": self.effort}
        if self.reasons is not None:  # names in the templates of Qwen3 and DeepSeek
            variables |= {"enable_thinking": self.reasons, "thinking": self.reasons}
        return variables | self.chat_template_kwargs

    @property
    def render_request(self) -> RenderRequest:
        """The arguments of the chat template."""
        return RenderRequest(
            messages=self.messages,
            add_generation_prompt=self.opens_message,
            variables=self.template_variables,
            tools=self.tool_use.tools,
            documents=self.documents,
            continue_final_message=self.continue_final_message,
            template=self.chat_template,
            field=self.prompt_field,
        )

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int:
        if not self.logprobs:
            return -1
        return ALL_LOGPROBS if self.top_logprobs == -1 else self.top_logprobs or 0


def parse_completion(data: bytes) -> CompletionBody:
    body = convert(parse_json(data), CompletionBody)
    check_ranges(body)
    if body.logprobs is not None:
        within("logprobs", body.logprobs, 0 if body.echo else -1, MAX_PROMPT_LOGPROBS if body.echo else math.inf)
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
        within("top_logprobs", body.top_logprobs, -1, math.inf)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    field = body.structure.field
    if body.tool_use.must_call and field not in ("", "response_format"):  # response_format is about messages, not calls
        raise RequestError(f"{field} excludes a tool_choice that forces calls; leave one out", field)
    if body.continue_final_message and body.opens_message:
        remedy = "set add_generation_prompt to false"
        raise RequestError(f"continue_final_message continues the last message; {remedy}", "continue_final_message")
