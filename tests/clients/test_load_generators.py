"""Load generators: all requests of each program succeed, with the requested number of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from environment import Environment
from serving import Service

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

REQUESTS = 40
STREAMS = 8
PROMPT_TOKENS = 100
OUTPUT_TOKENS = 20
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_gets_all_requested_tokens(path: str, simulated_service: Service, tmp_path: Path) -> None:
    service = simulated_service
    report = tmp_path / "report.json"
    backend = f"kind=openai_http,target={service.url},model={service.model},api_key={service.key},request_format={path}"
    flags = ["--backend", backend, "--profile", f"kind=concurrent,streams={STREAMS}"]
    flags += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    flags += ["--tokenizer", f"kind=huggingface_auto,model={service.model_dir}"]
    flags += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
    flags += ["--output", f"kind=json,path={report}", "--disable-console"]
    Environment("guidellm").run(["guidellm", "run", *flags], OFFLINE)
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    outputs = metrics["output_token_count"]["successful"]
    assert outputs["min"] == outputs["max"] == OUTPUT_TOKENS
    assert metrics["prompt_token_count"]["successful"]["min"] >= PROMPT_TOKENS  # a chat adds the template's tokens


@pytest.mark.parametrize("kind", ["completions", "chat", "responses"])
def test_aiperf_gets_all_requested_tokens(kind: str, simulated_service: Service, tmp_path: Path) -> None:
    service = simulated_service
    flags: list[object] = ["--url", service.url, "--api-key", service.key, "--model", service.model]
    flags += ["--tokenizer", service.model_dir, "--endpoint-type", kind, "--streaming", "--use-server-token-count"]
    flags += ["--concurrency", STREAMS, "--request-count", REQUESTS, "--extra-inputs", "ignore_eos:true"]
    flags += ["--synthetic-input-tokens-mean", PROMPT_TOKENS, "--output-tokens-mean", OUTPUT_TOKENS]
    flags += ["--output-artifact-dir", tmp_path, "--ui", "none"]
    Environment("aiperf").run(["aiperf", "profile", *map(str, flags)], {})
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["error_summary"] == []
    if kind == "responses":
        return  # aiperf reads usage only from response.completed; these responses end with response.incomplete
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == OUTPUT_TOKENS
    assert report["input_sequence_length"]["min"] >= PROMPT_TOKENS


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve_gets_all_requested_tokens(backend: str, simulated_service: Service, tmp_path: Path) -> None:
    service = simulated_service
    endpoint = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    flags: list[object] = [
        "--backend",
        backend,
        "--base-url",
        service.url,
        "--endpoint",
        endpoint,
        "--model",
        service.model,
    ]
    flags += ["--tokenizer", service.model_dir, "--dataset-name", "random", "--ignore-eos"]
    flags += ["--random-input-len", PROMPT_TOKENS, "--random-output-len", OUTPUT_TOKENS]
    flags += ["--num-prompts", REQUESTS, "--max-concurrency", STREAMS, "--disable-tqdm"]
    flags += ["--save-result", "--result-dir", tmp_path, "--result-filename", "report.json"]
    Environment("vllm").run(["vllm", "bench", "serve", *map(str, flags)], {**OFFLINE, "OPENAI_API_KEY": service.key})
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"]) == (REQUESTS, 0)
    assert report["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
