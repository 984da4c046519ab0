"""Any node is a source: P reads a prefix from the prefix cache of D or of another P, and computes the rest."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from collector import Collector
from fleet import Fleet, NodeProcess, add_tokenizer
from node_client import PrefillClient, PrefillFailed, RouterClient, greedy

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.device import node_devices
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb

BLOCK = 16  # tokens
ANSWER = 16  # tokens
SIMULATED = ["--engine", "simulated", "--block-size", str(BLOCK), "--handoff-min-tokens", "0"]
SIMULATED += ["--sim-costs", "prompt-token=0.001"]
#: A read takes as long as to compute 250 tokens, a step one second.
SLOW = ["--engine", "simulated", "--block-size", str(BLOCK), "--max-batch-tokens", "256"]
SLOW += ["--sim-costs", "prompt-token=0.004,read=1"]
SLOW_DECODE = [*SLOW, "--handoff-min-tokens", "0"]


def start(model: Path, listed: Path, prefill: int, prefill_flags: list[str], *decode_flags: list[str]) -> Fleet:
    """Start prefill nodes, and a decode node per list of flags, without a router. Each may read from all others."""
    listed.touch()
    sources = ["--kv-source", f"file://{listed}"]
    fleet = Fleet()
    try:
        for _ in range(prefill):
            fleet.start_prefill(model, [*sources, *prefill_flags])
        for flags in decode_flags:
            fleet.start_decode(model, [*sources, *flags])
        new = listed.with_suffix(".new")
        new.write_text("".join(f"{node.address}\n" for node in fleet.nodes))
        os.replace(new, listed)
        fleet.wait_ready()
        wait_connected(fleet)
    except BaseException:
        fleet.close()
        raise
    return fleet


def wait_connected(fleet: Fleet) -> None:
    others = len(fleet.nodes) - 1
    fleet.wait_until(lambda: all(len(node.describe().connected_peers) == others for node in fleet.nodes), 30.0)


def id_of(node: NodeProcess) -> str:
    return node.describe().node_id


def new_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=length)


def full_blocks(num_tokens: int) -> int:
    """Tokens in full blocks."""
    return num_tokens // BLOCK * BLOCK


# ---------------------------------------------------------------- simulated nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    directory = tmp_path_factory.mktemp("model")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[list[int]], list[int]]:
    """The answer of the simulated runner alone."""
    from stepper import Stepper

    import runner

    options = NodeOptions(model=str(model), engine="simulated", sim_speed=float("inf"))
    alone = runner.build(resolve(options, node_devices(options, 1)[0], {}), lambda stage, fraction: None)
    return lambda prompt: Stepper(alone).generate([prompt], ANSWER)[0].output


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Fleet]:
    traces = ["--traces", collector.url]
    listed = tmp_path_factory.mktemp("listed") / "nodes"
    with (
        mock.patch.dict(os.environ, {"OTEL_BSP_SCHEDULE_DELAY": "20"}),
        start(model, listed, 2, [*SLOW, *traces], [*SIMULATED, *traces]) as fleet,
    ):
        yield fleet


@pytest.fixture
def router(fleet: Fleet) -> Iterator[RouterClient]:
    """A stream to the decode node. All nodes are idle again afterwards."""
    with RouterClient(fleet.decode[0].address) as client:
        yield client
    for node in fleet.nodes:
        node.wait_idle()


def history(router: RouterClient, seed: int, prefill_node: str = "") -> list[int]:
    """Serve a first turn, and return it with its answer. Without ``prefill_node``, its KV is on D only."""
    prompt = new_prompt(600, seed)
    return prompt + router.generate(prompt, greedy(ANSWER), prefill_node).tokens


def test_p_pulls_the_history_from_d_and_from_another_p(
    fleet: Fleet, router: RouterClient, expected: Callable[[list[int]], list[int]]
) -> None:
    """The KV of the answer's last token does not exist before the next turn."""
    first, second = fleet.prefill
    (decode,) = fleet.decode
    before = history(router, 1)
    cached = full_blocks(len(before) - 1)
    turn = before + new_prompt(40, 2)
    named = {"prefix_tokens": cached}
    answer = router.generate(turn, greedy(ANSWER), id_of(first), prefix_node=id_of(decode), **named)
    assert answer.tokens == expected(turn)
    assert answer.cached_tokens == first.counter("pulled_tokens") == cached
    other = before + new_prompt(40, 3)
    answer = router.generate(other, greedy(ANSWER), id_of(second), prefix_node=id_of(first), **named)
    assert answer.tokens == expected(other)
    assert answer.cached_tokens == second.counter("pulled_tokens") == cached
    assert decode.counter("pulled_tokens") == decode.counter("handoff_failures") == 0
    assert [node.counter("pull_failures") for node in fleet.nodes] == [0, 0, 0]


