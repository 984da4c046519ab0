"""Requests whose decode node fails, with scripted nodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import patience
from router_process import MODEL, router_process, wait_for
from scripted_node import Conversation, Script, ScriptedNode

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.field_ranges import violation
from pdserve.rpc.protobuf import unpack_tokens
from router.text.tokenizer import Tokenizer

_salts = itertools.count()


@dataclass
class Nodes:
    """Scripted decode nodes behind a router."""

    all: list[ScriptedNode]
    client: httpx.Client

    def play(self, first: Script, *later: Script) -> dict[str, Any]:
        """Return request fields; the node that gets the request first plays ``first``, the next one the next script."""
        salt = f"salt-{next(_salts)}"
        scripts = iter((first, *later))

        async def script(conversation: Conversation) -> None:
            await next(scripts)(conversation)

        for node in self.all:
            node.scripts[salt] = script
        return {"prompt": "x", "max_tokens": 100, "cache_salt": salt, "seed": 7}

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@contextlib.contextmanager
def start_nodes(tokenizer_dir: Path, *flags: str, hashes: Sequence[str] = ("", "")) -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        nodes = [ScriptedNode(MODEL, node_id=f"d{index}") for index in range(len(hashes))]
        for node, compat_hash in zip(nodes, hashes, strict=True):
            node.description.compat_hash = node.description.weights = compat_hash
            stack.callback(node.close)
        peers = [word for node in nodes for word in ("--decode", node.address)]
        process = stack.enter_context(router_process(tokenizer_dir, [*peers, *flags]))
        client = stack.enter_context(httpx.Client(base_url=process.url, timeout=patience(30), trust_env=False))
        started = Nodes(nodes, client)
        wait_for(lambda: started.metric("pdserve_nodes_ready{") == len(nodes))
        yield started


@pytest.fixture(scope="module")
def nodes(tokenizer_dir: Path) -> Iterator[Nodes]:
    with start_nodes(tokenizer_dir) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


def stream(client: httpx.Client, body: dict[str, Any]) -> list[Any]:
    """Return every event, with [DONE]."""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def text_of(events: list[Any], choice: int = 0) -> str:
    assert events[-1] == "[DONE]", events[-1]
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(entry["text"] for entry in choices if entry["index"] == choice)


def saying(token_ids: list[int], then: str | None = "length") -> Script:
    """Send these tokens and the finish reason ``then``; None: send a failure."""

    async def script(conversation: Conversation) -> None:
        for position, token_id in enumerate(token_ids):
            last = position == len(token_ids) - 1 and then
            conversation.token(token_id, finish=then or "" if last else "")
        if then is None:
            conversation.fail(pb.Failure.NODE_FAILED, "the engine died")

    return script


def resumed(conversation: Conversation) -> dict[int, list[int]]:
    return {resume.choice: list(unpack_tokens(resume.token_ids)) for resume in conversation.message.resume}


def test_prompts_leave_a_node_that_sends_too_many_outputs_in_a_message(nodes: Nodes) -> None:
    """Each of a million empty outputs would cost the router time; its other requests go on after one message."""

    async def flooding(conversation: Conversation) -> None:
        conversation.token(9)
        conversation.send(pb.OutputBatch(outputs=[pb.Output()] * 1_000_000))

    body = nodes.play(flooding, saying([9, 9], "length"))
    assert text_of(stream(nodes.client, body))
    wait_for(lambda: nodes.metric("pdserve_nodes_ready{") == 2)


@pytest.mark.parametrize("other", ["ready", "stuck"])
def test_prompts_leave_a_stalled_node_only_for_another_one(nodes: Nodes, other: str) -> None:
    """Prompts continue elsewhere within a report, or wait for the stalled step while no other node is ready."""
    first, second = nodes.all

    async def stalling(conversation: Conversation) -> None:
        node = next(node for node in nodes.all if conversation in node.seen.values())
        if other == "stuck":
            (second if node is first else first).description.state = "stuck"
            await asyncio.sleep(0.5)  # until the router knows
        conversation.token(9)
        node.description.stalled = True
        await asyncio.sleep(3.0 if other == "stuck" else 60.0)
        conversation.token(9, finish="length")

    body = nodes.play(stalling, saying([9]))
    before = nodes.metric('pdserve_migrations_total{reason="stalled"}')
    try:
        assert text_of(stream(nodes.client, body))
    finally:
        for node in nodes.all:
            node.description.stalled = False
            node.description.state = "ready"
    assert nodes.metric('pdserve_migrations_total{reason="stalled"}') - before == (other == "ready")
    wait_for(lambda: nodes.metric("pdserve_nodes_ready{") == 2)


def test_prompts_of_a_request_stay_on_a_stalled_node_whose_weights_are_nowhere_else(tokenizer_dir: Path) -> None:
    """All prompts of a request have one version of the weights, before their first tokens, too."""
    with start_nodes(tokenizer_dir, hashes=("one", "other")) as nodes:

        async def stalling(conversation: Conversation) -> None:
            salt = conversation.message.cache_salt
            node = next(node for node in nodes.all if salt in node.seen)
            node.description.stalled = True
            await asyncio.sleep(1.0)
            conversation.token(9, finish="length")

        events = stream(nodes.client, nodes.play(stalling, stalling) | {"prompt": ["x", "y"]})
        assert {event["choices"][0]["index"] for event in events[:-1]} == {0, 1}
        assert nodes.metric('pdserve_migrations_total{reason="stalled"}') == 0


@pytest.mark.parametrize("num_scored", [0, 1, 3])
def test_migrated_prompt_is_scored_again_only_before_its_first_token(nodes: Nodes, num_scored: int) -> None:
    """Log-probabilities that arrived only in part are requested again; after the first token none are."""
    requested: list[int] = []

    async def beginning(conversation: Conversation) -> None:
        requested.append(conversation.message.sampling.prompt_logprobs)
        if num_scored:
            conversation.score([-1.0] * num_scored)
        await saying([9] if num_scored == 3 else [], then=None)(conversation)

    async def rest(conversation: Conversation) -> None:
        requested.append(conversation.message.sampling.prompt_logprobs)
        if num_scored < 3:
            conversation.score([-2.0])
            conversation.score([-2.0, -2.0], first=2)
        await saying([9, 9])(conversation)

    body = nodes.play(beginning, rest) | {"prompt": [5, 6, 7, 8], "prompt_logprobs": 0}
    answer = nodes.client.post("/v1/completions", json=body).json()
    assert "choices" in answer, answer
    (choice,) = answer["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    expected = -1.0 if num_scored == 3 else -2.0
    assert [entry[str(token)]["logprob"] for token, entry in zip((6, 7, 8), others, strict=True)] == [expected] * 3
    assert requested == ([0, -1] if num_scored == 3 else [0, 0])


VOCABULARY = 506  # vocabulary size of scripted nodes
NAN = math.nan
INF = math.inf


def logprobs(logprob: float, top_ids: Sequence[int], top_logprobs: Sequence[float]) -> dict[str, Any]:
    return {"logprobs": pb.TokenLogprobs(logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs)}


MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("choice", {"choice": 2}),
    ("choice", {"choice": 2**32 - 1, "finish": "stop"}),
    ("token_id", {"token_id": VOCABULARY}),
    ("token_id", {"token_id": 2**32 - 1}),
    ("cached_tokens", {"cached_tokens": 8}),
    ("logprobs", logprobs(-1.0, [1], [-1.0, -2.0])),
    ("logprobs", logprobs(-1.0, [1, 2], [-1.0])),
    ("logprobs", logprobs(-1.0, [1, 2, 3], [-1.0, -2.0, -3.0])),
    ("logprobs", logprobs(-1.0, [VOCABULARY], [-1.0])),
    ("logprobs", logprobs(NAN, [1], [-1.0])),
    ("logprobs", logprobs(INF, [1], [-1.0])),
    ("logprobs", logprobs(-1.0, [1], [NAN])),
    ("logprobs", logprobs(-1.0, [1], [INF])),
]


@pytest.mark.parametrize(("field", "fault"), MALFORMED, ids=[f"{field}-{n}" for n, (field, _) in enumerate(MALFORMED)])
@pytest.mark.parametrize(("cut", "streaming"), [(0, True), (2, False)], ids=["first output, stream", "third output"])
def test_malformed_output_is_refused_and_another_node_continues_the_answer(
    nodes: Nodes, tokenizer: Tokenizer, cut: int, field: str, fault: dict[str, Any], streaming: bool
) -> None:
    """The client gets the exact answer of two choices; the node that sent the output is told to stop.

    A number outside its declared range ends the stream to the node, and so all that the node computes.
    """
    token_ids = tokenizer.encode("abcd")
    fine = logprobs(-0.5, [5, 6], [-0.5, -0.75])
    resumable = {0: token_ids[:cut], 1: token_ids[:1]} if cut else {}
    first: list[Conversation] = []

    async def malformed(conversation: Conversation) -> None:
        first.append(conversation)
        for choice, begun in resumable.items():
            for token_id in begun:
                conversation.token(token_id, choice=choice, **fine)
        conversation.token(**{"token_id": token_ids[cut], **fine, **fault})
        for choice in range(2):
            conversation.token(9, choice=choice, finish="length", **fine)

    async def honest(conversation: Conversation) -> None:
        assert resumed(conversation) == resumable
        for choice in range(2):
            for token_id in token_ids[len(resumable.get(choice, ())) :]:
                end = "length" if token_id == token_ids[-1] else ""
                conversation.token(token_id, choice=choice, finish=end, **fine)

    counter = f'pdserve_refused_outputs_total{{field="{field}"}}'
    before = nodes.metric(counter)
    fields = {"n": 2, "logprobs": 2, "prompt": [5], "return_token_ids": True}
    body = nodes.play(malformed, honest) | fields
    if streaming:
        events = stream(nodes.client, body)
        assert [text_of(events, choice) for choice in range(2)] == ["abcd", "abcd"]
    else:
        answer = nodes.client.post("/v1/completions", json=body).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [token_ids] * 2
        assert [len(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]] == [len(token_ids)] * 2
        assert answer["usage"]["completion_tokens"] == 2 * len(token_ids)
    in_range = not violation(pb.Output(logprobs=fault.get("logprobs")))
    assert nodes.metric(counter) == before + in_range
    if in_range:
        wait_for(first[0].cancelled.is_set)


def rows(*logprobs: float, token_id: int = 1) -> bytes:
    """Return a table of one alternative per token."""
    return b"".join(struct.pack("<fIIf", logprob, 1, token_id, logprob) for logprob in logprobs)


@pytest.mark.parametrize(
    "run",
    [
        pb.PromptLogprobs(first=2, num_top=1, table=rows(-1.0, -1.0)),
        pb.PromptLogprobs(first=1, num_top=1, table=rows(-1.0, -1.0, -1.0, -1.0)),
        pb.PromptLogprobs(first=1, num_top=1, table=rows(-1.0, -1.0, -1.0)[:-1]),
        pb.PromptLogprobs(first=1, num_top=2**32 - 1, table=rows(-1.0, -1.0, -1.0)),
        pb.PromptLogprobs(first=1, num_top=3, table=bytes(3 * 4 * 8)),
        pb.PromptLogprobs(first=1, num_top=1, table=rows(-1.0, NAN, -1.0)),
        pb.PromptLogprobs(first=1, num_top=1, table=rows(-1.0, INF, -1.0)),
        pb.PromptLogprobs(first=1, num_top=1, table=rows(-1.0, -1.0, -1.0, token_id=VOCABULARY)),
        None,
    ],
    ids=["gap", "long", "torn", "wide", "unasked", "nan", "inf", "token", "token before"],
)
def test_malformed_prompt_logprobs_are_refused_and_another_node_scores_the_prompt(
    nodes: Nodes, run: pb.PromptLogprobs | None
) -> None:
    async def malformed(conversation: Conversation) -> None:
        if run is not None:
            conversation.put(pb.Output(prompt_logprobs=run))
        await saying([9])(conversation)

    async def honest(conversation: Conversation) -> None:
        conversation.put(pb.Output(prompt_logprobs=pb.PromptLogprobs(first=1, num_top=1, table=rows(-2.0, -2.0, -2.0))))
        await saying([9, 9])(conversation)

    counter = 'pdserve_refused_outputs_total{field="prompt_logprobs"}'
    before = nodes.metric(counter)
    body = nodes.play(malformed, honest) | {"prompt": [5, 6, 7, 8], "prompt_logprobs": 1}
    (choice,) = nodes.client.post("/v1/completions", json=body).json()["choices"]
    scored = zip((6, 7, 8), choice["prompt_logprobs"][1:], strict=True)
    assert [entry[str(token)]["logprob"] for token, entry in scored] == [-2.0] * 3
    assert nodes.metric(counter) == before + (run is None or not violation(run))


def test_request_whose_nodes_all_send_malformed_outputs_fails_and_others_go_on(nodes: Nodes) -> None:
    async def malformed(conversation: Conversation) -> None:
        conversation.token(9, choice=5)

    other = nodes.play(saying([9, 9, 9]))
    answer = nodes.client.post("/v1/completions", json=nodes.play(malformed, malformed, malformed))
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "node_error")
    assert "choice 5" in answer.json()["error"]["message"]
    assert nodes.client.post("/v1/completions", json=other).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("reason", ["repetition", "x" * 10_000])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_finish_reason_of_a_newer_release_is_length(nodes: Nodes, tokenizer: Tokenizer, path: str, reason: str) -> None:
    """The node has cut the answer off, for a reason that clients do not know either; the last token has its text."""
    body = nodes.play(saying(tokenizer.encode("abc"), reason))
    del body["prompt"]
    prompts: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "x"},
        "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "responses": {"input": "x"},
        "messages": {"messages": [{"role": "user", "content": "x"}]},
    }
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    answer = nodes.client.post(f"/v1/{path}", json=body | prompts[path])
    assert answer.status_code == 200, answer.text
    fields = answer.json()
    match path:
        case "responses":
            assert fields["incomplete_details"] == {"reason": "max_output_tokens"}
        case "messages":
            assert (fields["content"][0]["text"], fields["stop_reason"]) == ("abc", "max_tokens")
        case _:
            (choice,) = fields["choices"]
            assert choice["finish_reason"] == "length"
            assert (choice.get("text") or choice["message"]["content"]) == "abc"


@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_migrated_text_continues_without_loss_or_repetition(nodes: Nodes, tokenizer: Tokenizer, cut: int) -> None:
    """Also between the bytes of a character; only the resumed tokens differ in the second request."""
    text = "one 日本 🙂 two"
    token_ids = tokenizer.encode(text)
    requested: list[Conversation] = []

    async def rest(conversation: Conversation) -> None:
        requested.append(conversation)
        await saying(token_ids[cut:])(conversation)

    async def beginning(conversation: Conversation) -> None:
        requested.append(conversation)
        await saying(token_ids[:cut], then=None)(conversation)

    before = nodes.metric("pdserve_replayed_tokens_total")
    events = stream(nodes.client, nodes.play(beginning, rest) | {"stream_options": {"include_usage": True}})
    assert text_of(events) == text
    assert events[-2]["usage"]["completion_tokens"] == len(token_ids)
    first, second = (conversation.message for conversation in requested)
    assert resumed(requested[1]) == ({0: token_ids[:cut]} if cut else {})
    assert (second.sampling, second.token_ids) == (first.sampling, first.token_ids)
    assert 0 < second.timeout_ms <= first.timeout_ms
    assert nodes.metric("pdserve_replayed_tokens_total") == before + cut


def test_stop_string_is_found_across_a_migration(nodes: Nodes, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one two STOP three")
    cut = len(tokenizer.encode("one two ST"))
    body = nodes.play(saying(token_ids[:cut], then=None), saying(token_ids[cut:]))
    events = stream(nodes.client, {**body, "stop": ["STOP"]})
    assert text_of(events) == "one two "
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_only_unfinished_choices_migrate(nodes: Nodes, tokenizer: Tokenizer) -> None:
    (a,), (b,), (c,) = (tokenizer.encode(letter) for letter in "abc")
    requested: list[dict[int, list[int]]] = []

    async def beginning(conversation: Conversation) -> None:
        conversation.token(a, choice=0)
        conversation.token(b, choice=1, finish="length")
        conversation.token(c, choice=2)
        conversation.token(c, choice=2)
        conversation.fail(pb.Failure.NODE_FAILED)

    async def rest(conversation: Conversation) -> None:
        requested.append(resumed(conversation))
        conversation.token(b, choice=2, finish="length")
        conversation.token(c, choice=0, finish="length")

    events = stream(nodes.client, nodes.play(beginning, rest) | {"n": 3})
    assert [text_of(events, choice) for choice in range(3)] == ["ac", "b", "ccb"]
    assert requested == [{0: [a], 2: [c, c]}]


def test_first_tokens_of_some_choices_lose_no_other(nodes: Nodes, tokenizer: Tokenizer) -> None:
    """A node resumes the choices that have output, and starts all of them if none has."""
    (a,), (b,) = (tokenizer.encode(letter) for letter in "ab")

    async def beginning(conversation: Conversation) -> None:
        conversation.token(a, choice=0)
        conversation.token(b, choice=1, finish="length")
        conversation.fail(pb.Failure.NODE_FAILED)

    async def computing(conversation: Conversation) -> None:
        begun = resumed(conversation)
        for choice in () if begun else range(3):
            conversation.token(a, choice=choice)
        for choice in begun or range(3):
            conversation.token(b, choice=choice, finish="length")

    events = stream(nodes.client, nodes.play(beginning, computing) | {"n": 3})
    assert [text_of(events, choice) for choice in range(3)] == ["ab", "ab", "ab"]


def test_cached_tokens_are_counted_at_the_first_node(nodes: Nodes, tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")

    async def beginning(conversation: Conversation) -> None:
        conversation.token(a, cached_tokens=1)
        conversation.fail(pb.Failure.NODE_FAILED)

    async def rest(conversation: Conversation) -> None:
        conversation.token(a, cached_tokens=1, finish="length")

    usage = nodes.client.post("/v1/completions", json=nodes.play(beginning, rest)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, 2)


def test_request_fails_after_the_limit_of_node_failures(nodes: Nodes, tokenizer: Tokenizer) -> None:
    """The request migrates twice, then the client gets the error."""
    (a,) = tokenizer.encode("a")
    num_asked = 0

    async def poisoned(conversation: Conversation) -> None:
        nonlocal num_asked
        num_asked += 1
        conversation.token(a)
        conversation.fail(pb.Failure.NODE_FAILED, "the engine died")

    events = stream(nodes.client, nodes.play(*[poisoned] * 4))
    assert num_asked == 3
    assert events[-1]["error"]["type"] == "node_error"
    assert "3 decode nodes failed" in events[-1]["error"]["message"]
    assert "the engine died" in events[-1]["error"]["message"]


def crashing(token_ids: list[int], code: pb.Failure.Code.ValueType = pb.Failure.CRASHED) -> Script:
    async def script(conversation: Conversation) -> None:
        for token_id in token_ids:
            conversation.token(token_id)
        conversation.fail(code, "the engine ended")

    return script


@pytest.mark.parametrize("first", [pb.Failure.CRASHED, pb.Failure.PREFILL_CRASHED])
def test_request_fails_with_an_error_of_its_own_after_the_second_crash(
    tokenizer_dir: Path, tokenizer: Tokenizer, first: pb.Failure.Code.ValueType
) -> None:
    """The request is resumed once, also if it was cleared in between."""
    (a,) = tokenizer.encode("a")
    with start_nodes(tokenizer_dir) as fleet:
        body = fleet.play(crashing([a], first), crashing([a] * 20))  # a third script would be missing
        answer = fleet.client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "request_crashes_engines")
        assert "the engine ended" in error["message"]
        assert fleet.metric('pdserve_migrations_total{reason="crashed"}') == 1


def test_suspects_are_on_trial_one_at_a_time_on_a_node(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    """The next one begins once the last one is cleared by its tokens, or has ended."""
    (a,) = tokenizer.encode("a")
    on_trial: list[str] = []
    most: list[int] = []

    def trial(num_tokens: int) -> Script:
        async def script(conversation: Conversation) -> None:
            on_trial.append(conversation.message.prefill_node)
            most.append(len(on_trial))
            for number in range(num_tokens):
                await asyncio.sleep(0.02)
                if number == min(7, num_tokens - 1):  # eight tokens clear it
                    on_trial.pop()
                conversation.token(a, finish="length" if number == num_tokens - 1 else "")

        return script

    with start_nodes(tokenizer_dir, hashes=[""]) as fleet, ThreadPoolExecutor() as threads:
        lengths = [12, 3, 30, 12]
        bodies = [fleet.play(crashing([a]), trial(length)) for length in lengths]
        answers = list(threads.map(lambda body: stream(fleet.client, body), bodies))
        assert [text_of(events) for events in answers] == ["a" * (1 + length) for length in lengths]
        assert most == [1] * len(lengths)


def test_crash_is_blamed_on_the_suspect_on_trial_alone(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    """The other request in that step goes on."""
    (a,) = tokenizer.encode("a")
    both = asyncio.Event()

    async def last_trial(conversation: Conversation) -> None:
        conversation.token(a)
        await both.wait()
        conversation.fail(pb.Failure.CRASHED)

    async def beside_it(conversation: Conversation) -> None:
        conversation.token(a)
        both.set()
        conversation.fail(pb.Failure.CRASHED)

    with start_nodes(tokenizer_dir, hashes=[""]) as fleet, ThreadPoolExecutor() as threads:
        (node,) = fleet.all
        guilty = fleet.play(crashing([a]), last_trial)
        innocent = fleet.play(beside_it, saying([a, a]))
        failing = threads.submit(stream, fleet.client, guilty)
        wait_for(lambda: guilty["cache_salt"] in node.seen and bool(node.seen[guilty["cache_salt"]].message.resume))
        assert text_of(stream(fleet.client, innocent)) == "aaa"
        assert failing.result()[-1]["error"]["code"] == "request_crashes_engines"


@pytest.mark.parametrize("code", [pb.Failure.INVALID, pb.Failure.DEADLINE, pb.Failure.OVERLOADED])
def test_error_that_is_no_node_failure_reaches_the_client(nodes: Nodes, code: pb.Failure.Code.ValueType) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.fail(code, "as it is")

    response = nodes.client.post("/v1/completions", json=nodes.play(script, script))
    assert response.json()["error"]["message"] == "as it is"


def test_migrating_request_retries_a_full_node(nodes: Nodes, tokenizer: Tokenizer) -> None:
    """A started request waits for room."""
    token_ids = tokenizer.encode("abc")

    async def busy(conversation: Conversation) -> None:
        conversation.fail(pb.Failure.OVERLOADED, "the queue is full")

    body = nodes.play(saying(token_ids[:1], then=None), busy, busy, saying(token_ids[1:]))
    assert text_of(stream(nodes.client, body)) == "abc"


def test_request_migrates_from_lost_nodes(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    """The request migrates at once; without another node it waits until one appears or returns."""
    (a,) = tokenizer.encode("a")
    alive: list[Conversation] = []

    async def forever(conversation: Conversation) -> None:
        conversation.token(a)
        alive.append(conversation)
        await asyncio.sleep(60)

    def node_of(conversation: Conversation) -> ScriptedNode:
        salt = conversation.message.cache_salt
        return next(node for node in fleet.all if node.seen.get(salt) is conversation)

    with start_nodes(tokenizer_dir) as fleet:
        body = fleet.play(forever, forever, saying([a]))
        with fleet.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = filter(None, response.iter_lines())
            assert '"text":"a"' in next(lines)
            first = node_of(alive[0])
            first.stop()
            wait_for(lambda: len(alive) == 2)
            assert resumed(alive[1]) == {0: [a]}
            assert '"text":"a"' in next(lines)
            node_of(alive[1]).stop()
            wait_for(lambda: fleet.metric('pdserve_migrations_total{reason="lost"}') == 2)
            first.description.epoch = "2"
            first.start()
            assert list(lines)[-1] == "data: [DONE]"
        assert resumed(first.seen[body["cache_salt"]]) == {0: [a, a]}


def test_request_migrates_only_to_compatible_nodes(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    """A different compatibility hash means other weights or another precision."""
    (a,) = tokenizer.encode("a")
    requested: list[ScriptedNode] = []

    def noted(script: Script) -> Script:
        async def play(conversation: Conversation) -> None:
            salt = conversation.message.cache_salt
            requested.append(next(node for node in fleet.all if node.seen.get(salt) is conversation))
            await script(conversation)

        return play

    with start_nodes(tokenizer_dir, hashes=["a", "b", "a", "b"]) as fleet:
        for _ in range(4):
            requested.clear()
            body = fleet.play(noted(saying([a], then=None)), noted(saying([a])))
            events = stream(fleet.client, body)
            assert text_of(events) == "aa"
            first, second = requested
            assert first is not second
            assert first.description.compat_hash == second.description.compat_hash
            assert {event["system_fingerprint"] for event in events[:-1]} == {f"fp_{first.description.weights}"}


def test_migration_can_be_disabled(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    with start_nodes(tokenizer_dir, "--migrations", "0") as fleet:
        events = stream(fleet.client, fleet.play(saying(tokenizer.encode("a"), then=None)))
        assert events[-1]["error"]["message"] == "the engine died"
        assert fleet.metric("pdserve_migrations_total") == 0
