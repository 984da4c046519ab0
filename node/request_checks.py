"""Checks of a request before it is sent to the engine. Errors state value and limit, and match the router's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from pdserve.config.node_config import NodeConfig
from pdserve.errors import RequestError, RequestTooLong
from pdserve.grammar import check_size
from pdserve.records import MAX_PROMPT_LOGPROBS, SamplingParams
from pdserve.rpc.protobuf import count_tokens


def check_request(token_ids: bytes, sampling: SamplingParams, config: NodeConfig, max_tokens: int | None = None) -> int:
    """Return the number of a prompt's tokens, which stay packed. Raises RequestError if this node can never serve it.

    ``max_tokens`` replaces that of ``sampling``: a prompt that is pooled gets no output.
    """
    num_tokens = count_tokens(token_ids)
    if not num_tokens:
        raise RequestError("the prompt has 0 tokens; it needs at least 1", "prompt")
    _check_sampling(sampling, config)
    max_tokens = sampling.max_tokens if max_tokens is None else max_tokens
    total = num_tokens + max_tokens
    if total > config.max_model_len:
        raise RequestTooLong(
            f"the prompt's {num_tokens} tokens and max_tokens {max_tokens} make {total}, more than the "
            f"{config.max_model_len} tokens this model is served with; shorten the prompt or lower max_tokens",
            "max_tokens" if num_tokens < config.max_model_len else "prompt",
            "context_length_exceeded",
        )
    _check_ids("prompt", "token id", (_largest(token_ids),), config.model.vocab_size)
    return num_tokens


def check_resume(resume: Mapping[int, bytes], sampling: SamplingParams, config: NodeConfig) -> None:
    """Raise RequestError unless each choice exists in the request, has output, and may continue."""
    for choice, output in resume.items():
        _check_range("resume: choice", choice, 0, sampling.n - 1)
        _check_range("resume: number of output tokens", count_tokens(output), 1, sampling.max_tokens - 1)
        _check_ids("resume", "token id", (_largest(output),), config.model.vocab_size)


def check_skip(skip_tokens: int, num_tokens: int, block_size: int) -> None:
    """Raise RequestError unless ``skip_tokens`` is a multiple of the block size and less than the prompt."""
    if skip_tokens % block_size or skip_tokens >= num_tokens:
        raise RequestError(
            f"skip_tokens {skip_tokens} must be a multiple of block_size {block_size} below the prompt's {num_tokens} "
            "tokens",
            "skip_tokens",
        )


def _largest(token_ids: bytes) -> int:
    return int(np.frombuffer(token_ids, "<u4").max())


def _check_sampling(sampling: SamplingParams, config: NodeConfig) -> None:
    vocab_size, max_n = config.model.vocab_size, config.max_num_seqs
    _check_range("max_tokens", sampling.max_tokens, 1, math.inf)
    _check_range("n", sampling.n, 1, max_n)
    _check_range("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    _check_range("temperature", sampling.temperature, 0, math.inf)
    _check_range("top_p", sampling.top_p, 0, 1, above=True)
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0, math.inf, above=True)
    _check_range("presence_penalty", sampling.presence_penalty, -math.inf, math.inf)
    _check_range("frequency_penalty", sampling.frequency_penalty, -math.inf, math.inf)
    _check_range("logprobs", sampling.logprobs, -1, vocab_size)
    _check_range("prompt_logprobs", sampling.prompt_logprobs, -1, MAX_PROMPT_LOGPROBS)
    _check_ids("logit_bias", "token id", sampling.logit_bias, vocab_size)
    _check_ids("stop_token_ids", "token id", sampling.stop_token_ids, vocab_size)
    _check_token_rules(sampling, vocab_size)
    check_size(sampling.grammar)
    for bias in sampling.logit_bias.values():
        _check_range("logit_bias", bias, -math.inf, math.inf)


def _check_token_rules(sampling: SamplingParams, vocab_size: int) -> None:
    for name in ("allowed_token_ids", "logprob_token_ids", "thinking_start_ids", "thinking_end_ids"):
        _check_ids(name, "token id", getattr(sampling, name), vocab_size)
    if len(set(sampling.logprob_token_ids)) != len(sampling.logprob_token_ids):
        raise RequestError("logprob_token_ids has a token id twice; leave it out", "logprob_token_ids")
    if not all(sampling.bad_words):
        raise RequestError("bad_words has an entry without tokens; leave it out", "bad_words")
    _check_ids("bad_words", "token id", chain.from_iterable(sampling.bad_words), vocab_size)


def _check_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Raise RequestError unless ``value`` is finite and within low … high; ``above`` excludes ``low``."""
    if math.isfinite(value) and low <= value <= high and not (above and value == low):
        return
    lower = "" if low == -math.inf else f" above {low}" if above else f" at least {low}"
    upper = "" if high == math.inf else f" at most {high}"
    bounds = " and".join(part for part in (lower, upper) if part) or " finite"
    raise RequestError(f"{name} {value} must be{bounds}", name)


def _check_ids(name: str, what: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name}: {what} {token_id} is outside the vocabulary; the largest is {vocab_size - 1}", name
            )