def test_traces_show_what_a_pull_was_to_take_and_has_taken(
    fleet: Fleet, router: RouterClient, collector: Collector
) -> None:
    """The source's span is below that of the pull."""
    first, _ = fleet.prefill
    (decode,) = fleet.decode
    before = history(router, 14)
    cached = full_blocks(len(before) - 1)
    turn = before + new_prompt(40, 15)
    named = {"prefix_node": id_of(decode), "prefix_tokens": cached}
    for trace, prompt, ended in (("a" * 32, turn, "pull"), ("b" * 32, turn[:-1], "prefill")):
        context = {"traceparent": f"00-{trace}-{'1' * 16}-01"}
        router.generate(prompt, greedy(2), id_of(first), **named, **context)
        root = collector.wait(trace, "decode node", "lease", ended, root_name="decode node")
        at_p = root.child("handoff").child("prefill node")
        if ended == "prefill":
            assert "no pull" in at_p.events, "the prefix is cached here since the first request"
            continue
        pull = at_p.child("pull")
        prefill = at_p.child("prefill").attributes
        assert prefill["pdserve.prefill.tokens"] == len(prompt) - cached
        assert pull.child("prefill node").attributes["gen_ai.usage.cache_read.input_tokens"] == cached
        assert pull.attributes["pdserve.pull.tokens"] == pull.attributes["pdserve.pull.expected_tokens"] == cached
        assert pull.attributes["pdserve.pull.node"] == id_of(decode)
        assert 0.0 < pull.attributes["pdserve.pull.expected"] < pull.attributes["pdserve.pull.computing"]
        assert prefill["pdserve.prefill.expected"] > 0.0


def test_d_pulls_the_prefix_of_a_new_prompt(
    fleet: Fleet, router: RouterClient, expected: Callable[[list[int]], list[int]]
) -> None:
    first, _ = fleet.prefill
    (decode,) = fleet.decode
    cached = full_blocks(600)
    pulled = decode.counter("pulled_tokens")
    prompt = new_prompt(600, 4)
    serve_at(first, prompt)
    turn = prompt + new_prompt(40, 5)
    answer = router.generate(turn, greedy(ANSWER), id_of(first), pull=True, prefix_tokens=cached)
    assert answer.tokens == expected(turn)
    assert decode.counter("pulled_tokens") == pulled + cached


def test_tenants_do_not_share_what_is_pulled(
    fleet: Fleet, router: RouterClient, expected: Callable[[list[int]], list[int]]
) -> None:
    first, _ = fleet.prefill
    (decode,) = fleet.decode
    before = history(router, 6)
    pulled = first.counter("pulled_tokens")
    misses = first.counter("pull_misses")
    turn = before + new_prompt(40, 7)
    named = {"prefix_node": id_of(decode), "prefix_tokens": 608, "cache_salt": "another tenant"}
    assert router.generate(turn, greedy(ANSWER), id_of(first), **named).tokens == expected(turn)
    assert (first.counter("pulled_tokens"), first.counter("pull_misses")) == (pulled, misses + 1)


