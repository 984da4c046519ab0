"""A checked request: token ids and sampling parameters, nothing left open."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from pdserve.errors import RequestError, RequestTooLong
from pdserve.records import SamplingParams
from router.http.request_bodies import ChatBody, GenerateBody

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; chat goes on to the model's length
_SEED_BITS = 63
_SEED_RANGE = 2**64  # negative seeds are taken modulo this


class JobLimits(msgspec.Struct, frozen=True):
    """What the model behind the fleet can take, in tokens and token ids."""

    max_model_len: int
    vocab_size: int


class Prompt(msgspec.Struct, frozen=True):
    """``text`` is what the client wrote, where it was text, and what is echoed, where that was asked for.

    ``offsets`` are where each token begins in it, where that is to be told.
    """

    token_ids: Sequence[int]
    text: str | None = None
    offsets: Sequence[int] = ()


class Job(msgspec.Struct, frozen=True):
    """One prompt with its sampling parameters. ``silent``: no output is asked for, and the one token is not told."""

    prompt: Prompt
    sampling: SamplingParams
    silent: bool = False


def truncated(prompt: Prompt, body: GenerateBody, limits: JobLimits) -> Prompt:
    """The end of a prompt, where the client asks for no more than that.

    As many tokens as the model has room for are those beside the output asked for, or beside one token.
    """
    most = body.truncate_prompt_tokens
    if most == -1:
        most = max(1, limits.max_model_len - (body.output_limit or 1))
    if most is None or len(prompt.token_ids) <= most:
        return prompt
    # The text of a chat stays: what follows the prompt is read by its end.
    return Prompt(prompt.token_ids[-most:], prompt.text if isinstance(body, ChatBody) else None)


def make_job(prompt: Prompt, body: GenerateBody, limits: JobLimits, grammar: str = "") -> Job:
    """``grammar`` is what every output is to follow. Raises RequestError when the model cannot take this."""
    _check_vocabulary("prompt", prompt.token_ids, limits)
    _check_vocabulary("stop_token_ids", body.stop_token_ids, limits)
    bias = _logit_bias(body.logit_bias)
    _check_vocabulary("logit_bias", list(bias), limits)
    max_tokens = _max_tokens(len(prompt.token_ids), body, limits.max_model_len)
    if body.min_tokens > max_tokens:
        raise RequestError(f"min_tokens {body.min_tokens} exceeds max_tokens {max_tokens}; lower it", "min_tokens")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        n=body.n,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=max(body.top_k, 0),  # -1 is off, too
        top_p=body.top_p,
        min_p=body.min_p,
        seed=random.getrandbits(_SEED_BITS) if body.seed is None else body.seed % _SEED_RANGE,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=bias,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=body.num_logprobs,
        grammar=grammar,
        prompt_logprobs=body.most_prompt_logprobs,
    )
    return Job(prompt, sampling, body.output_limit == 0)


def _max_tokens(prompt_len: int, body: GenerateBody, limit: int) -> int:
    """What the client asked for, or a default cut to the room there is; one at least, for a node draws one."""
    if prompt_len == 0:
        raise RequestError("the prompt has 0 tokens; give at least one", _prompt_field(body))
    room = limit - prompt_len
    wanted = None if body.output_limit is None else max(body.output_limit, 1)
    if wanted is None:
        wanted = max(room, 1) if isinstance(body, ChatBody) else min(_DEFAULT_COMPLETION_TOKENS, max(room, 1))
    if wanted > room:
        remedy = f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"
        raise RequestTooLong(
            f"prompt {prompt_len} tokens + max_tokens {wanted} > limit {limit}; {remedy}",
            "max_tokens" if room > 0 else _prompt_field(body),
            "context_length_exceeded",
        )
    return wanted


def _prompt_field(body: GenerateBody) -> str:
    return "messages" if isinstance(body, ChatBody) else "prompt"


def _check_vocabulary(field: str, token_ids: Sequence[int], limits: JobLimits) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < limits.vocab_size)
    raise RequestError(f"token id {wrong} is outside the vocabulary 0 … {limits.vocab_size - 1}", field)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        ids = {int(token_id): value for token_id, value in bias.items()}
    except ValueError as exc:
        raise RequestError("logit_bias must map token ids to numbers", "logit_bias") from exc
    if not all(math.isfinite(value) for value in ids.values()):
        raise RequestError("logit_bias holds a value that is not finite", "logit_bias")
    return ids
