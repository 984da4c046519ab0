"""``pdserve up`` as a user runs it: start, serve, stop; and the end of all processes when one of them dies."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from email.message import Message
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from checkpoints import FAMILIES, make_checkpoint, reference_greedy, reference_model
from fleet import add_tokenizer
from machine import patience
from pooling_checkpoints import make_classifier

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from router.text.tokenizer import Tokenizer

FLAGS = ["--port", "0", "--device", "cpu", "--threads", "1", "--kv-cache-memory", "64MiB"]


class Up:
    """A running ``pdserve up`` with its output in files."""

    def __init__(self, directory: Path, *argv: str) -> None:
        self.out = directory / "out"
        self.err = directory / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli", "up", *FLAGS, *argv], stdout=out, stderr=err, start_new_session=True
            )

    def wait_served(self) -> str:
        """Wait until the printed URL appears, and return it."""
        end = time.monotonic() + patience(90)
        while (match := re.search(r"is served at (http://\S+)", self.out.read_text())) is None:
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < end, self.err.read_text()
            time.sleep(0.05)
        return match[1]

    def descendants(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def child(self, module: str) -> psutil.Process:
        return next(p for p in self.descendants() if module in p.cmdline())


@contextmanager
def started(directory: Path, *argv: str) -> Iterator[Up]:
    up = Up(directory, *argv)
    try:
        yield up
    finally:
        up.process.terminate()
        up.process.wait(patience(10))


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped."""
    mapped = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        mapped |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return mapped


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=patience(10))
    left = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert left == []


def assert_curl_works(command: str) -> None:
    """Run the command that ``up`` prints for the user to copy."""
    if shutil.which("curl") is not None:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=patience(60))
        assert done.stdout.startswith("data: {")
        assert done.stdout.rstrip().endswith("data: [DONE]")


def post(url: str, body: dict[str, Any]) -> Any:
    return post_for_headers(url, body)[0]


def post_for_headers(url: str, body: dict[str, Any], key: str = "") -> tuple[Any, Message]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=patience(60)) as response:
        return json.load(response), response.headers


def in_flight(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=patience(10)) as response:
        match = re.search(r"^pdserve_requests_in_flight (\S+)$", response.read().decode(), re.MULTILINE)
    assert match is not None
    return float(match[1])


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + patience(20)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    """The cost model decides which prompts are handed off; the longest one always is."""
    model = add_tokenizer(make_checkpoint(tmp_path / "m", family))
    reference = reference_model(model)
    with started(tmp_path, str(model)) as up:
        url = up.wait_served()
        for length in (1, 15, 16, 17, 2500):
            prompt = random.Random(length).choices(range(3, 128), k=length)
            body = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            choice = post(f"{url}/v1/completions", body | {"return_token_ids": True})["choices"][0]
            assert choice["token_ids"] == reference_greedy(reference, prompt, 16)


def test_up_serves_and_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    """With the README's flags, the README's first request is handed off, and so is its repetition."""
    first = json.loads((Path(__file__).parents[2] / "docs" / "first-request.json").read_bytes())
    with started(tmp_path, "--handoff-min-tokens", "0") as up:
        url = up.wait_served()
        for _ in range(2):
            answer, headers = post_for_headers(f"{url}/v1/chat/completions", first)
            assert "cellar of the lighthouse" in answer["choices"][0]["message"]["content"]
            assert headers["X-Pdserve-Prefill-Node"] not in (None, headers["X-Pdserve-Decode-Node"])
        prompt = "The import statement binds a name to a module. " * 10
        answer = post(f"{url}/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 8
        chat = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4}
        assert post(f"{url}/v1/chat/completions", chat)["choices"][0]["message"]["role"] == "assistant"
        assert_curl_works(up.out.read_text().split("Try:")[1])
        processes = up.descendants()
        assert len(processes) >= 5  # P and D with an engine each, and the router
        memory = shared_memory_of(processes)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(patience(10)) == 0
        assert_gone(processes)
        assert [file for file in memory if file.exists()] == []
    shown = up.err.read_text()
    assert "Traceback" not in shown
    assert shown.index("starting ") < shown.index("prefill: importing libraries") < shown.index("prefill is ready")