def test_a_source_that_is_not_connected_costs_nothing(
    fleet: Fleet, router: RouterClient, expected: Callable[[list[int]], list[int]]
) -> None:
    turn = new_prompt(100, 8)
    peer = id_of(fleet.prefill[0])
    answer = router.generate(turn, greedy(ANSWER), peer, prefix_node="unknown", prefix_tokens=96)
    assert answer.tokens == expected(turn)
    assert answer.cached_tokens == 0


def test_decode_node_computes_no_prompts_for_peers(fleet: Fleet) -> None:
    (decode,) = fleet.decode
    request = pb.PrefillRequest(
        epoch=decode.describe().epoch, token_ids=pack_tokens([1, 2, 3]), sampling=sampling_to_pb(greedy(1))
    )
    with PrefillClient(decode.address) as peer, pytest.raises(PrefillFailed, match="leases cached KV only"):
        peer.send(request).next()
    decode.wait_idle()


@pytest.mark.slow  # a fault amid a split has a quick test below
@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_source_that_fails_amid_a_pull_changes_no_token(
    fleet: Fleet, router: RouterClient, expected: Callable[[list[int]], list[int]], fault: str
) -> None:
    """A pull takes a second here."""
    first, second = fleet.prefill
    prompt = new_prompt(600, len(fault))
    failures = second.counter("pull_failures")
    router.generate(prompt, greedy(ANSWER), id_of(first))
    turn = prompt + new_prompt(40, 9)
    cached = full_blocks(600)
    running = router.send(turn, greedy(ANSWER), id_of(second), prefix_node=id_of(first), prefix_tokens=cached)
    fleet.wait_until(lambda: second.status().reading > 0 and first.status().leased_blocks > 0, 10.0)
    first.stop("node") if fault == "stopped" else first.signal(signal.SIGKILL)
    assert running.wait().tokens == expected(turn)
    assert second.counter("pull_failures") == failures + 1
    second.wait_idle()
    if fault == "stopped":
        first.resume("node")
    else:
        first.wait_ended(5.0)
        first.restart()
    wait_connected(fleet)


# ---------------------------------------------------------------- a source that lacks memory


