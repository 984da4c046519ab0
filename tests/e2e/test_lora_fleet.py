"""Fleets with LoRA adapters: every answer is that of one adapter, wherever its prompt and its tokens are computed."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from checkpoints import make_checkpoint, node_config
from fleet import MODEL_NAME, RUNNER_ENVIRONMENTS, Fleet, HttpError, NodeProcess, add_tokenizer, start_fleet
from lora_adapters import make_adapter, merge
from stepper import Stepper

import runner
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

SIMULATED = ("--engine", "simulated", "--sim-costs", "step=0.002")
VOCABULARY = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "model"
    return add_tokenizer(make_checkpoint(directory, "qwen3", vocab_size=VOCABULARY, num_hidden_layers=2))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the adapters a, b and c of the model, of unlike ranks and modules."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, kind) in enumerate({"a": "all", "b": "some", "c": "all"}.items()):
        make_adapter(folder / name, model, kind, seed)
    return folder


def new_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def load(node: NodeProcess, name: str, directory: str, replace: bool = False) -> pb.NamedAdapter:
    with node.channel() as channel:
        request = pb.LoadAdapterRequest(name=name, directory=directory, replace=replace)
        return pb_grpc.AdapterChangesStub(channel).Load(request, timeout=60.0)


def answer(fleet: Fleet, prompt: Sequence[int], num_tokens: int, model: str) -> tuple[list[int], str]:
    """Return the tokens and the fingerprint of a greedy answer."""
    body = {"prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    reply = fleet.post("/v1/completions", {**body, "return_token_ids": True, "model": model})
    assert reply["model"] == model
    return reply["choices"][0]["token_ids"], reply["system_fingerprint"]


def models(fleet: Fleet) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in httpx.get(f"{fleet.url}/v1/models").json()["data"]}


@pytest.mark.slow
def test_handed_off_answers_are_those_of_the_merged_checkpoint(model: Path, adapters: Path, tmp_path: Path) -> None:
    """Prompts are equal for base and two adapters, in one slot and in two: none gets KV of another."""
    merged = {name: merge(model, adapters / name, tmp_path / name) for name in "ab"}
    given = [word for name in "ab" for word in ("--lora", f"{name}={adapters / name}")]
    flags = [*given, "--dtype", "float32"]
    prompts = [new_prompt(length, length) for length in (41, 90)]
    with start_fleet(
        model,
        prefill_flags=[*flags, "--max-loras", "1"],
        decode_flags=[*flags, "--handoff-min-tokens", "1"],
    ) as fleet:
        (decode,) = fleet.decode
        fingerprints = set()
        for name, directory in {MODEL_NAME: model, **merged}.items():
            config = node_config(directory)
            alone = Stepper(runner.build(config, lambda stage, fraction: None)).generate(prompts, 8)
            before = decode.counter("handoffs")
            for prompt, expected in zip(prompts, alone, strict=True):
                tokens, fingerprint = answer(fleet, prompt, 8, name)
                assert tokens == expected.output, name
                fingerprints.add(fingerprint)
            assert decode.counter("handoffs") == before + len(prompts)
        assert len(fingerprints) == 3
        cards = models(fleet)
        assert (cards["a"]["parent"], cards["a"]["root"]) == (MODEL_NAME, str(adapters / "a"))
        assert cards[MODEL_NAME]["parent"] is None
        with pytest.raises(HttpError) as unknown:
            answer(fleet, prompts[0], 1, "unknown-adapter")
        assert unknown.value.status == 404


def answers_alone(model: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Return the tokens of one node without adapters, of the base or of merged weights."""
    stepper = Stepper(runner.build(node_config(model), lambda stage, fraction: None))
    return [result.output for result in stepper.generate(prompts, num_tokens)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("source", "target"), [(("--pp", "2"), ("--tp", "2")), (("--tp", "2"), ("--pp", "2"))])