@pytest.mark.parametrize("flags", [("--elastic",), pytest.param(("--prefill", "2"), marks=pytest.mark.slow)])
def test_up_serves_a_model_by_two_names_and_hands_off_from_the_first_request(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    names = ["a", "some/b"]
    simulated = ["--engine", "simulated", "--sim-speed", "10", "--handoff-min-tokens", "0", "--api-key", "sk-1"]
    with started(tmp_path, str(EMBEDDED_MODEL), "--served-model-name", *names, *simulated, *flags) as up:
        body = {"prompt": [3, 4, 5], "max_tokens": 8, "temperature": 0}
        url = up.wait_served()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(f"{url}/v1/completions", {**body, "model": "a"})
        answers = [post_for_headers(f"{url}/v1/completions", {**body, "model": name}, "sk-1") for name in names]
        assert not any("sk-1" in process.cmdline() for process in up.descendants())
        assert "-H 'Authorization: Bearer KEY'" in up.out.read_text()
        processes = up.descendants()
        up.process.kill()  # its children end
        up.process.wait(patience(5))
        assert_gone(processes)
    assert [answer["model"] for answer, _ in answers] == ["a", "a"]
    texts = [answer["choices"][0]["text"] for answer, _ in answers]
    assert texts[0] == texts[1] != ""
    for _, headers in answers:
        assert headers["X-Pdserve-Prefill-Node"] not in (None, headers["X-Pdserve-Decode-Node"])


@pytest.mark.slow
def test_ctrl_c_ends_running_answers_at_once(tmp_path: Path) -> None:
    """Ctrl-C also ends a drain."""
    costs = ("--engine", "simulated", "--sim-costs", "step=1", "--drain-timeout", "600")
    with started(tmp_path, *costs) as up, ThreadPoolExecutor() as threads:
        body = {"model": "tiny", "prompt": list(range(3, 103)), "max_tokens": 1000}
        url = up.wait_served()
        answer = threads.submit(post, f"{url}/v1/completions", body)
        wait_until(lambda: in_flight(url) == 1)
        up.process.terminate()
        wait_until(lambda: "draining" in up.err.read_text())
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(patience(20)) == 0
        with pytest.raises(urllib.error.HTTPError) as failed:
            answer.result(patience(30))
        failed.value.close()


@pytest.mark.slow
def test_up_serves_a_reranker_without_decode_nodes(tmp_path: Path) -> None:
    directory = make_classifier(tmp_path / "reranker")
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    tokenizer = Tokenizer.load(directory)
    documents = ["a", "naïve café", *(f"document {index}" for index in range(6))]
    with torch.no_grad():
        pairs = [torch.tensor([tokenizer.encode(("query", document))]) for document in documents]
        scores = [float(model(pair).logits[0, 0].sigmoid()) for pair in pairs]
    with started(tmp_path, str(directory)) as up:
        url = up.wait_served()
        assert not any("decode_node" in process.cmdline() for process in up.descendants())
        assert "/v1/rerank" in up.out.read_text()
        results = post(f"{url}/v1/rerank", {"query": "query", "documents": documents})["results"]
    assert [result["index"] for result in results] == sorted(range(8), key=lambda index: -scores[index])
    assert [result["relevance_score"] for result in results] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)


def tokens_of(url: str, seed: int) -> list[int]:
    """Return 100 tokens after a prompt of 300, which is long enough for a handoff."""
    prompt = random.Random(seed).choices(range(3, 128), k=300)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "seed": seed, "ignore_eos": True}
    tokens: list[int] = post(f"{url}/v1/completions", body | {"return_token_ids": True})["choices"][0]["token_ids"]
    return tokens


