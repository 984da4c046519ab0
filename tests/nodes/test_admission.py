"""Requests that a node refuses; each refusal states value and limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from checkpoints import node_config

from node.request_checks import check_request, check_skip
from pdserve.config.node_config import NodeConfig
from pdserve.errors import RequestError, RequestTooLong
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> NodeConfig:
    return node_config(checkpoint, max_model_len=64)


@pytest.mark.parametrize("prompt", [[0], [127] * 63, list(range(62))])
def test_what_fits_is_accepted(prompt: list[int], config: NodeConfig) -> None:
    check_request(pack_tokens(prompt), SamplingParams(max_tokens=64 - len(prompt)), config)


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ([], {}, ["0 tokens"]),
        ([5, 128], {}, ["128", "127"]),
        ([2**32 - 1], {}, [str(2**32 - 1)]),
        ([1], {"max_tokens": 0}, ["max_tokens is 0", "at least 1"]),
        ([1], {"n": 0}, ["n is 0"]),
        ([1], {"n": 10_000}, ["n is 10000", "at most"]),
        ([1], {"min_tokens": 9}, ["min_tokens is 9", "8"]),
        ([1], {"temperature": -0.5}, ["temperature is -0.5"]),
        ([1], {"temperature": math.nan}, ["temperature is nan"]),
        ([1], {"temperature": math.inf}, ["temperature is inf"]),
        ([1], {"top_p": 0.0}, ["top_p is 0.0", "above 0"]),
        ([1], {"top_p": 1.5}, ["top_p is 1.5", "at most 1"]),
        ([1], {"min_p": 2.0}, ["min_p is 2.0"]),
        ([1], {"repetition_penalty": 0.0}, ["repetition_penalty is 0.0"]),
        ([1], {"presence_penalty": math.nan}, ["presence_penalty is nan"]),
        ([1], {"logprobs": -2}, ["logprobs is -2"]),
        ([1], {"logprobs": 129}, ["logprobs is 129", "128"]),
        ([1], {"logit_bias": {128: 1.0}}, ["logit_bias", "128", "127"]),
        ([1], {"logit_bias": {1: math.nan}}, ["logit_bias is nan"]),
        ([1], {"stop_token_ids": (500,)}, ["stop_token_ids", "500"]),
        ([1], {"adapter": "A" * 64}, ["no digest", "64 hexadecimal digits"]),
    ],
)
def test_refusals(prompt: list[int], fields: dict[str, Any], words: list[str], config: NodeConfig) -> None:
    with pytest.raises(RequestError) as raised:
        check_request(pack_tokens(prompt), SamplingParams(**{"max_tokens": 8, **fields}), config)
    for word in words:
        assert word in str(raised.value)


def test_too_long_names_both_lengths(config: NodeConfig) -> None:
    with pytest.raises(RequestTooLong) as raised:
        check_request(pack_tokens([1] * 60), SamplingParams(max_tokens=5), config)
    for number in ("60", "5", "65", "64"):
        assert number in str(raised.value)


@pytest.mark.parametrize("skip", [1, 15, 64, 80])
def test_skipping_is_by_whole_blocks_of_the_prompt(skip: int) -> None:
    check_skip(48, 64, 16)
    with pytest.raises(RequestError, match=str(skip)):
        check_skip(skip, 64, 16)
