"""Patterns with look-ahead match the same texts without it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.structured.look_ahead import without_look_ahead
from router.text.structured.work_budget import Budget

ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
PATTERNS = [
    ZOD_DURATION,
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",  # pydantic's Decimal
    r"^(?=.*[A-Z])(?=.*\d).{3,64}$",
    r"^(?!\s*$).+",
    r"^(?!(?:ab|aab)$)[ab]+$",
    r"a(?!b)",
    r"^a(?=b)b|^c(?!d)",
    r"^(?=.{3,5}$)[ab]+$",
    r"^(a(?!b))?b$",
    r"^(?:(?!aa)[ab])c$",
    r"^(?<first>a)(?![^bc])(?:b*|c{2})$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from([*"abcPTWD19.@A-+ ", "P1", "T2S", "ab", "a@b"]), max_size=6).map("".join))
def test_rewritten_patterns_match_the_same_texts(pattern: str, text: str) -> None:
    rewritten = without_look_ahead(pattern, Budget())
    assert rewritten is not None
    as_python = [re.sub(r"\\x\{([0-9A-F]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", part) for part in rewritten]
    expected = re.search(pattern.replace("(?<first>", "(?P<first>"), text, re.ASCII)
    assert all(re.search(part, text) for part in as_python) == bool(expected)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(?<=a)b(?!c)", r"(?:(?!a).)*$", r"(?!\bb)", r"(?!\p{L})", "(?!(", r"(a)(?!\1)", "(?i)(?!a)b"),
        *("^(?!" + "a?" * 450 + "b)c", "^(?!(a|b)*a(a|b){12})", "^(?=a{9999})(?!b)", "(?!a)" * 500),
        "^(?!" + "(a|b|" * 90 + "c" + ")*" * 90 + "d)",
    ],
)
def test_unknown_and_large_patterns_are_left(pattern: str) -> None:
    assert without_look_ahead(pattern, Budget()) is None