def ready_nodes(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=patience(10)) as response:
        return set(re.findall(r'^pdserve_nodes_ready\{.*role="(\w+)".*\} 1', response.read().decode(), re.MULTILINE))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Yield a simulated fleet for the next three tests; the last one ends it."""
    with started(tmp_path_factory.mktemp("simulated"), "--engine", "simulated", "--sim-costs", "step=0.01") as up:
        yield up


@pytest.mark.slow
def test_prefill_node_that_dies_starts_again_and_no_request_notices(simulated: Up) -> None:
    up = simulated
    with ThreadPoolExecutor(20) as threads:
        url = up.wait_served()
        expected = [tokens_of(url, seed) for seed in range(3)]
        answers = [threads.submit(tokens_of, url, seed % 3) for seed in range(20)]
        wait_until(lambda: in_flight(url) > 10)
        up.child("prefill_node").kill()
        assert [answer.result(patience(90)) for answer in answers] == [expected[seed % 3] for seed in range(20)]
        wait_until(lambda: ready_nodes(url) == {"prefill", "decode"})
        assert up.process.poll() is None
        assert "prefill was killed by SIGKILL" in up.err.read_text()


@pytest.mark.slow
def test_router_and_engine_that_die_start_again(simulated: Up) -> None:
    up = simulated
    url = up.wait_served()
    expected = tokens_of(url, 1)
    ready = up.err.read_text().count("is ready after")
    killed = [up.child("router"), up.child("decode_node").children()[0]]
    for process in killed:
        process.kill()
    wait_until(lambda: "decode ended" in up.err.read_text() and "router was killed" in up.err.read_text())
    wait_until(lambda: up.err.read_text().count("is ready after") == ready + 2)
    wait_until(lambda: ready_nodes(url) == {"prefill", "decode"})
    assert tokens_of(url, 1) == expected


def test_sigterm_lets_running_answers_finish(simulated: Up) -> None:
    """The router drains first; then the nodes end."""
    up = simulated
    with ThreadPoolExecutor() as threads:
        body = {"model": "tiny", "prompt": list(range(3, 103)), "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        url = up.wait_served()
        processes = up.descendants()
        answer = threads.submit(post, f"{url}/v1/completions", body)
        wait_until(lambda: in_flight(url) == 1)
        up.process.terminate()
        assert answer.result(patience(30))["usage"]["completion_tokens"] == 200
        assert up.process.wait(patience(20)) == 0
        assert_gone(processes)
    assert "Traceback" not in up.err.read_text()


@pytest.mark.slow
def test_up_ends_when_a_process_dies_again_and_again(tmp_path: Path) -> None:
    with started(tmp_path, "--engine", "simulated") as up:
        up.wait_served()
        processes = up.descendants()
        while up.process.poll() is None:
            with suppress(StopIteration, psutil.NoSuchProcess):
                up.child("prefill_node").kill()
            time.sleep(0.05)
        assert up.process.returncode != 0
        assert_gone(processes)
    last = up.err.read_text().strip().splitlines()[-1]
    assert last.startswith("pdserve: error: prefill was killed by SIGKILL")
    assert "5 times in a row" in last


@pytest.mark.slow
def test_up_reports_a_broken_checkpoint_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(EMBEDDED_MODEL, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"layers.3.mlp.up_proj", b"layers.3.mlp.xx_proj"))
    with started(tmp_path, str(broken)) as up:
        processes = up.descendants()
        assert up.process.wait(patience(90)) == 2
        assert_gone(processes)
    shown = [line for line in up.err.read_text().splitlines() if " INFO " not in line]
    assert len(shown) == 1, shown  # no line about the router's lost node, no second line of the node
    assert shown[0].startswith("pdserve: error: ")
    assert "layers.3.mlp" in shown[0]


@pytest.mark.parametrize("reaches_child", [False, True])
def test_ctrl_c_during_start_leaves_no_process(tmp_path: Path, reaches_child: bool) -> None:
    """Ctrl-C also reaches a child that was just forked: its death is no failure."""
    with started(tmp_path) as up:
        end = time.monotonic() + patience(30)
        while not up.descendants():
            assert time.monotonic() < end
            time.sleep(0.02)
        processes = up.descendants()
        if reaches_child:
            up.process.send_signal(signal.SIGSTOP)
            processes[0].kill()
        os.killpg(up.process.pid, signal.SIGINT)
        up.process.send_signal(signal.SIGCONT)
        assert up.process.wait(patience(10)) == 130, up.err.read_text()
        assert_gone(processes)
