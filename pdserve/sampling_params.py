"""The sampling parameters of a request, from the router to the sampler.

Each one is declared once, with its range and its meaning. Checks of routers and nodes, the message of
proto/pdserve.proto, and the bodies of HTTP requests follow from the declaration or are tested against it.

To add one that clients write as it is: a field of ``BodyParams`` here, a field of the message (and ``scripts/stubs``),
and its stage in runner/sampling/sampler.py and for V2 in runner/v2/sampling_metadata.py and runner/kernels/sampling.py.
"""

from __future__ import annotations

import typing
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.ranges import Range

MAX_CHOICES = 128  # per prompt
MAX_PROMPT_LOGPROBS = 20
TokenIds = tuple[int, ...]


class BodyParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that HTTP request bodies have under the same names and with the same defaults."""

    n: Annotated[int, Range(1, MAX_CHOICES), Meta(description="Choices per prompt.")] = 1
    min_tokens: Annotated[int, Range(0), Meta(description="No stop token before so many output tokens.")] = 0
    presence_penalty: Annotated[
        float, Range(-2, 2), Meta(description="Subtracted from the logits of tokens in the output.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Range(-2, 2), Meta(description="The same, times the number of occurrences in the output.")
    ] = 0.0
    ignore_eos: Annotated[bool, Meta(description="Go on after the model's end token.")] = False
    disable_spec_decode: Annotated[bool, Meta(description="No speculative decoding; the tokens stay the same.")] = False


class SamplingParams(BodyParams, frozen=True, omit_defaults=True):
    """All parameters of a request. The router has filled in all defaults.

    A request samples the same tokens in every batch: noise depends only on ``seed``, the choice, the position and the
    token id.
    """

    max_tokens: Annotated[int, Range(1)]
    temperature: Annotated[float, Range(0, 2)] = 1.0  # 0 is greedy
    top_k: Annotated[int, Range(-1, 2**31 - 1)] = 0  # keep the k best tokens; 0 and, of clients, -1: all
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0  # keep the best tokens of this total probability; 1: all
    min_p: Annotated[float, Range(0, 1)] = 0.0  # keep tokens of at least this share of the best one's probability
    seed: int = 0  # 64 bits
    repetition_penalty: Annotated[float, Range(0, 100, above=True)] = 1.0  # scales logits of tokens seen; 1: off
    logit_bias: Annotated[dict[int, float], Range(-100, 100)] = {}  # by token id
    stop_token_ids: TokenIds = ()
    logprobs: Annotated[int, Range(-1)] = -1  # alternatives to report per token; 0: the sampled one only; -1: none
    prompt_logprobs: Annotated[int, Range(-1, MAX_PROMPT_LOGPROBS)] = -1  # per prompt token, as ``logprobs``
    #: Constrains the whole output, in llguidance's serialized form; "" is none. The position in it follows from the
    #: output so far, so another node can continue a choice without further state.
    grammar: str = ""
    allowed_token_ids: TokenIds = ()  # no other tokens; (): all
    bad_words: tuple[TokenIds, ...] = ()  # the output has none of these sequences
    logprob_token_ids: TokenIds = ()  # reported in place of the ``logprobs`` best tokens
    #: Most tokens of reasoning. It begins after ``thinking_start_ids`` in the output, or with the output if there are
    #: none, and ends with ``thinking_end_ids``.
    thinking_token_budget: Annotated[int, Range(0)] = 0
    thinking_start_ids: TokenIds = ()
    thinking_end_ids: TokenIds = ()
    thinking_call_ids: tuple[TokenIds, ...] = ()  # each ends the reasoning, too: it begins a call
    adapter: str = ""  # digest of the adapter that the request's model names; empty: the base

    def for_kv(self, num_choices: int) -> SamplingParams:
        """Return the parameters of a prompt with the same KV, for a node that only computes this KV.

        It samples one token for each choice that continues; these tokens mean nothing. The KV depends on no parameter
        but the adapter.
        """
        return SamplingParams(n=num_choices, max_tokens=1, temperature=0.0, adapter=self.adapter)

    @property
    def has_token_rules(self) -> bool:
        """Whether it restricts tokens other than by a grammar (engine/token_rules.py)."""
        return bool(self.allowed_token_ids or self.bad_words or self.thinking_end_ids)

    @property
    def masked(self) -> bool:
        """Whether every step has a mask of its allowed tokens."""
        return bool(self.grammar) or self.has_token_rules

    @property
    def num_alternatives(self) -> int:
        """Tokens to report per output token beside the sampled one; -1 reports nothing."""
        return len(self.logprob_token_ids) if self.logprob_token_ids and self.logprobs >= 0 else self.logprobs

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def truncates(self) -> bool:
        """Whether it excludes tokens before sampling."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


#: Parameters that are lists of token ids.
TOKEN_ID_LISTS = tuple(name for name, kind in typing.get_type_hints(SamplingParams).items() if kind == TokenIds)
