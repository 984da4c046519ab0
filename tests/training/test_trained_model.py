"""The training's model computes what the served one does, and its rows are what the chat template renders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from router.text.chat.template import RenderRequest
from router.text.tokenizer import Tokenizer
from training.batches import Generator, sections_at
from training.checkpoint import CONFIG, copy_settings, random_weights, write_weights
from training.conversations import Writer
from training.facts import ATTRIBUTES
from training.model import TrainedModel
from training.optimizer import Optimizer
from training.train import main
from training.wordings import split
from training.words import Words, held_out, words_of

SMALL = {**CONFIG, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def test_the_trained_model_is_the_served_one() -> None:
    weights = random_weights(SMALL)
    reference: Any = Qwen3ForCausalLM(Qwen3Config(**SMALL))
    reference = reference.float()
    reference.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    model = TrainedModel(SMALL, weights, torch.device("cpu"))
    tokens = torch.randint(9, 4096, (96,), generator=torch.Generator().manual_seed(1))
    hidden = model.hidden(tokens, [(2, 32), (1, 32)])
    targets = torch.full((96,), -1)
    targets[31] = targets[95] = 7
    with torch.no_grad():
        logits = reference(input_ids=tokens.view(3, 32)).logits.float()
    expected = -logits[[0, 2], -1].log_softmax(-1)[:, 7].mean()
    assert model.loss(hidden, targets).item() == pytest.approx(expected.item(), abs=0.05)
    agreed = (model.predicted(hidden).view(3, 32) == logits.argmax(-1)).float().mean()
    assert agreed > 0.8  # bfloat16 beside float32
    assert all(torch.equal(model.weights()[name], tensor) for name, tensor in weights.items())


def test_steps_lower_the_loss() -> None:
    model = TrainedModel(SMALL, random_weights(SMALL), torch.device("cpu"))
    optimizer = Optimizer(model.parameters)
    batch = Generator(EMBEDDED_MODEL / "tokenizer.json", seed=1).batch([(4, 160)])
    tokens, where, targets = (torch.from_numpy(a.astype(np.int64)) for a in (batch.tokens, batch.where, batch.targets))
    losses = []
    for _ in range(12):
        loss = model.loss(model.hidden(tokens, batch.sections).index_select(0, where), targets)
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("kind", ["document", "tools", "agent", "talk"])
def test_rows_are_what_the_chat_template_renders(kind: str) -> None:
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    assert tokenizer.chat_template is not None
    words, pieces = words_of(json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())["model"]["vocab"])

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    writer = Writer(Words(random.Random(3), False, words, pieces), encode)
    parts: list[Any] = []
    row = writer.fill(noted(writer.parts(kind, 900), parts), 900)
    messages: list[dict[str, Any]] = []
    for turn in [turn for part in parts[:-1] for turn in part.turns]:  # the last exchange did not fit
        called = turn.content.startswith("<tool_call>") and turn.role == "assistant"
        messages.append(called_message(turn.content) if called else {"role": turn.role, "content": turn.content})
    text = tokenizer.chat_template.render(RenderRequest(messages, False, tools=list(parts[0].tools) or None))
    assert encode(text) == row.tokens
    assert row.answers
    for start, end, _ in row.answers:
        assert row.tokens[end - 1] == encode("<|im_end|>")[0]
        assert tokenizer.decode(row.tokens[start - 6 : start]).endswith("assistant\n")


def noted(parts: Any, seen: list[Any]) -> Any:
    for part in parts:
        seen.append(part)
        yield part


def called_message(content: str) -> dict[str, Any]:
    call = json.loads(content.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "1", "function": call}]}


def test_names_of_the_evaluation_are_never_trained() -> None:
    words = Words(random.Random(1))
    assert not any(held_out(words.person()) for _ in range(200))
    assert all(held_out(Words(random.Random(seed), evaluating=True).person()) for seed in range(50))


@pytest.mark.parametrize(
    "questions", [attribute.questions for attribute in ATTRIBUTES], ids=[attribute.label for attribute in ATTRIBUTES]
)
def test_wordings_of_the_evaluation_are_never_trained(questions: tuple[str, ...]) -> None:
    """Each way to ask is one of several, and variants keep the names that they ask about."""
    trained, held_out_wordings = split(questions)
    assert held_out_wordings
    assert len(trained) >= 10
    assert set(trained).isdisjoint(held_out_wordings)
    assert all("{e}" in text for text in trained + held_out_wordings)


def test_rows_grow_longer_during_the_training() -> None:
    assert sections_at(0.0, 48) == [(384, 320)]
    assert sections_at(0.9, 48) == [(48, 320), (24, 640), (24, 1280), (24, 2560)]
    assert all(sum(r * n for r, n in sections_at(p / 10, 7)) == 7 * 2560 for p in range(10))


def test_a_short_training_writes_a_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "source"
    out = tmp_path / "out"
    copy_settings(EMBEDDED_MODEL, source)
    (source / "config.json").write_text(json.dumps(SMALL))
    write_weights(source, random_weights(SMALL))
    flags = ["--model", str(source), "--init", str(source), "--out", str(out), "--no-compile", "--device", "cpu"]
    main([*flags, "--minutes", "0.02", "--slots", "1", "--longest", "640", "--workers", "1"])
    assert " facts " in (out / "training.log").read_text()
    loaded: Any = Qwen3ForCausalLM.from_pretrained(out, output_loading_info=True)
    reference, loading = loaded
    assert reference.num_parameters() < 6e6
    assert not loading["missing_keys"]
