"""Structured outputs of real nodes: every answer follows its grammar, with and without a handoff.

python -m pytest -m slow tests/e2e/test_structured_outputs.py     the same with runner V2, in Triton's interpreter
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import small_tokenizers
from checkpoints import make_checkpoint
from fleet import MODEL_NAME, RUNNER_ENVIRONMENTS, Fleet, HttpError
from machine import patience

SMALL = ("--max-num-seqs", "8", "--max-batch-tokens", "64", "--max-model-len", "384", "--kv-cache-memory", "4MiB")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TIGHT = {"disable_any_whitespace": True}
_seeds = itertools.count()

pytestmark = pytest.mark.timeout(240)


def checkpoint(directory: Path, num_layers: int) -> Path:
    backend = small_tokenizers.byte_level()
    sizes: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 384,
        "vocab_size": 520,
    }
    eos = backend.token_to_id("<|im_end|>")
    make_checkpoint(directory, "llama", num_hidden_layers=num_layers, eos_token_id=eos, **sizes)
    return small_tokenizers.write(directory, backend, eos_token="<|im_end|>", chat_template=small_tokenizers.CHATML)


@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.slow)])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A P and a D with one runner. With V1, D has two pipeline stages; the last one applies the masks."""
    is_v1 = request.param == "V1"
    directory = tmp_path_factory.mktemp("structured")
    environ = RUNNER_ENVIRONMENTS[request.param]
    split = ("--pp", "2") if is_v1 else ()
    model = checkpoint(directory, 2 if is_v1 else 1)
    with Fleet() as fleet:
        fleet.start_prefill(model, SMALL, environ)
        fleet.start_decode(model, [*SMALL, *split, "--handoff-min-tokens", "16"], environ)
        fleet.start_router(model, ["--reasoning-parser", "think"])
        fleet.wait_ready()
        yield fleet


def new_prompt(length: int = 24) -> str:
    """Return random text with one token per character, so that the prompt does not end within a character."""
    return "".join(random.Random(next(_seeds)).choices("QXZJKVW#", k=length))


def complete(fleet: Fleet, prompt: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": 100, "seed": 7, "return_token_ids": True, **fields}
    choices = fleet.post("/v1/completions", body)["choices"]
    assert isinstance(choices, list)
    return choices


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert len(person["name"]) <= 2
    assert 0 <= person["age"] <= 99
    assert len(person["tags"]) <= 2
    assert set(person["tags"]) <= {"a", "b"}


def test_choices_of_a_handoff_follow_a_schema(fleet: Fleet) -> None:
    before = fleet.decode[0].counter("handoffs")
    choices = complete(fleet, new_prompt(), n=2, structured_outputs={"json": PERSON, **TIGHT})
    assert fleet.decode[0].counter("handoffs") == before + 1
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
    for choice in choices:
        check_person(choice["text"])
    assert choices[0]["text"] != choices[1]["text"]


def test_a_handoff_and_a_cached_prompt_give_the_same_tokens(fleet: Fleet) -> None:
    prompt = new_prompt(33)
    fields = {"n": 2, "structured_outputs": {"regex": "[a-z]{3}-[0-9]{2,3}"}}
    handed_off = complete(fleet, prompt, **fields)
    before = fleet.decode[0].counter("local_prefills")
    local = complete(fleet, prompt, **fields)
    assert fleet.decode[0].counter("local_prefills") == before + 1
    assert [choice["token_ids"] for choice in local] == [choice["token_ids"] for choice in handed_off]
    for choice in local:
        assert re.fullmatch("[a-z]{3}-[0-9]{2,3}", choice["text"])


def test_token_rules_hold_from_the_first_token_on(fleet: Fleet) -> None:
    """P samples the first token of the handoff; without it D samples all, and they are the same."""
    vowels = [small_tokenizers.byte_level().token_to_id(letter) for letter in "aeiou"]
    requested = {"logprobs": 0, "logprob_token_ids": [70, 71], "return_tokens_as_token_ids": True}
    rules = {"allowed_token_ids": vowels, "bad_words": ["e", "ai", "aou"], "min_tokens": 9, "max_tokens": 9}
    prompt = new_prompt(33)
    before = fleet.decode[0].counter("handoffs")
    handed_off = complete(fleet, prompt, n=2, **rules, **requested)
    assert fleet.decode[0].counter("handoffs") == before + 1
    local = complete(fleet, prompt, n=2, **rules, **requested)
    assert [choice["token_ids"] for choice in local] == [choice["token_ids"] for choice in handed_off]
    for choice in handed_off:
        assert re.fullmatch("[aiou]{9}", choice["text"])
        assert not re.search("ai|aou", choice["text"])
        tops = choice["logprobs"]["top_logprobs"]
        assert len(tops) == 9
        assert all({"token_id:70", "token_id:71"} <= set(top) for top in tops)
    # A grammar and the rules hold together; without a common token the request fails.
    (digits,) = complete(fleet, prompt, guided_regex="[0-9]{5}", bad_words=["1", "2", "34"])
    assert re.fullmatch("[03-9]{5}", digits["text"])
    assert "34" not in digits["text"]
    with pytest.raises(HttpError, match="leave them out"):
        complete(fleet, prompt, guided_regex="[0-9]{5}", allowed_token_ids=vowels)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"^a{1,3}[0-9]$"}, "a{1,3}[0-9]"),
        ({"guided_choice": ["yes", "no", "日本"], "temperature": 0}, "yes|no|日本"),
        ({"guided_grammar": 'start: "x" digit+\ndigit: /[0-4]/', "max_tokens": 9}, "x[0-4]+"),
        ({"guided_grammar": 'root ::= "one" | "two"'}, "one|two"),
        ({"guided_json": {"enum": ["p", 17]}}, '"p"|17'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}}, "5"),
    ],
)
def test_every_notation_of_structured_outputs_is_followed(fleet: Fleet, fields: dict[str, Any], pattern: str) -> None:
    (choice,) = complete(fleet, new_prompt(5), **fields)
    assert re.fullmatch(pattern, choice["text"]), choice


