"""A fleet exports exactly the metrics of docs/metrics.md over HTTP, and their values follow its state."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from exposition import documented_metrics, metrics_url, samples, scrape, value
from fleet import MODEL_NAME, Fleet, NodeProcess, copy_without_weights, start_fleet
from lora_adapters import make_adapter
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from router.gate.api_keys import key_entry, new_key

NODE = ["--engine", "simulated", "--metrics-port", "0", "--synthetic-acceptance", "2", "--max-num-seqs", "64"]
SLOW = ["--sim-costs", "prompt-token=0.004", "--max-batch-tokens", "256"]  # a step takes one second
KEY = new_key()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = copy_without_weights(tmp_path_factory.mktemp("model"))
    keys = directory / "keys.toml"
    keys.write_text(key_entry("alice", KEY))
    router = ["--api-keys", str(keys), "--metrics-port", "0", "--metrics-client-names"]
    adapter = make_adapter(directory.parent / "adapter", directory, "all")
    node = [*NODE, "--peer-timeout", f"{patience(2.0):g}", "--lora", f"formal={adapter}"]
    listed = directory / "sources"
    listed.touch()
    prefill = [*node, *SLOW, "--kv-source", f"file://{listed}"]
    with start_fleet(directory, prefill_flags=prefill, decode_flags=node, router_flags=router) as fleet:
        new = listed.with_suffix(".new")
        new.write_text(fleet.decode[0].address)
        new.rename(listed)
        fleet.wait_until(lambda: list(fleet.prefill[0].describe().connected_peers) != [], 20.0)
        yield fleet


def complete(fleet: Fleet, num_tokens: int, seed: int) -> None:
    prompt = random.Random(seed).choices(range(3, 4096), k=num_tokens)
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    headers = {"authorization": f"Bearer {KEY}"}
    assert (
        httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=patience(60.0)).status_code == 200
    )


def read(node: NodeProcess, name: str, **labels: str) -> float:
    return value(scrape(metrics_url(node)), name, **labels)


def test_documented_metrics_equal_the_exported_ones(fleet: Fleet) -> None:
    complete(fleet, 100, seed=1)
    assert fleet.router is not None
    urls = {
        "R": metrics_url(fleet.router),
        "P": metrics_url(fleet.prefill[0]),
        "D": metrics_url(fleet.decode[0]),
    }
    for role, url in urls.items():
        families = scrape(url)
        exported = {
            (
                family.name,
                family.type,
                frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
            )
            for family in families
        }
        assert exported == {(row.name, row.type, row.labels) for row in documented_metrics() if role in row.on}
        series = {name: labels for row in documented_metrics() for name, labels in row.series.items()}
        assert all(sample.labels.keys() == series[sample.name] for sample in samples(families))


def test_status_call_has_the_exported_metrics(fleet: Fleet) -> None:
    for node in (*fleet.prefill, *fleet.decode):
        names = {key.partition("{")[0] for key in node.status().counters}
        exported = {sample.name for sample in samples(scrape(metrics_url(node)))}
        assert names == {name for name in exported if "process_" not in name}


def test_node_exports_its_backlog(fleet: Fleet) -> None:
    (prefill,) = fleet.prefill
    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(complete, fleet, 300, seed) for seed in (2, 3)]
        fleet.wait_until(lambda: read(prefill, "pdserve_prompt_backlog_tokens") > 256, 10.0)
        fleet.wait_until(lambda: read(prefill, "pdserve_prompt_backlog_seconds") > 0.25, 10.0)
        assert read(prefill, "pdserve_kv_use_ratio") > 0
        for answer in answers:
            answer.result(patience(30.0))
    status = prefill.wait_idle()
    families = scrape(metrics_url(prefill))
    assert value(families, "pdserve_prompt_backlog_seconds") == 0
    assert value(families, "pdserve_kv_blocks", use="free") == status.total_blocks
    assert value(families, "pdserve_kv_use_ratio") == 0
    assert value(families, "pdserve_step_seconds_total") >= 600 * 0.004
    assert value(families, "pdserve_node_info", role="prefill", model=MODEL_NAME, runner="simulated") == 1
    assert value(families, "pdserve_engine_process_resident_memory_bytes") > 1 << 20


def test_node_with_a_hung_engine_exports_stuck(fleet: Fleet) -> None:
    (prefill,) = fleet.prefill
    assert read(prefill, "pdserve_node_state", state="ready") == 1
    prefill.stop("engine")
    fleet.wait_until(lambda: read(prefill, "pdserve_node_state", state="stuck") == 1, 10.0)
    assert read(prefill, "pdserve_node_state", state="ready") == 0
    prefill.resume("engine")
    fleet.wait_until(lambda: read(prefill, "pdserve_node_state", state="ready") == 1, 10.0)


def test_metrics_port_serves_nothing_else(fleet: Fleet) -> None:
    url = metrics_url(fleet.decode[0]).removesuffix("/metrics")
    assert [httpx.get(url + path).status_code for path in ("/", "/metrics/x", "/metrics")] == [404, 404, 200]


def test_used_metrics_port_is_refused_before_loading(fleet: Fleet) -> None:
    port = metrics_url(fleet.decode[0]).removesuffix("/metrics").rpartition(":")[2]
    command = [sys.executable, "-m", "prefill_node", str(EMBEDDED_MODEL), "--device", "cpu", "--metrics-port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 2
    remedy = "choose another --metrics-port, or 0 for any"
    assert f"port {port} on 127.0.0.1 is in use; {remedy}" in done.stderr.splitlines()[-1]
