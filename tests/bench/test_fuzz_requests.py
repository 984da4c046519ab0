"""bench/fuzz_requests.py: one fleet, whose answers are equal in all situations."""

from __future__ import annotations

import sys

import fuzz_requests
import pytest

TEXT = ("--kinds", "plain", "window", "latent", "recurrent", "--vocabularies", "4099", "4133")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [TEXT, ("--kinds", "images")], ids=["text", "images"])
def test_answers_are_equal_in_all_situations(kind: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--seed", "2", "--fleet", "0", "--rounds", "1", "--runners", "V1", *kind]
    monkeypatch.setattr(sys, "argv", ["fuzz_requests.py", *flags])
    assert fuzz_requests.main() == 0
