"""Checks of a request before it is sent to the engine. Errors state value and limit, and match the router's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from pdserve.config.node_config import NodeConfig
from pdserve.errors import RequestError, RequestTooLong
from pdserve.grammar import check_size
from pdserve.ranges import ranges_of, within
from pdserve.rpc.protobuf import count_tokens
from pdserve.sampling_params import TOKEN_ID_LISTS, SamplingParams


def check_request(token_ids: bytes, sampling: SamplingParams, config: NodeConfig, max_tokens: int | None = None) -> int:
    """Return the number of a prompt's tokens, which stay packed. Raises RequestError if this node can never serve it.

    ``max_tokens`` replaces ``sampling.max_tokens``: a pooled prompt gets no output.
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
        within("resume: choice", choice, 0, sampling.n - 1)
        within("resume: number of output tokens", count_tokens(output), 1, sampling.max_tokens - 1)
        _check_ids("resume", "token id", (_largest(output),), config.model.vocab_size)


def check_skip(skip_tokens: int, num_tokens: int, block_size: int) -> None:
    """Raise RequestError unless ``skip_tokens`` is a multiple of the block size and less than the prompt."""
    if skip_tokens % block_size or skip_tokens >= num_tokens:
        raise RequestError(
            f"skip_tokens {skip_tokens} must be a multiple of block_size {block_size} below the prompt's {num_tokens} "
            "tokens",
            "skip_tokens",
        )


def prepare() -> None:
    """Import numpy for the checks of requests: it takes 0.2 s, and the engine loads meanwhile."""
    import numpy as np  # noqa: F401


def _largest(token_ids: bytes) -> int:
    import numpy as np

    return int(np.frombuffer(token_ids, "<u4").max())


def _check_sampling(sampling: SamplingParams, config: NodeConfig) -> None:
    vocab_size = config.model.vocab_size
    for name, allowed in ranges_of(SamplingParams).items():
        value = getattr(sampling, name)
        for number in value.values() if isinstance(value, dict) else (value,):
            allowed.check(name, number)
    within("n", sampling.n, 1, config.max_num_seqs)
    within("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    within("logprobs", sampling.logprobs, -1, vocab_size)
    for name in ("logit_bias", *TOKEN_ID_LISTS):
        _check_ids(name, "token id", getattr(sampling, name), vocab_size)
    if len(set(sampling.logprob_token_ids)) != len(sampling.logprob_token_ids):
        raise RequestError("logprob_token_ids has a token id twice; leave it out", "logprob_token_ids")
    if not all(sampling.bad_words):
        raise RequestError("bad_words has an entry without tokens; leave it out", "bad_words")
    _check_ids("bad_words", "token id", chain.from_iterable(sampling.bad_words), vocab_size)
    check_size(sampling.grammar)


def _check_ids(name: str, what: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name}: {what} {token_id} is outside the vocabulary; the largest is {vocab_size - 1}", name
            )
