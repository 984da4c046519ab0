"""Pooling: which vector a node computes of a prompt, read from a checkpoint.

| task     | checkpoint                                              | vector                                        |
|----------|---------------------------------------------------------|-----------------------------------------------|
| embed    | sentence-transformers' modules.json, 1_Pooling          | hidden state of the last token, or their mean |
| classify | ...ForSequenceClassification                            | the classifier's scores                       |
| classify | a causal model, such as the original Qwen3-Reranker     | probability of "yes" against "no"             |
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from pdserve.checkpoint.files import DECODE_ERRORS, read_file
from pdserve.errors import CheckpointError, ConfigError, shown
from pdserve.model.config_fields import ConfigFields

GENERATE = "generate"
EMBED = "embed"
CLASSIFY = "classify"
TASKS = ("auto", GENERATE, EMBED, CLASSIFY)
CLASSIFIER = "ForSequenceClassification"  # the end of the architecture's name
# methods
LAST = "last"
MEAN = "mean"
YES_OR_NO = "yes_or_no"
SCORE = "score"

_MAX_LABELS = 4096
_MAX_TOKENIZER_BYTES = 64 << 20


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``size`` is the number of values of a vector: dimensions of an embedding, or labels."""

    task: str
    method: str
    size: int
    normalize: bool = False
    matryoshka: bool = False  # embeddings may be shortened
    token_ids: tuple[int, ...] = ()  # ids of "no" and "yes"


def read_pooling(model_dir: Path, task: str) -> PoolingConfig | None:
    """Return what a node with ``--task`` computes; None: it generates. Raises CheckpointError or ConfigError."""
    if task not in TASKS:
        raise ConfigError(f"task {task!r} is not one of {', '.join(TASKS)}")
    fields = ConfigFields(model_dir / "config.json")
    names = fields.get("architectures") or [""]
    classifies = isinstance(names, list) and any(isinstance(n, str) and n.endswith(CLASSIFIER) for n in names)
    modules = _read_modules(model_dir)
    scores = [module for module in modules if str(module.get("type")).endswith(".LogitScore")]
    if task == "auto":
        task = CLASSIFY if classifies or scores else EMBED if modules else GENERATE
    if task == GENERATE:
        if classifies:
            raise ConfigError(f"{shown(names[0])} generates no text; use --task classify or auto")
        return None
    if task == EMBED:
        if classifies:
            raise ConfigError(f"{shown(names[0])} computes no embeddings; use --task classify or auto")
        return _embedding(model_dir, fields, names, modules)
    if classifies:
        return PoolingConfig(task=task, method=SCORE, size=_num_labels(fields))
    if scores:
        score_fields = ConfigFields(model_dir / str(scores[0].get("path")) / "config.json")
        token_ids = _scored_tokens(score_fields, fields.integer("vocab_size"))
    else:
        token_ids = _answer_tokens(model_dir)
    return PoolingConfig(task=task, method=YES_OR_NO, size=1, token_ids=token_ids)


def _scored_tokens(fields: ConfigFields, vocab_size: int) -> tuple[int, int]:
    """Read the ids of "no" and "yes" from sentence-transformers' LogitScore."""
    no = fields.get("false_token_id")
    yes = fields.get("true_token_id")
    for token_id in (no, yes):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            text = f"compares token {shown(yes)} with {shown(no)}; supported are two tokens of the vocabulary"
            raise fields.error(text)
    return no, yes


def _embedding(model_dir: Path, fields: ConfigFields, names: list[str], modules: list[dict[str, Any]]) -> PoolingConfig:
    """Read sentence-transformers' modules; without any, the last token's normalized hidden state is the embedding."""
    method = LAST
    normalize = True
    if modules:
        normalize = any(str(module.get("type")).endswith(".Normalize") for module in modules)
        for module in modules:
            kind = str(module.get("type"))
            if kind.endswith(".Pooling"):
                method = _method(ConfigFields(model_dir / str(module.get("path")) / "config.json"))
            elif not kind.endswith((".Transformer", ".Normalize")):
                text = "supported are Transformer, Pooling and Normalize"
                raise CheckpointError(f"{model_dir}/modules.json has a module {shown(kind)}; {text}")
    matryoshka = bool(fields.get("is_matryoshka") or fields.get("matryoshka_dimensions"))
    qwen = method == LAST and any(str(name).startswith("Qwen3") for name in names)  # Qwen3-Embedding's model card
    size = fields.integer("hidden_size")
    return PoolingConfig(task=EMBED, method=method, size=size, normalize=normalize, matryoshka=matryoshka or qwen)


def _method(fields: ConfigFields) -> str:
    """Read ``pooling_mode`` (sentence-transformers 6), or the flags ``pooling_mode_…`` of older versions."""
    chosen = [name for name, value in fields.values.items() if name.startswith("pooling_mode_") and value is True]
    mode = fields.get("pooling_mode") or "+".join(name.removeprefix("pooling_mode_") for name in chosen)
    methods = {"lasttoken": LAST, "mean_tokens": MEAN, "mean": MEAN}
    if mode not in methods:
        raise fields.error(f"pools by {shown(mode)}; supported are lasttoken and mean")
    if fields.get("include_prompt", True) is not True:
        raise fields.error("leaves the prompt out of the mean (include_prompt); supported is true")
    return methods[mode]


def _num_labels(fields: ConfigFields) -> int:
    labels = fields.get("id2label")
    count = len(labels) if isinstance(labels, dict) else fields.get("num_labels", 2)
    if not isinstance(count, int) or not 1 <= count <= _MAX_LABELS:
        raise fields.error(f"has {shown(count)} labels; supported are 1 to {_MAX_LABELS}")
    return count


def _answer_tokens(model_dir: Path) -> tuple[int, int]:
    """Return the ids of "no" and "yes" in tokenizer.json."""
    path = model_dir / "tokenizer.json"
    vocabulary: dict[str, Any] = {}
    if path.exists() and os.path.getsize(path) <= _MAX_TOKENIZER_BYTES:
        try:
            vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise CheckpointError(f"{path} cannot be read; download the checkpoint again") from exc
    ids = [vocabulary.get(word) for word in ("no", "yes")] if isinstance(vocabulary, dict) else []
    match ids:
        case [int() as no, int() as yes]:
            return no, yes
    remedy = "only a model with the tokens 'yes' and 'no', such as Qwen3-Reranker, classifies without a classifier"
    raise CheckpointError(f"{path} lacks one of the tokens 'yes' and 'no'; {remedy}")


def _read_modules(model_dir: Path) -> list[dict[str, Any]]:
    """Read modules.json; empty if there is none."""
    path = model_dir / "modules.json"
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(read_file(path, 1 << 20), type=list[dict[str, Any]])
    except DECODE_ERRORS as exc:
        raise CheckpointError(f"{path} is no list of modules; download the checkpoint again") from exc
