"""Responses name the nodes that served them."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fleet import MODEL_NAME, Fleet
from machine import patience
from watched_fleet import HOSTILE


@pytest.mark.parametrize("stream", [True, False])
def test_headers_name_both_nodes_of_a_handoff(fleet: Fleet, stream: bool) -> None:
    prompt = [(7 + stream) * number % 4000 + 3 for number in range(400)]
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "stream": stream}
    response = httpx.post(
        f"{fleet.url}/v1/completions", json=body, trust_env=False, timeout=patience(30)
    ).raise_for_status()
    assert response.headers["x-pdserve-prefill-node"] == "p-one"
    assert unquote(response.headers["x-pdserve-decode-node"]) in ("d-one", HOSTILE)
