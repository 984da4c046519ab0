"""bench/fuzz_requests.py: one fleet, whose answers are equal in all situations."""

from __future__ import annotations

import sys

import fuzz_requests
import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_are_equal_in_all_situations(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--seed", "2", "--fleet", "0", "--rounds", "1", "--runners", "V1", "--vocabularies", "4099", "4133"]
    monkeypatch.setattr(sys, "argv", ["fuzz_requests.py", *flags])
    assert fuzz_requests.main() == 0
