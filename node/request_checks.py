"""Checks of a request before it is sent to the engine. Errors state value and limit, and match the router's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from pdserve.adapters.adapter import NO_ADAPTER, is_digest
from pdserve.config.node_config import NodeConfig
from pdserve.errors import RequestError, RequestTooLong, shown
from pdserve.grammar import check_size
from pdserve.images import DIGEST_BYTES, ImageInput, ImageMode, Images, ImageSpan, choices_compute_images
from pdserve.pb import pdserve_pb2 as pb
from pdserve.ranges import ranges_of, within
from pdserve.rpc.protobuf import count_tokens, images_from_pb
from pdserve.sampling_params import TOKEN_ID_LISTS, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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


def check_images(spans: Iterable[pb.ImageSpan], token_ids: bytes, config: NodeConfig, last_text: int = 1) -> Images:
    """Return the images of a prompt. Raises RequestError if the node takes none, or if they do not fit the tokens.

    Text of at least ``last_text`` tokens must follow the last image: an output begins behind text.
    """
    images = images_from_pb(spans)
    if not images:
        return images
    accepted = config.image_input
    if config.images is ImageMode.NONE or accepted is None:
        raise RequestError(
            f"the prompt has {len(images)} images, and this node takes text only; start all nodes of a model that "
            "sees with --images on",
            "images",
        )
    import numpy as np

    ids = np.frombuffer(token_ids, "<u4")
    end = 0
    grids: dict[bytes, tuple[int, int]] = {}
    for number, span in enumerate(images, 1):
        fault = _span_fault(span, end, ids[: len(ids) - last_text], accepted)
        grid = grids.setdefault(span.digest, (span.rows, span.columns))
        if not fault and grid != (span.rows, span.columns):
            fault = f"has {span.rows} × {span.columns} tokens; an image of the same digest has {grid[0]} × {grid[1]}"
        if fault:
            raise RequestError(f"image {number} of {len(images)}, at token {span.start}, {fault}", "images")
        end = span.end
    return images


def check_choices(images: Images, n: int, num_tokens: int, config: NodeConfig) -> None:
    """Raise RequestError if a choice but the first would have to compute an image on a node that encodes none.

    Choices begin with a copy of the last block. Those of models with windows in groups of their own compute its tokens.
    """
    if config.images is ImageMode.TOWER or config.copies_blocks:
        return
    block_size = config.kv_layout.block_size
    if choices_compute_images(images, n, num_tokens, block_size):
        raise RequestError(
            f"n is {n}, and the last {num_tokens % block_size} tokens of the prompt, which each choice computes, are "
            "partly an image; this node encodes none. Ask for one choice, or start decode nodes with --images on",
            "n",
        )


def _span_fault(span: ImageSpan, begin: int, ids: NDArray[np.uint32], accepted: ImageInput) -> str:
    """Return what is wrong with an image among ``ids`` that begins at token ``begin`` or later, or an empty string."""
    if len(span.digest) != DIGEST_BYTES:
        return f"has a digest of {len(span.digest)} bytes, not {DIGEST_BYTES}"
    if span.start < begin:
        return f"begins before token {begin}, the end of the image before it"
    if span.end > len(ids):
        return f"ends at token {span.end}; it must end at token {len(ids)} or before"
    height, width = accepted.size(span)
    if not width:
        return f"has {span.columns} columns; a row ends with a token of text in this model, so it has at least 2"
    if max(height, width) > accepted.largest_side:
        return f"has {height} × {width} pixels; a side has at most {accepted.largest_side} in this model"
    if height * width > accepted.max_pixels:
        return f"has {height} × {width} pixels, more than the {accepted.max_pixels} that this model takes"
    from pdserve.image_tokens import ids_of_image

    expected = ids_of_image(accepted, span.rows, span.columns)
    others = (ids[span.start : span.end] != expected).nonzero()[0]
    if not len(others):
        return ""
    index = int(others[0])
    at = span.start + index
    what = "the placeholder" if expected[index] == accepted.token_id else "the end of a row"
    return f"has token {ids[at]} in its place {at}, not {what} {expected[index]}"


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
    if sampling.adapter != NO_ADAPTER and not is_digest(sampling.adapter):
        raise RequestError(
            f"adapter {shown(sampling.adapter)} is no digest; send 64 hexadecimal digits, or none for the base",
            "model",
        )


def _check_ids(name: str, what: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name}: {what} {token_id} is outside the vocabulary; the largest is {vocab_size - 1}", name
            )
