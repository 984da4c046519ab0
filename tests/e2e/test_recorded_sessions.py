"""Whole sessions of Codex CLI and Claude Code on two nodes of each role, while nodes die.

Thirty turns with tools, failed tools, images of which one is refused, and a request that is cancelled and repeated.
Each answer must be that of a cold decode node alone: neither a death, nor a cached prefix, nor a handoff changes a
token.

python -m pytest -m slow tests/e2e/test_recorded_sessions.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from agent_sessions import Answer, ClaudeCode, Codex, Fields, Session, Turn
from exposition import scrape
from fleet import Fleet, NodeProcess, start_fleet
from machine import patience
from test_lost_nodes import migrations

from pdserve.checkpoint.hub import EMBEDDED_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SESSIONS = Path(__file__).parent / "sessions"
FLAGS = ("--dtype", "float32")  # rounding must not decide between two tokens
HAND_OFF_ALL = ("--handoff-min-tokens", "0")
PREFILL_NODES_DIE = 8  # the turn
DEAD_TURNS = 3  # until dead nodes are restarted

PROGRAMS: dict[str, type[Session]] = {"codex": Codex, "claude_code": ClaudeCode}


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with start_fleet(EMBEDDED_MODEL, 2, 2, True, FLAGS, (*FLAGS, *HAND_OFF_ALL)) as fleet:
        yield fleet


@pytest.fixture
def cold() -> Iterator[Fleet]:
    """One decode node. Requests with different salts share no cached prefix."""
    with start_fleet(EMBEDDED_MODEL, prefill=0, decode_flags=FLAGS) as fleet:
        yield fleet


@pytest.mark.parametrize("program", PROGRAMS)
def test_session_has_the_answers_of_a_cold_node(program: str, fleet: Fleet, cold: Fleet) -> None:
    session = PROGRAMS[program](SESSIONS / f"{program}.json")
    with connected(fleet) as client:
        bodies, answers = replay(session, client, fleet)
    assert disconnected(fleet) == sum(turn.cancelled for turn in session.record.turns)
    assert sum(node.counter("handoffs") for node in fleet.decode) > 0
    assert sum(node.counter("prefix_cached_tokens") for node in fleet.prefill) > 0
    for node in fleet.nodes:
        node.wait_idle(60.0)
    check_usage(answers)
    check_calls(answers)
    with connected(cold) as client:
        for number, (body, answer) in enumerate(zip(bodies, answers, strict=True), 1):
            salted = {**body, "cache_salt": f"turn {number}"}
            expected = session.answer_of(list(session.stream(client, salted)))
            assert expected.cached_tokens == 0
            assert comparable(answer) == comparable(expected), f"turn {number}"
    cold.decode[0].wait_idle()


def connected(fleet: Fleet) -> httpx.Client:
    return httpx.Client(base_url=fleet.url, timeout=patience(120.0), trust_env=False)


def disconnected(fleet: Fleet) -> float:
    """Return the number of requests whose client went away."""
    samples = [sample for metric in scrape(f"{fleet.url}/metrics") for sample in metric.samples]
    series = [sample for sample in samples if sample.name == "pdserve_requests_total"]
    return sum(sample.value for sample in series if sample.labels["outcome"] == "disconnected")


def comparable(answer: Answer) -> tuple[object, ...]:
    return answer.said, answer.input_tokens, answer.output_tokens, answer.within_limit, answer.warnings


def replay(session: Session, client: httpx.Client, fleet: Fleet) -> tuple[list[Fields], list[Answer]]:
    """Return the bodies and the answers of all turns. Prefill nodes die, and the decode node of a long answer."""
    faults = {PREFILL_NODES_DIE: ask_while_prefill_nodes_die, long_turn(session): ask_while_decode_node_dies}
    bodies = []
    answers = []
    for number, turn in enumerate(session.record.turns, 1):
        if number - DEAD_TURNS in faults:
            restart_dead_nodes(fleet)
        body = session.request(turn)
        if turn.refused:
            assert "is an image; the model reads text only" in session.refusal(client, body)
            body = session.request_without_image(turn)
        begun = cancel(session, client, body) if turn.cancelled else ""
        counted = session.count_tokens(client, body) if isinstance(session, ClaudeCode) and turn.counted else None
        if number in faults:
            answer = faults[number](session, client, body, fleet)
        else:
            answer = session.answer_of(list(session.stream(client, body)))
        check_answer(session, turn, body, answer)
        assert "".join(text for name, text in answer.said if not name).startswith(begun)
        assert counted in (None, answer.input_tokens)
        session.end(turn, answer)
        bodies.append(body)
        answers.append(answer)
    return bodies, answers


def long_turn(session: Session) -> int:
    return next(n for n, turn in enumerate(session.record.turns, 1) if turn.least and not turn.cancelled)


def check_answer(session: Session, turn: Turn, body: Fields, answer: Answer) -> None:
    if turn.call:
        assert len(answer.called) == 1
        assert turn.call in ("any", *answer.called)
    images = json.dumps(body).count(f'"type": "{session.image}"')
    warning = session.placeholders.format(images)
    assert [text for text in answer.warnings if "placeholders" in text] == ([warning] if images else [])


def check_usage(answers: list[Answer]) -> None:
    for last, answer in pairwise(answers):
        assert answer.input_tokens > last.input_tokens
        assert 0 <= answer.cached_tokens < answer.input_tokens
    assert sum(answer.cached_tokens > 0 for answer in answers) > len(answers) / 2


def check_calls(answers: list[Answer]) -> None:
    """A small model does not end every call before the limit; most must be complete."""
    complete = [answer.within_limit for answer in answers if answer.called]
    assert sum(complete) > len(complete) * 2 / 3


def cancel(session: Session, client: httpx.Client, body: Fields) -> str:
    """Close the connection once the answer has begun. Return its text so far."""
    events = session.stream(client, body)
    text = next(text for event in events if (text := session.text_of(event)))
    events.close()
    return text


# ---------------------------------------------------------------- nodes die


def ask_while_prefill_nodes_die(session: Session, client: httpx.Client, body: Fields, fleet: Fleet) -> Answer:
    """All prefill nodes die while one of them has the prompt; the decode node computes it."""

    def recomputed() -> float:
        return sum(node.counter("handoff_recomputes") for node in fleet.decode)

    for node in fleet.nodes:
        node.wait_idle()
    before = recomputed()
    for node in fleet.prefill:
        node.stop("engine")
    with ThreadPoolExecutor(1) as pool:
        events = pool.submit(lambda: list(session.stream(client, body)))
        fleet.wait_until(lambda: any(node.status().held_blocks for node in fleet.decode), 20.0)
        for node in fleet.prefill:
            node.kill()
        answer = session.answer_of(events.result())
    assert recomputed() == before + 1
    return answer


def ask_while_decode_node_dies(session: Session, client: httpx.Client, body: Fields, fleet: Fleet) -> Answer:
    """A decode node dies once the client has some of its answer; the other one continues."""
    before = migrations(fleet)
    events = []
    killed = False
    for event in session.stream(client, body):
        events.append(event)
        if session.text_of(event) and not killed:
            decoding(fleet).kill()
            killed = True
    assert migrations(fleet) == before + 1
    return session.answer_of(events)


def decoding(fleet: Fleet) -> NodeProcess:
    """Return the decode node of the only request."""
    busy: list[NodeProcess] = []

    def is_decoding() -> bool:
        busy.extend(node for node in fleet.decode if node.status().running)
        return bool(busy)

    fleet.wait_until(is_decoding, 10.0)
    return busy[0]


def restart_dead_nodes(fleet: Fleet) -> None:
    for node in fleet.nodes:
        if node.child.state == "ended":
            node.respawn()
    fleet.wait_ready()
    peers = len(fleet.prefill)
    fleet.wait_until(lambda: all(len(node.describe().connected_peers) == peers for node in fleet.decode), 30.0)
