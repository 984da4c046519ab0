"""Sampling parameters that name tokens: from texts and markers of a request to token ids."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.errors import RequestError, cut
from pdserve.sampling_params import TokenIds
from router.completions_api.generate_body import ALL_LOGPROBS, GenerateBody
from router.text.chat.parsers import ReasoningState
from router.text.prompt_encoder import PromptEncoder
from router.text.tokenizer import Tokenizer

_MAX_BAD_TOKENS = 8192  # tokens in all bad words of a request


class NamedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of tokens that a request names, as SamplingParams has them."""

    allowed_token_ids: TokenIds = ()
    bad_words: tuple[TokenIds, ...] = ()
    logprob_token_ids: TokenIds = ()


class ThinkingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The fields ``thinking_…`` of SamplingParams."""

    token_budget: int = 0
    start_ids: TokenIds = ()
    end_ids: TokenIds = ()  # (): no budget
    call_ids: tuple[TokenIds, ...] = ()


NO_NAMED_TOKENS = NamedTokens()
NO_THINKING_BUDGET = ThinkingParams()


def check_logprobs(body: GenerateBody, vocab_size: int, limit: int) -> None:
    """Raises RequestError for more alternatives per token than ``limit``, that of --max-logprobs."""
    everything = body.num_logprobs == ALL_LOGPROBS
    if (vocab_size if everything else body.num_logprobs) <= limit or body.logprob_token_ids:
        return
    given = f"-1, all {vocab_size} tokens of the vocabulary" if everything else cut(str(body.num_logprobs))
    name = body.logprobs_field
    raise RequestError(f"{name} is {given}; the limit is {limit}, ask for fewer", name)


async def named_tokens(body: GenerateBody, encoder: PromptEncoder) -> NamedTokens:
    """Raises RequestError."""
    words = await _bad_words(body.bad_words, encoder) if body.bad_words else ()
    single = {word[0] for word in words if len(word) == 1}
    if body.bad_words and body.allowed_token_ids and single.issuperset(body.allowed_token_ids):
        raise RequestError("bad_words exclude all of allowed_token_ids; allow other tokens", "bad_words")
    return NamedTokens(
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids)),
        bad_words=words,
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids)),
    )


async def _bad_words(texts: list[str], encoder: PromptEncoder) -> tuple[tuple[int, ...], ...]:
    """Tokenize each text as at the beginning of a text and as behind a space."""
    variants = [variant for text in texts for variant in (text.lstrip(), " " + text.lstrip())]
    prompts = await encoder.encode_all(variants, False, "bad_words")
    words = tuple(dict.fromkeys(tuple(prompt.unpacked()) for prompt in prompts if prompt.num_tokens))
    if (total := sum(map(len, words))) > _MAX_BAD_TOKENS:
        raise RequestError(f"bad_words have {total} tokens, the limit is {_MAX_BAD_TOKENS}; send fewer", "bad_words")
    return words


def thinking_params(
    budget: int, tokenizer: Tokenizer, state: ReasoningState | None, call_markers: Sequence[str] = ()
) -> ThinkingParams:
    """Return a budget of reasoning tokens with the markers of the model's reasoning, and of calls, which end it, too.

    ``state`` is that at the end of the prompt; None: the router knows no reasoning of the model. Raises RequestError.
    """
    if state is None:
        remedy = "start the router with --reasoning-parser, or leave it out"
        text = f"thinking_token_budget needs the markers of the model's reasoning; {remedy}"
        raise RequestError(text, "thinking_token_budget")
    if state.markers is None:  # the prompt has ended the reasoning
        return NO_THINKING_BUDGET
    start, end = (tuple(tokenizer.encode(text, False)) for text in (state.markers.start, state.markers.end))
    return ThinkingParams(
        token_budget=min(budget, 2**31 - 1),
        start_ids=() if state.opened else start,
        end_ids=end,
        call_ids=tuple(tuple(tokenizer.encode(text, False)) for text in call_markers),
    )
