"""The fields that completions and chats share."""
# ruff: noqa: RUF012 - msgspec copies mutable defaults

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from pdserve.sampling_params import BodyParams
from router.text.structured.structured_outputs import Structure, StructuredOutputs, requested_structure

#: Fields with a grammar, and their names in StructuredOutputs: vLLM's older fields, and SGLang's.
_GRAMMAR_FIELDS = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
_GRAMMAR_FIELDS |= {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}

ALL_LOGPROBS = 2**31 - 1  # alternatives: the whole vocabulary, which clients write as -1


Number = TypeVar("Number", int, float)
Defaulted = Annotated[Number | None, Meta(description="Default: that of the model, else OpenAI's.")]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Annotated[bool | None, Meta(description="Accepted without effect.")] = False


class GenerateBody(BodyParams, kw_only=True, frozen=True):
    """Fields of both completions and chats, in addition to those of BodyParams."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: Defaulted[float] = None
    top_p: Defaulted[float] = None
    top_k: Defaulted[int] = None
    min_p: Defaulted[float] = None
    seed: int | None = None
    repetition_penalty: Defaulted[float] = None
    logit_bias: dict[str, float] = {}
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    user: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    priority: Annotated[int, Meta(description="Lower values run earlier.")] = 0
    response_format: dict[str, Any] = {}
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="Keep so many tokens of a prompt; -1: as many as fit.")
    ] = None
    truncation_side: Annotated[Literal["left", "right"], Meta(description="Where tokens are dropped.")] = "left"
    include_stop_str_in_output: bool = False
    no_stop_trim: Annotated[bool, Meta(description="SGLang's name of include_stop_str_in_output.")] = False
    bad_words: list[str] = []
    allowed_token_ids: list[int] = []
    logprob_token_ids: list[int] = []
    return_tokens_as_token_ids: bool = False
    thinking_token_budget: Annotated[int | None, Meta(description="Limit of reasoning tokens; -1: none.")] = None
    request_id: str = ""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def usage_in_stream(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    @property
    def structure(self) -> Structure:
        """The structure of the output, which is not converted yet. Raises RequestError for two."""
        values = {field: (kind, getattr(self, field)) for field, kind in _GRAMMAR_FIELDS.items()}
        given = {field: {kind: value} for field, (kind, value) in values.items() if value is not None}
        return requested_structure(self.response_format, self.structured_outputs, given)

    @property
    def output_limit(self) -> int | None:
        """The client's limit of output tokens, if any."""
        return self.max_tokens

    @property
    def lowers_max_tokens(self) -> bool:
        """Whether a limit beyond the context is lowered to the room that the prompt leaves; else it is an error."""
        return False

    # Names of fields in the client's body, for errors
    prompt_field: ClassVar[str] = "prompt"
    limit_field: ClassVar[str] = "max_tokens"  # field of ``output_limit``
    logprobs_field: ClassVar[str]  # field of ``num_logprobs``

    usual_tokens: ClassVar[int | None] = None  # output limit if client and model set none; None: all that fits

    @property
    def num_logprobs(self) -> int:
        """Best tokens to report per output token; -1: no log-probabilities."""
        raise NotImplementedError

    @property
    def most_prompt_logprobs(self) -> int:
        """Alternatives per prompt token that the response needs; -1: none."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with text of the prompt."""
        return False

    @property
    def echoed_text(self) -> str:
        """The text of a chat that the answer begins with; a completion begins with its prompt."""
        return ""

    @property
    def continues_prompt(self) -> bool:
        """Whether the output continues the prompt's text; a chat message begins a new text."""
        return True