def test_split_nodes_of_v2_answer_as_the_merged_checkpoint(
    model: Path, adapters: Path, tmp_path: Path, source: Sequence[str], target: Sequence[str]
) -> None:
    """The ranks of P have one slot, those of D two; prompts take two steps."""
    given = [word for name in "ab" for word in ("--lora", f"{name}={adapters / name}")]
    sizes = ["--max-batch-tokens", "32", "--max-num-seqs", "4", "--max-model-len", "128", "--kv-cache-memory", "2MiB"]
    flags = [*given, *sizes, "--dtype", "float32"]
    checkpoints = {MODEL_NAME: model} | {name: merge(model, adapters / name, tmp_path / name) for name in "ab"}
    prompt = new_prompt(41, 5)
    with Fleet() as fleet:
        environ = RUNNER_ENVIRONMENTS["V2"]
        fleet.start_prefill(model, [*flags, *source, "--max-loras", "1", "--lease-seconds", "60"], environ)
        decode = fleet.start_decode(model, [*flags, *target, "--handoff-min-tokens", "1"], environ)
        fleet.start_router(model)
        fleet.wait_ready(200.0)
        fleet.wait_until(lambda: len(models(fleet)) == len(checkpoints), 30.0)
        with ThreadPoolExecutor(len(checkpoints)) as pool:
            answered = list(pool.map(lambda name: answer(fleet, prompt, 4, name)[0], checkpoints))
        assert answered == [answers_alone(path, [prompt], 4)[0] for path in checkpoints.values()]
        assert decode.counter("handoffs") == len(checkpoints)
        for node in fleet.nodes:
            node.wait_idle()


