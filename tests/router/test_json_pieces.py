"""Large responses are encoded in bounded pieces, to the same bytes as at once."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.completions_api.response_objects import (
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    lazy_chat_logprobs,
    lazy_completion_logprobs,
)
from router.dialect.json_pieces import json_chunks, json_pieces, lazy_list, lazy_numbers
from router.generation.logprob_table import LogprobTable
from router.generation.token_logprob import TokenLogprob
from router.text.tokenizer import Tokenizer


class Tagged(msgspec.Struct, tag="tagged"):
    text: str
    rest: list[Tagged] = []
    extra: Any | msgspec.UnsetType = msgspec.UNSET


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(width=32, allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.builds(Tagged, st.text(), st.just([]), extra=inner)
    ),
)


@given(st.builds(Tagged, st.text(), st.lists(st.builds(Tagged, st.text(), extra=values)), extra=values))
def test_pieces_are_what_msgspec_encodes(value: Tagged) -> None:
    assert b"".join(json_pieces(value)) == msgspec.json.encode(value)


@given(st.lists(st.lists(st.integers(0, 9))))
def test_lazy_list_encodes_as_a_list(parts: list[list[int]]) -> None:
    assert b"".join(json_pieces({"a": lazy_list(lambda: parts)})) == msgspec.json.encode(
        {"a": [item for part in parts for item in part]}
    )


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 5000])
def test_long_texts_and_arrays_are_split(size: int) -> None:
    text = '"\\ü\N{GRINNING FACE}' * 40 * size
    chunks = list(json_chunks({"text": text, "ids": lazy_numbers(array("I", range(size)))}))
    assert json.loads(b"".join(chunks)) == {"text": text, "ids": list(range(size))}
    assert max(map(len, chunks)) < 1_000_000


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


tokens = st.lists(
    st.builds(
        TokenLogprob,
        st.integers(0, 400),
        st.integers(0, 2**31),
        st.floats(-100, 0, width=32),
        st.lists(st.tuples(st.integers(0, 400), st.floats(-100, 0, width=32)), max_size=3),
    ),
    max_size=200,
)


@given(st.lists(tokens, max_size=3), st.integers(0, 3))
def test_tables_encode_like_their_tokens(tokenizer: Tokenizer, parts: list[list[TokenLogprob]], num_top: int) -> None:
    names = TokenNames(tokenizer)
    tables = [LogprobTable() for _ in parts]
    for table, part in zip(tables, parts, strict=True):
        for token in part:
            table.add(token)
    every = [token for part in parts for token in part]
    for lazy, eager in (
        (lazy_completion_logprobs, completion_logprobs),
        (lazy_chat_logprobs, chat_logprobs),
    ):
        pieces = b"".join(json_pieces(lazy(names, tables, num_top)))
        assert pieces == msgspec.json.encode(eager(names, every, num_top))
