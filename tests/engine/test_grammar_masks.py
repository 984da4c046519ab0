"""Choices under a grammar: no step waits for their masks, and a mask that becomes ready wakes it."""

from __future__ import annotations

import collections
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import tokenizers
from machine import patience
from toy import reference
from toy_node import Node

from engine.grammars.workers import Advance, Compiled, GrammarWorkers, Masked
from engine.sequence_parts import Constraint
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.errors import RequestError
from pdserve.grammar import Grammar, GrammarVocabulary, from_ebnf, from_json_schema, from_regex
from pdserve.ipc.messages import Cancel, Mode, Shutdown, Submit
from pdserve.model.model_config import load_model_config
from pdserve.records import FinishReason, TokenMask
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams

TOKENIZER = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
LETTERS = SamplingParams(max_tokens=20, grammar=from_regex("[a-z]{400}"))  # no token of it ends it


def workers(wake: Callable[[], None]) -> GrammarWorkers:
    return GrammarWorkers(str(EMBEDDED_MODEL), load_model_config(EMBEDDED_MODEL), wake)


@pytest.mark.parametrize("depth", [1, 2])
def test_plan_never_waits_for_masks(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all mask threads stand still, other requests run to their end and no plan blocks on a condition."""
    gate = threading.Event()

    def stand_still() -> None:
        gate.wait()

    node = Node(64, depth, grammars=lambda wake: workers(stand_still))
    node.submit(0, [1, 2, 3], LETTERS, Mode.LOCAL)
    for _ in range(10_000):
        node.step()
        if len(node.tokens[0, 0]) >= 3:  # its grammar is compiled, and each of the two threads has published a mask
            break
        time.sleep(0.001)
    loop = threading.current_thread()
    wait = threading.Condition.wait

    def wait_beside_the_loop(condition: threading.Condition, timeout: float | None = None) -> bool:
        assert threading.current_thread() is not loop, "the step loop waits"
        return wait(condition, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", wait_beside_the_loop)
        node.submit(1, [4, 5, 6], SamplingParams(max_tokens=30), Mode.LOCAL)
        while (1, 0) not in node.finished:
            node.step()
    assert node.tokens[1, 0] == reference([4, 5, 6], 0, 30)
    assert (0, 0) not in node.finished
    gate.set()
    while (0, 0) not in node.finished:
        node.step()
        time.sleep(0.001)
    assert len(node.tokens[0, 0]) == 20
    node.assert_all_free()
    node.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_mask_that_becomes_ready_wakes_an_idle_loop(depth: int) -> None:
    node = Node(64, depth, grammars=workers)
    loop = threading.Thread(target=node.engine.run)
    loop.start()
    node.send(Submit(1, pack_tokens([1, 2, 3]), LETTERS, Mode.LOCAL))
    tokens: list[int] = []
    ended: FinishReason | None = None
    while ended is None:
        time.sleep(0.001)
        for _, _, token_id, finish, _ in (row for batch in node.received() for row in batch.outputs.rows()):
            tokens.append(token_id)
            ended = finish
    node.send(Shutdown())
    loop.join()
    assert len(tokens) == 20
    steps = [plan for plan in node.runner.launched if plan.scheduled]
    assert len(steps) == 20, "a step computes one token, and no step runs without its mask"
    node.close()


def results(grammars: GrammarWorkers) -> Iterator[Compiled | Masked]:
    """Yield results as they arrive."""
    end = time.monotonic() + patience(60)
    while time.monotonic() < end:
        yield from grammars.take_results()
        time.sleep(0.001)
    raise AssertionError("no result within 60 s")


NOTATIONS: dict[str, Callable[[str], str]] = {
    "regex": lambda text: from_regex(re.escape(text)),
    "const": lambda text: from_json_schema(json.dumps({"const": text})),
    "enum": lambda text: from_json_schema(json.dumps({"enum": [text, "other"]})),
    "Lark": lambda text: f"start: {json.dumps(text)}",
    "GBNF": lambda text: from_ebnf(f"root ::= {json.dumps(text)}"),
}


@pytest.mark.parametrize("notation", NOTATIONS)
def test_grammars_give_the_text_of_added_tokens(notation: str) -> None:
    """Ordinary tokens spell it, at the start and behind other text; the added token itself means something else."""
    config = load_model_config(EMBEDDED_MODEL)
    vocabulary = GrammarVocabulary(TOKENIZER.to_str(), config.vocab_size, config.eos_token_ids)
    added = {token_id: token.content for token_id, token in TOKENIZER.get_added_tokens_decoder().items()}
    for text in (f"{before}{content}y" for content in added.values() for before in ("", "x")):
        matcher = Grammar(NOTATIONS[notation](text), vocabulary).matcher()
        goal = json.dumps(text) if notation in ("const", "enum") else text
        token_ids: list[int] = []
        while (written := TOKENIZER.decode(token_ids)) != goal:
            bits = int.from_bytes(matcher.mask(), "little")
            allowed = [token_id for token_id in range(config.vocab_size) if bits >> token_id & 1]
            assert not added.keys() & set(allowed), (text, written)
            fitting = (candidate for candidate in allowed if goal.startswith(TOKENIZER.decode([*token_ids, candidate])))
            token_ids.append(next(fitting))
            matcher.consume(token_ids[-1:])


@pytest.mark.parametrize("lacking", [1, 7, 96, 1500])
def test_no_mask_allows_a_token_without_weights(lacking: int) -> None:
    """A tokenizer with more tokens than the model: texts are written with the others, also where they are forced."""
    vocab_size = TOKENIZER.get_vocab_size() - lacking
    vocabulary = GrammarVocabulary(TOKENIZER.to_str(), vocab_size, [2])
    for text in ("The quick brown fox", '{"city": "Paris"}', "".join(f"{number:03d} " for number in range(40))):
        matcher = Grammar(from_regex(re.escape(text)), vocabulary).matcher()
        written = ""
        while written != text:
            mask = matcher.mask()
            assert len(mask) == TokenMask.num_bytes(vocab_size)
            bits = int.from_bytes(mask, "little")
            assert 0 < bits < 1 << vocab_size
            allowed = [token_id for token_id in range(vocab_size) if bits >> token_id & 1]
            token_id, written = next(
                (token_id, after)
                for token_id in reversed(allowed)
                if text.startswith(after := written + TOKENIZER.decode([token_id])) and after != written
            )
            matcher.consume([token_id])


def chain(depth: int) -> str:
    """Return a grammar that takes long to compile: 0.1 s with 6,000 rules."""
    return "start: r0\n" + "".join(f'r{i}: r{i + 1} "x"\n' for i in range(depth)) + f'r{depth}: "a"\n'


def compiled(grammars: GrammarWorkers) -> Iterator[Compiled]:
    return (result for result in results(grammars) if isinstance(result, Compiled))


def test_status_drops_a_request_that_is_cancelled_while_its_grammar_compiles() -> None:
    node = Node(64, 1, grammars=lambda wake: workers(lambda: None))
    node.submit(0, [1, 2, 3], SamplingParams(max_tokens=5, grammar=chain(30_000)), Mode.LOCAL)
    node.submit(1, [4, 5, 6], SamplingParams(max_tokens=5), Mode.LOCAL)
    node.obey(Cancel(1))
    node.engine.step()
    assert node.received()[-1].status.waiting == 1
    node.obey(Cancel(0))
    node.engine.step()
    assert node.received()[-1].status.waiting == 0
    node.close()


def test_grammars_of_a_client_do_not_delay_those_of_another() -> None:
    grammars = workers(lambda: None)
    quick = from_regex("[a-z]{9}")
    grammars.load()
    for number in range(20):
        grammars.compile(chain(5000 + number), client=1)
    grammars.compile(quick, client=2)
    texts = [result.text for result in islice(compiled(grammars), 21)]
    assert texts.index(quick) <= 5


def test_masks_of_a_slow_grammar_do_not_delay_others() -> None:
    """Each choice of the slow one waits for its mask, 1 or 2 ms; the quick one is not behind them."""
    grammars = workers(lambda: None)
    slow = from_ebnf(f'root ::= "{"the quick brown fox " * 400}"')
    quick = from_regex("[a-z]{9}")
    for client, text in enumerate((slow, quick)):
        grammars.compile(text, client)
    by_text = {result.text: result.result for result in islice(compiled(grammars), 2)}
    constraints = []
    for client, text, num in ((0, slow, 100), (1, quick, 1)):
        grammar = by_text[text]
        assert isinstance(grammar, Grammar)
        constraints += [Constraint(grammar) for _ in range(num)]
        grammars.advance([Advance(client, constraint, (), frozenset()) for constraint in constraints[-num:]])
    masks = (result.constraint for result in results(grammars) if isinstance(result, Masked))
    assert list(islice(masks, 101)).index(constraints[-1]) <= 25


def test_grammar_that_becomes_too_slow_is_refused() -> None:
    """The first mask is quick; masks of the literal behind it take too long."""
    grammars = workers(lambda: None)
    grammars.compile(from_ebnf(f'root ::= [0-9] "{"the quick brown fox " * 6000}"'), client=1)
    grammar = next(compiled(grammars)).result
    assert isinstance(grammar, Grammar)
    matcher = grammar.matcher()
    digit = TOKENIZER.token_to_id("7")
    assert digit is not None
    matcher.consume([digit])
    with pytest.raises(RequestError, match="ms of computation per token, the limit is 10 ms"):
        collections.deque(matcher.mask() for _ in range(1000))
