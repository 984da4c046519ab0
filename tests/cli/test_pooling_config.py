"""The task of a checkpoint, and what a node computes for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import CheckpointError
from pdserve.model.pooling import CLASSIFY, EMBED, LAST, SCORE, YES_OR_NO, read_pooling

SEQUENCE_CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "score"}}
TRANSFORMER = "sentence_transformers.models.Transformer"
POOLING = "sentence_transformers.models.Pooling"
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"


def write(directory: Path, config: dict[str, Any], modules: list[str], module: dict[str, Any] | None = None) -> Path:
    """Write config.json, modules.json if there are any, and the config of the last module."""
    sizes = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "vocab_size": 100}
    (directory / "config.json").write_text(json.dumps({**sizes, **config}))
    if modules:
        entries = [{"idx": i, "path": f"{i}_Module" if i else "", "type": kind} for i, kind in enumerate(modules)]
        (directory / "modules.json").write_text(json.dumps(entries))
    if module is not None:
        path = directory / f"{len(modules) - 1}_Module"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(module))
    return directory


def test_causal_model_generates(tmp_path: Path) -> None:
    assert read_pooling(write(tmp_path, {}, []), "auto") is None


def test_sentence_transformer_embeds(tmp_path: Path) -> None:
    pooling = read_pooling(write(tmp_path, {}, [TRANSFORMER, POOLING], {"pooling_mode_lasttoken": True}), "auto")
    assert pooling is not None
    assert (pooling.task, pooling.method, pooling.size, pooling.normalize) == (EMBED, LAST, 64, False)


@pytest.mark.parametrize("modules", [[], [TRANSFORMER]])
def test_sequence_classifier_classifies_with_and_without_modules(tmp_path: Path, modules: list[str]) -> None:
    pooling = read_pooling(write(tmp_path, SEQUENCE_CLASSIFIER, modules), "auto")
    assert pooling is not None
    assert (pooling.task, pooling.method, pooling.size) == (CLASSIFY, SCORE, 1)


def test_logit_score_says_which_tokens_are_compared(tmp_path: Path) -> None:
    tokens = {"true_token_id": 7, "false_token_id": 3}
    pooling = read_pooling(write(tmp_path, {}, [TRANSFORMER, LOGIT_SCORE], tokens), "auto")
    assert pooling is not None
    assert (pooling.task, pooling.method, pooling.token_ids) == (CLASSIFY, YES_OR_NO, (3, 7))


@pytest.mark.parametrize("token_id", [None, 100, -1, True, "no"])
def test_logit_score_of_other_tokens_is_refused(tmp_path: Path, token_id: Any) -> None:
    tokens = {"true_token_id": 7, "false_token_id": token_id}
    with pytest.raises(CheckpointError, match="supported are two tokens of the vocabulary"):
        read_pooling(write(tmp_path, {}, [TRANSFORMER, LOGIT_SCORE], tokens), "auto")


def test_deeply_nested_modules_are_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, SEQUENCE_CLASSIFIER, [])
    (directory / "modules.json").write_text('[{"a": ' + "[" * 3000)
    with pytest.raises(CheckpointError, match=r"modules\.json is no list of modules"):
        read_pooling(directory, "auto")