@pytest.fixture(scope="module")
def crowded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The cache of the first decode node has 64 blocks. A pull takes a second."""
    small = [*SIMULATED, "--kv-cache-memory", str(64 * block_bytes(model))]
    with start(model, tmp_path_factory.mktemp("listed") / "nodes", 1, SLOW, small, SLOW_DECODE) as fleet:
        assert fleet.decode[0].status().total_blocks == 64
        yield fleet


def block_bytes(model: Path) -> int:
    options = NodeOptions(model=str(model), engine="simulated", block_size=BLOCK)
    return resolve(options, node_devices(options, 1)[0], {}).kv_layout.block_bytes


@pytest.mark.parametrize(
    ("length", "reader"), [(480, "reads"), (410, "stopped")], ids=["a prompt waits", "a stream grows, reader stopped"]
)
def test_source_takes_its_blocks_back_before_it_preempts(
    crowded: Fleet, expected: Callable[[list[int]], list[int]], length: int, reader: str
) -> None:
    """The history takes 38 of 64 blocks; the request needs more than the others at once, or when it decodes."""
    (prefill,) = crowded.prefill
    source, decode = crowded.decode
    names = ("leases_granted", "leases_revoked", "preemptions"), ("pull_revocations", "pull_failures", "pulled_tokens")
    before = counters(source, names[0]), counters(prefill, names[1])
    with RouterClient(source.address) as own, RouterClient(decode.address) as other:
        turn = history(own, length) + new_prompt(40, length + 1)
        place = id_of(source)
        pulling = other.send(turn, greedy(ANSWER), id_of(prefill), prefix_node=place, prefix_tokens=608)
        crowded.wait_until(lambda: prefill.status().reading > 0 and source.status().leased_blocks > 0, 10.0)
        if reader == "stopped":
            prefill.stop("node")
        prompt = new_prompt(length, length + 2)
        assert own.generate(prompt, greedy(ANSWER)).tokens == expected(prompt)
        assert source.status().leased_blocks == 0
        prefill.resume("node")
        assert pulling.wait().tokens == expected(turn)
        for node in crowded.nodes:
            node.wait_idle()
    assert change(source, names[0], before[0]) == [1, 1, 0]
    assert change(prefill, names[1], before[1]) == [1, 1, 0]
    assert decode.counter("handoff_failures") == 0


def test_decode_node_computes_a_prompt_whose_pull_is_taken_back(
    crowded: Fleet, expected: Callable[[list[int]], list[int]]
) -> None:
    """The decode node counts a refusal, not a failure."""
    source, decode = crowded.decode
    names = "pull_revocations", "handoff_refusals", "handoff_failures", "pulled_tokens"
    before = counters(decode, names)
    with RouterClient(source.address) as own, RouterClient(decode.address) as other:
        turn = history(own, 90) + new_prompt(40, 91)
        pulling = other.send(turn, greedy(ANSWER), id_of(source), pull=True, prefix_tokens=608)
        crowded.wait_until(lambda: decode.status().reading > 0 and source.status().leased_blocks > 0, 10.0)
        prompt = new_prompt(480, 92)
        assert own.generate(prompt, greedy(ANSWER)).tokens == expected(prompt)
        assert pulling.wait().tokens == expected(turn)
        for node in crowded.nodes:
            node.wait_idle()
    assert change(decode, names, before) == [1, 1, 0, 0]


@pytest.mark.parametrize("leaves", [False, True], ids=["reader stays", "stream has ended"])
def test_reader_that_does_not_read_delays_no_request_of_the_source(
    crowded: Fleet, expected: Callable[[list[int]], list[int]], leaves: bool
) -> None:
    """The lease would last for four seconds."""
    source = crowded.decode[0]
    names = ("leases_revoked", "leases_expired")
    before = counters(source, names)
    with RouterClient(source.address) as own, PrefillClient(source.address) as peer:
        cached = pack_tokens(history(own, 93 + leaves))
        epoch = source.describe().epoch
        sampling = sampling_to_pb(greedy(1))
        sent = peer.send(pb.PrefillRequest(epoch=epoch, token_ids=cached, sampling=sampling, cached_only=True))
        kinds = [sent.next().WhichOneof("kind") for _ in range(3)]
        assert kinds == ["accepted", "kv_ready", "finished"]
        if leaves:
            peer.close()
        prompt = new_prompt(480, 95 + leaves)
        assert own.generate(prompt, greedy(ANSWER)).tokens == expected(prompt)
        if not leaves:
            assert sent.next_answer().released == pb.Released(revoked=True)
            assert not peer.release(sent)
        source.wait_idle()
    assert change(source, names, before) == [1, 0]


def counters(node: NodeProcess, names: tuple[str, ...]) -> list[float]:
    return [node.counter(name) for name in names]


def change(node: NodeProcess, names: tuple[str, ...], before: list[float]) -> list[float]:
    return [now - then for now, then in zip(counters(node, names), before, strict=True)]


# ---------------------------------------------------------------- a real model


class Real:
    """A prefill node and a decode node, in float32, with checksums and the switches of split_pulls/sitecustomize.py."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        flags = ["--block-size", str(BLOCK), "--kv-checksum", "on", "--max-model-len", "2048", "--dtype", "float32"]
        hook = Path(__file__).parent / "split_pulls"
        variables = {"PYTHONPATH": f"{hook}:{os.environ.get('PYTHONPATH', '')}", "SPLIT_PULLS": str(directory)}
        self._model = reference_model(checkpoint)
        self._directory = directory
        with mock.patch.dict(os.environ, variables):
            self.fleet = start(checkpoint, directory / "nodes", 1, flags, [*flags, "--handoff-min-tokens", "0"])
        (self.prefill,) = self.fleet.prefill
        (self.decode,) = self.fleet.decode

    @contextmanager
    def switch(self, *names: str) -> Iterator[None]:
        for name in names:
            (self._directory / name).touch()
        try:
            yield
        finally:
            for name in names:
                (self._directory / name).unlink(missing_ok=True)

    def release_reads(self) -> None:
        (self._directory / "hold").unlink()

    def turn(self, router: RouterClient, seed: int, at: str) -> tuple[list[int], int]:
        """Serve a history at P or D. Return its next turn, and how many tokens of it that node has cached."""
        before = new_prompt(600, seed)
        if at == "D":
            before += router.generate(before, greedy(ANSWER)).tokens
        else:
            serve_at(self.prefill, before)
        return before + new_prompt(50, seed + 1), full_blocks(len(before) - (at == "D"))

    def check(self, tokens: list[int], prompt: list[int]) -> None:
        assert tokens == reference_greedy(self._model, prompt, ANSWER, tokens)
        for node in self.fleet.nodes:
            node.wait_idle()