def test_grammar_precedence_over_other_parameters(fleet: Fleet) -> None:
    prompt = new_prompt(5)
    structure = {"structured_outputs": {"regex": "[0-9]{2,4}"}}
    # EOS ends the output despite ignore_eos and min_tokens, because the grammar allows nothing else.
    (short,) = complete(fleet, prompt, **structure, ignore_eos=True, min_tokens=50)
    assert re.fullmatch("[0-9]{2,4}", short["text"])
    assert short["finish_reason"] == "stop"
    # A bias cannot allow a forbidden token; max_tokens and stop strings end the output early.
    (biased,) = complete(fleet, prompt, **structure, logit_bias={"300": 100.0}, max_tokens=1)
    assert biased["text"].isdigit()
    assert biased["finish_reason"] == "length"
    (stopped,) = complete(fleet, prompt, structured_outputs={"choice": ["ab.cd"]}, stop=".")
    assert (stopped["text"], stopped["finish_reason"]) == ("ab", "stop")
    # min_tokens holds as long as the grammar allows another token.
    (long,) = complete(fleet, prompt, structured_outputs={"regex": "[0-9]*"}, min_tokens=8, max_tokens=8)
    assert len(long["token_ids"]) == 8


def thought(question: str) -> dict[str, Any]:
    """Return the fields of a chat whose output begins within reasoning."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "<think>"}]
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def stream_chat(fleet: Fleet, **fields: Any) -> list[dict[str, Any]]:
    """Return the deltas of a streamed chat."""
    body = {"model": MODEL_NAME, "stream": True, **fields}
    with httpx.stream("POST", f"{fleet.url}/v1/chat/completions", json=body, timeout=patience(60)) as response:
        assert response.status_code == 200
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_a_chat_streams_json(fleet: Fleet) -> None:
    """The budget of the reasoning ends within a character, so the end marker waits for the rest of it."""
    structure = {"structured_outputs": {"json": PERSON, **TIGHT}}
    deltas = stream_chat(fleet, **thought("Who?"), **structure, thinking_token_budget=2, seed=3)
    check_person("".join(delta.get("content") or "" for delta in deltas))


def test_reasoning_ends_after_its_budget(fleet: Fleet) -> None:
    """The tokens of the end marker follow, although the request forbids them; whole and streamed."""
    letters = [small_tokenizers.byte_level().token_to_id(letter) for letter in "aeiou"]
    marker = small_tokenizers.byte_level().encode("</think>", add_special_tokens=False).ids
    rules = {"thinking_token_budget": 3, "allowed_token_ids": letters, "max_tokens": 3 + len(marker) + 2}
    body = {**thought(new_prompt(33)), **rules, "seed": 7}
    before = fleet.decode[0].counter("handoffs")
    (choice,) = fleet.post("/v1/chat/completions", {**body, "return_token_ids": True})["choices"]
    assert fleet.decode[0].counter("handoffs") == before + 1
    assert choice["token_ids"][3:-2] == marker
    reasoning = choice["message"]["reasoning"]
    content = choice["message"]["content"]
    assert re.fullmatch("[aeiou]{3}", reasoning)
    assert re.fullmatch("[aeiou]{2}", content)
    deltas = stream_chat(fleet, **body)
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == reasoning
    assert "".join(delta.get("content") or "" for delta in deltas) == content


def test_other_requests_run_beside_a_complex_grammar(fleet: Fleet) -> None:
    hostile = {"regex": "((a|b|c)*d(e|f)*){1,200}(a|b)*a(a|b){20}"}
    plain_prompts = [new_prompt(6) for _ in range(3)]
    alone = [complete(fleet, prompt, max_tokens=6) for prompt in plain_prompts]
    with ThreadPoolExecutor(5) as threads:
        constrained = [
            threads.submit(complete, fleet, new_prompt(6), structured_outputs=hostile, max_tokens=8) for _ in range(2)
        ]
        beside = list(threads.map(lambda prompt: complete(fleet, prompt, max_tokens=6), plain_prompts))
        assert beside == alone
        for answer in constrained:
            assert set(answer.result()[0]["text"]) <= set("abcdef")
    for node in (*fleet.prefill, *fleet.decode):
        node.wait_idle()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "guided_json", "uniqueItems"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be a JSON object"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "exclude each other"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs", "unknown field backend"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "schema is missing"),
        ({"guided_grammar": "start: A\n" + 'A: "' + "a" * 140_000 + '"'}, "guided_grammar", "the limit is"),
        ({"guided_json": {"$ref": "file:///etc/hostname"}}, "guided_json", "retriev"),
    ],
)
def test_invalid_grammar_is_refused(fleet: Fleet, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(HttpError) as refused:
        complete(fleet, new_prompt(3), **fields)
    assert refused.value.status == 400
    assert refused.value.error["param"] == param
    assert words in refused.value.error["message"]
