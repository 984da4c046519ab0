"""lm-evaluation-harness yields the same scores over HTTP as with transformers on the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from environment import Environment
from serving import Service

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

# No task is downloaded. With random weights the texts' meaning does not matter, only their lengths and tokens.
DOCUMENTS = [
    {"context": "The quick brown fox jumps over", "choices": [" the lazy dog", " a fence", " it"], "label": 0},
    {"context": "One, two, three,", "choices": [" four", " vier und fünf", " 4"], "label": 0},
    {"context": "def add(a, b):\n    return", "choices": [" a + b", " a - b", " None"], "label": 0},
    {"context": "Wer nichts weiß, muss", "choices": [" alles glauben.", " schweigen."], "label": 0},
    {"context": "x" * 300, "choices": ["?", "y"], "label": 0},  # "?" is the model's own continuation
]
COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
"""
TASKS = {
    "pd_likelihood": """\
output_type: loglikelihood
doc_to_target: "{{choices[0]}}"
target_delimiter: ""
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "pd_choice": """\
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "pd_generate": """\
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    data = directory / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, particular in TASKS.items():
        (directory / f"{name}.yaml").write_text(COMMON.format(name=name, data=data) + particular)
    return directory


class Evaluation(NamedTuple):
    """Responses for each document, and scores, by task."""

    responses: dict[str, list[Any]]
    results: dict[str, Any]


def evaluate(service: Service, tasks: Path, output: Path, flags: Sequence[str]) -> Evaluation:
    flags = ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--output_path", str(output), *flags]
    variables = {"OPENAI_API_KEY": service.key, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(output / "cache")}
    Environment("lm-eval").run(["lm_eval", "run", *flags, "--log_samples"], variables)
    responses: dict[str, list[Any]] = {}
    for name in TASKS:
        (file,) = output.rglob(f"samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))
        responses[name] = [sample["resps"] for sample in samples]
    (file,) = output.rglob("results_*.json")
    return Evaluation(responses, json.loads(file.read_text())["results"])


@pytest.fixture(scope="module")
def both(service: Service, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Evaluation]:
    """Evaluations over HTTP and with transformers."""
    arguments = f"base_url={service.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={service.model_dir}"
    served = ["--model", "local-completions", "--batch_size", "3"]
    served += ["--model_args", f"model={service.model},{arguments},tokenized_requests=True,max_retries=1"]
    local = ["--model", "hf", "--model_args", f"pretrained={service.model_dir},dtype=float32", "--device", "cpu"]
    ours, theirs = (tmp_path_factory.mktemp(name) for name in ("ours", "theirs"))
    return evaluate(service, tasks, ours, served), evaluate(service, tasks, theirs, local)


@pytest.mark.parametrize("name", TASKS)
def test_scores_equal_those_of_transformers(name: str, both: tuple[Evaluation, Evaluation]) -> None:
    ours, theirs = both
    assert _numbers(ours.responses[name]) == pytest.approx(_numbers(theirs.responses[name]), abs=1e-3)
    assert _words(ours.responses[name]) == _words(theirs.responses[name])
    assert _numbers(ours.results[name]) == pytest.approx(_numbers(theirs.results[name]), rel=1e-3)


def _numbers(value: Any) -> list[float]:
    """Return all numbers in a JSON value; lm-eval logs numbers of samples as strings."""
    return [number for leaf in _leaves(value) if (number := _number(leaf)) is not None]


def _words(value: Any) -> list[Any]:
    """Return all leaves of a JSON value that are not numbers."""
    return [leaf for leaf in _leaves(value) if _number(leaf) is None]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key])]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _number(leaf: Any) -> float | None:
    if isinstance(leaf, bool):
        return None
    try:
        return float(leaf)
    except (TypeError, ValueError):
        return None