def serve_at(node: NodeProcess, prompt: list[int]) -> None:
    """Have a prefill node compute a prompt, which no other node knows."""
    with PrefillClient(node.address) as peer:
        epoch = node.describe().epoch
        sampling = sampling_to_pb(greedy(1))
        sent = peer.send(pb.PrefillRequest(epoch=epoch, token_ids=pack_tokens(prompt), sampling=sampling))
        sent.all()
        peer.release(sent)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("real") / "m", "qwen3", num_hidden_layers=2)
    nodes = Real(add_tokenizer(checkpoint), tmp_path_factory.mktemp("switches"))
    with nodes.fleet:
        yield nodes


NAMES = ("pulled_tokens", "pull_computed_tokens")


@pytest.mark.parametrize("split", [False, True], ids=["pulled", "split"])
@pytest.mark.parametrize("reader", ["P", "D"])
def test_answer_after_a_pull_is_that_of_the_model(real: Real, reader: str, split: bool) -> None:
    """The source alone has the history; if it is D, generated tokens included."""
    node = real.prefill
    before = counters(real.prefill, NAMES)
    if reader == "D":
        node = real.decode
        before = counters(real.decode, NAMES)
    with RouterClient(real.decode.address) as router, real.switch(*["split"] * split):
        turn, cached = real.turn(router, 10 + 2 * split + 4 * (reader == "D"), "D" if reader == "P" else "P")
        named = {"pull": True} if reader == "D" else {"prefix_node": id_of(real.decode)}
        answer = router.generate(turn, greedy(ANSWER), id_of(real.prefill), prefix_tokens=cached, **named)
        real.check(answer.tokens, turn)
    computed = full_blocks(cached // 2) if split else 0
    assert change(node, NAMES, before) == [cached - computed, computed]
    assert answer.cached_tokens == cached - computed


@pytest.mark.parametrize(
    "fault", ["byte flipped", "source killed", pytest.param("source stopped", marks=pytest.mark.slow)]
)
def test_fault_amid_a_split_changes_no_token(real: Real, fault: str) -> None:
    """D computes the first half. The source fails before a byte has come, or a byte of the other half has changed."""
    source = real.prefill
    names = (*NAMES, "kv_checksum_failures")
    before = counters(real.decode, names)
    seed = 20 + 2 * len(fault)
    switches = ["split", "flip" if fault == "byte flipped" else "hold"]
    with RouterClient(real.decode.address) as router, real.switch(*switches):
        turn, cached = real.turn(router, seed, "P")
        request = {"pull": True, "prefix_tokens": cached}
        if fault == "byte flipped":
            answer = router.generate(turn, greedy(ANSWER), id_of(source), **request)
        else:
            running = router.send(turn, greedy(ANSWER), id_of(source), **request)
            real.fleet.wait_until(lambda: real.decode.status().reading > 0 and source.status().leased_blocks > 0, 10.0)
            source.stop("node") if fault == "source stopped" else source.signal(signal.SIGKILL)
            if fault == "source killed":
                source.wait_ended(5.0)
            real.release_reads()
            answer = running.wait()
        if fault == "source stopped":
            source.resume("node")
        elif fault == "source killed":
            source.restart()
        wait_connected(real.fleet)
        real.check(answer.tokens, turn)
    assert change(real.decode, names, before) == [0, 0, fault == "byte flipped"]