@pytest.mark.slow
def test_requests_keep_their_adapters_when_their_node_is_killed(model: Path, adapters: Path, tmp_path: Path) -> None:
    """One slot on each node: requests of two adapters wait for each other where they continue."""
    given = [word for name in "ab" for word in ("--lora", f"{name}={adapters / name}")]
    flags = [*given, "--max-loras", "1", "--dtype", "float32", "--max-num-seqs", "8"]
    checkpoints = {MODEL_NAME: model} | {name: merge(model, adapters / name, tmp_path / name) for name in "ab"}
    prompts = [new_prompt(length, length) for length in (41, 90)]
    requests = [(name, prompt) for name in checkpoints for prompt in prompts]
    num_tokens = 300
    expected = [tokens for path in checkpoints.values() for tokens in answers_alone(path, prompts, num_tokens)]
    decode_flags = [*flags, "--handoff-min-tokens", "1"]
    with start_fleet(model, 1, 2, True, flags, decode_flags, ["--migrations", "4"]) as fleet:
        fleet.wait_until(lambda: len(models(fleet)) == len(checkpoints), 30.0)
        with ThreadPoolExecutor(len(requests)) as pool:
            answered = [pool.submit(answer, fleet, prompt, num_tokens, name) for name, prompt in requests]
            lost = fleet.decode[0]
            fleet.wait_until(lambda: lost.counter("sampled_tokens") > 20, 30.0)
            assert lost.status().running
            lost.kill()
            assert [future.result()[0] for future in answered] == expected
        page = httpx.get(f"{fleet.url}/metrics").text
        moved = [line for line in page.splitlines() if line.startswith("pdserve_migrations_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in moved) > 0
        for node in (fleet.prefill[0], fleet.decode[1]):
            node.wait_idle()


@pytest.fixture
def simulated(model: Path, adapters: Path) -> Iterator[Fleet]:
    """A prefill node and two decode nodes; only the first two have the adapter."""
    changes = ["--allow-weight-changes", str(adapters), "--max-loras", "2"]
    with Fleet() as fleet:
        fleet.start_prefill(model, [*SIMULATED, *changes, "--lora", f"a={adapters / 'a'}"])
        fleet.start_decode(model, [*SIMULATED, *changes, "--lora", f"a={adapters / 'a'}"])
        fleet.start_decode(model, [*SIMULATED, *changes])
        fleet.start_router(model)
        fleet.wait_ready()
        fleet.wait_until(lambda: "a" in models(fleet), 10.0)
        fleet.wait_until(fleet.serves, 10.0)
        yield fleet


def test_a_node_without_the_adapter_never_answers(simulated: Fleet) -> None:
    """Requests go to the node that has it. After its death the client gets a 503, until another one has loaded it."""
    fleet = simulated
    prompt = new_prompt(100, 1)
    expected, _ = answer(fleet, prompt, 6, "a")
    of_base, _ = answer(fleet, prompt, 6, MODEL_NAME)
    assert expected != of_base
    for seed in range(6):
        answer(fleet, new_prompt(20, seed), 3, "a")
    assert fleet.decode[1].counter("admitted_prompt_tokens") <= 100  # the base's prompt at most
    fleet.decode[0].kill()
    fleet.wait_until(lambda: refusal(fleet, prompt) == 503, 20.0)
    load(fleet.decode[1], "a", "a")
    fleet.wait_until(lambda: refusal(fleet, prompt) == 200, 20.0)
    assert answer(fleet, prompt, 6, "a")[0] == expected
    for node in (fleet.prefill[0], fleet.decode[1]):
        node.wait_idle()


def refusal(fleet: Fleet, prompt: Sequence[int]) -> int:
    try:
        answer(fleet, prompt, 1, "a")
    except HttpError as exc:
        return exc.status
    return 200


@pytest.mark.slow
def test_each_answer_is_of_one_version_while_an_adapter_is_reloaded_in_place(simulated: Fleet) -> None:
    fleet = simulated
    load(fleet.decode[1], "a", "a")
    fleet.wait_until(lambda: len({node.describe().adapters[0].digest for node in fleet.nodes}) == 1, 10.0)
    prompts = [new_prompt(length, length) for length in (20, 90, 130)]
    versions = {"a": [answer(fleet, prompt, 40, "a") for prompt in prompts]}
    mixed: list[tuple[int, tuple[list[int], str]]] = []
    failures: list[Exception] = []
    over = threading.Event()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            index = rng.randrange(len(prompts))
            try:
                mixed.append((index, answer(fleet, prompts[index], 40, "a")))
            except Exception as exc:
                failures.append(exc)
                return

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in clients:
        thread.start()
    for directory in ("c", "a", "c"):
        for node in fleet.nodes:
            load(node, "a", directory, replace=True)
        fleet.wait_until(lambda: len(mixed) > 4, 20.0)
    over.set()
    for thread in clients:
        thread.join()
    assert not failures
    versions["c"] = [answer(fleet, prompt, 40, "a") for prompt in prompts]
    assert versions["a"] != versions["c"]
    for index, got in mixed:
        assert got in (versions["a"][index], versions["c"][index])
    for node in fleet.nodes:
        node.wait_idle()


def test_an_order_is_checked_before_anything_changes(simulated: Fleet, adapters: Path) -> None:
    (prefill,) = simulated.prefill
    for name, directory, reason in (
        ("a", "b", "loaded already"),
        (MODEL_NAME, "b", "base model"),
        ("b", "/etc", "not below"),
        ("b", "missing", "no directory"),
    ):
        with pytest.raises(grpc.RpcError, match=reason):
            load(prefill, name, directory)
    assert [adapter.name for adapter in prefill.describe().adapters] == ["a"]
    with prefill.channel() as channel:
        stub = pb_grpc.AdapterChangesStub(channel)
        assert stub.Unload(pb.UnloadAdapterRequest(name="a"), timeout=10.0).name == "a"
        with pytest.raises(grpc.RpcError, match="not loaded"):
            stub.Unload(pb.UnloadAdapterRequest(name="a"), timeout=10.0)
    assert not prefill.describe().adapters


def test_administrators_change_adapters_of_all_nodes_over_http(simulated: Fleet, model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    entries = {"ops": "admin = true", "user": ""}
    keys.write_text("".join(f'[keys.{name}]\nsha256 = "{_sha256(name)}"\n{more}\n' for name, more in entries.items()))
    simulated.start_router(model, ["--api-keys", str(keys)])
    simulated.wait_ready()

    def post(path: str, key: str = "ops", **body: Any) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"}
        reply = httpx.post(f"{simulated.url}/v1/{path}", json=body, headers=headers, timeout=60.0)
        return reply.status_code, reply.text

    def names() -> list[list[str]]:
        described = [node.describe().adapters for node in simulated.nodes]
        return [sorted(adapter.name for adapter in adapters if adapter.name) for adapters in described]

    load_b = {"lora_name": "b", "lora_path": "b"}
    simulated.wait_until(lambda: post("load_lora_adapter", "user", **load_b)[0] == 404, 10.0)
    simulated.wait_until(lambda: post("load_lora_adapter", **load_b)[0] == 200, 20.0)  # once the router knows all nodes
    assert names() == [["a", "b"], ["a", "b"], ["b"]]
    simulated.wait_until(lambda: post("completions", "user", model="b", prompt=[5, 6], max_tokens=2)[0] == 200, 10.0)
    assert post("load_lora_adapter", **load_b)[0] == 400
    assert post("load_lora_adapter", lora_name=MODEL_NAME, lora_path="b")[0] == 400
    assert post("load_lora_adapter", lora_name="x", lora_path="/etc")[0] == 400
    assert names() == [["a", "b"], ["a", "b"], ["b"]]
    assert post("unload_lora_adapter", lora_name="b")[0] == 200
    assert names() == [["a"], ["a"], []]
    simulated.wait_until(lambda: post("unload_lora_adapter", lora_name="b")[0] == 404, 10.0)
    assert post("completions", "user", model="b", prompt=[5, 6], max_tokens=2)[0] == 404


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
