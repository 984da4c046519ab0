"""The compliance tests of Open Responses, as llm-comply has them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from environment import Environment
from serving import REAL_NODES, Service, serve

from pdserve.checkpoint.hub import EMBEDDED_MODEL

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

# docs/clients.md says why.
FAILS = {"image-input", "error-handling"}
ENDS = [0, 2, *range(1000, 1060)]  # EOS: 62 of 4096 tokens, so that answers of random weights are short


@pytest.fixture(scope="module")
def brief_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A model with random weights whose answers end soon. Answers of the trained model may fill its context."""
    directory = tmp_path_factory.mktemp("brief")
    model_dir = Path(shutil.copytree(EMBEDDED_MODEL, directory / "model"))
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    with serve(directory, (*REAL_NODES, "--load-format", "dummy"), model_dir) as service:
        yield service


def test_open_responses_compliance(brief_service: Service) -> None:
    command = ["llm-comply", "--base-url", f"{brief_service.url}/v1", "--model", brief_service.model, "--json"]
    variables = {"OPENRESPONSES_API_KEY": brief_service.key}
    output = json.loads(Environment("open-responses").run(command, variables, statuses=(0, 1)))
    results = {result["id"]: result for result in output["results"]}
    assert {name for name, result in results.items() if result["status"] == "failed"} == FAILS, output
    assert sum(result["status"] == "passed" for result in results.values()) == 10
