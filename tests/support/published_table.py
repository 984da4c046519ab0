"""Rows of docs/published-models.md: how a node serves published models. ``scripts/published-table`` writes the page.

``published_models.json`` has the fields of their config.json that the code reads, and no weights.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pdserve.config.attention_backends import Platform
from pdserve.config.memory_fit import dtype_in_memory
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import num_parameters, weight_bytes
from pdserve.config.resolve import resolve
from pdserve.errors import PdserveError
from pdserve.model.model_config import TRANSFORMERS, vision_problem

PAGE = Path(__file__).parents[2] / "docs" / "published-models.md"
DATA = Path(__file__).with_name("published_models.json")

H200 = DeviceInfo("cuda", 0, "NVIDIA H200", 150_754_820_096, capability=(9, 0))
_PLATFORM = Platform(device="cuda", has_triton=True, has_flashinfer=True)
_KV_MEMORY = 1 << 40  # bytes: the sizes of large models are those of one rank, whatever a GPU holds

#: Errors of refused models, and the reasons that the page gives.
_REASONS = (
    (r"a model with ([\w -]+?) \(", r"\1"),
    (r"quantized checkpoint \('(\w+)'\)", r"weights of \1"),
    (r"lacks model type '([\w-]+)'", r"model type `\1` needs code of its checkpoint"),
    (r"model type '([\w-]+)' is no causal language model", r"no text model of `\1` is served"),
)

_HEAD = """\
# Published models

What a node does with {total} published checkpoints by their names, on one H200 with default flags.
`scripts/published-table` writes this page from their config.json files, and a test decides each row again; weights are
not part of it.
[models.md](models.md) explains the words. `pdserve explain MODEL` says the same for other names, flags and GPUs.

| column | |
|---|---|
{columns}

| name | layers | kept as | weights | KV |
|---|---|---|---|---|
"""
_COLUMNS = {
    "layers": "native or the library's, with the runner that the oracle chooses. Of a multimodal checkpoint, “images” "
    "if its tower is served, else “text”",
    "kept as": "linear layers and experts in memory; “bfloat16 of …”: dequantized when they are loaded",
    "weights": "GiB, as in `pdserve explain`: without a tower and layers that predict further tokens, with a tied head "
    "beside the embedding. A config.json does not name each layer that is stored unquantized, so all linear layers "
    "count in one form",
    "KV": "bytes per token of a long sequence: of the layers that attend to all tokens, with padding; and the "
    "recurrent state of a sequence",
}


class PublishedModel(NamedTuple):
    name: str
    config: dict[str, Any]
    billions: float | None  # parameters of the text model, as published; None: refused, or counted otherwise
    max_model_len: int | None

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        return directory


@cache
def published_models() -> dict[str, PublishedModel]:
    models: dict[str, PublishedModel] = {}
    for entry in json.loads(DATA.read_text()):
        config = entry.get("config") or models[entry["like"]].config
        if "quantization_config" in entry:
            config = config | {"quantization_config": entry["quantization_config"]}
        models[entry["name"]] = PublishedModel(entry["name"], config, entry.get("billions"), entry.get("max_model_len"))
    return models


class Row(NamedTuple):
    layers: str
    kept: str = "–"
    weights: str = "–"
    kv: str = "–"


def resolved(model: PublishedModel, directory: Path) -> NodeConfig:
    """Resolve a node with default flags on one H200. Raises PdserveError where it would refuse."""
    options = NodeOptions(
        model=str(model.write(directory)),
        load_format="dummy",
        kv_cache_memory=_KV_MEMORY,
        max_model_len=model.max_model_len,
    )
    return resolve(options, H200, {}, _PLATFORM)


def decide(model: PublishedModel, directory: Path) -> NodeConfig | Row:
    """Return the node's configuration, or the row of a refused model."""
    try:
        return resolved(model, directory)
    except PdserveError as exc:
        return _refused(exc)


def row_of(config: NodeConfig) -> Row:
    """Return the row of a served model. Layers of the library are made without values, which takes seconds."""
    if is_of_library(config):
        from library_models import checked_parameters  # imports torch and the library

        try:
            count = checked_parameters(config)
        except PdserveError as exc:
            return _refused(exc)
        config = _with_weights(config, count)
    size = weight_bytes(config.model, config.position, dtype_in_memory(config)) / 2**30
    layout = config.kv_layout
    kv = f"{layout.bytes_per_token * max(1, layout.groups.windows.count(None)):,}"
    if config.state_layout is not None:
        kv += f" + {config.state_layout.slot_bytes / 1e6:.1f} MB"
    return Row(_layers(config), _kept(config), f"{size:,.1f}", kv)


def is_of_library(config: NodeConfig) -> bool:
    """Whether layers of the library decide the row."""
    return config.model.impl == TRANSFORMERS


def parameters_of(config: NodeConfig) -> int:
    """Return the parameters of a native text model, a tied head once."""
    tied = config.model.vocab_size * config.model.hidden_size if config.model.tie_word_embeddings else 0
    return num_parameters(config.model, config.position) - tied


def as_page(rows: dict[str, Row]) -> str:
    lines = [f"| {name} | {' | '.join(row)} |" for name, row in rows.items()]
    columns = "\n".join(f"| {name} | {text} |" for name, text in _COLUMNS.items())
    return _HEAD.format(total=len(rows), columns=columns) + "\n".join(lines) + "\n"


def rows_of_page() -> dict[str, Row]:
    lines = re.findall(r"^\| (\S+/\S+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: Row(*cells.split(" | ")) for name, cells in lines}


def _layers(config: NodeConfig) -> str:
    model = config.model
    words = f"{'library' if is_of_library(config) else 'native'}, {config.decision.runner}"
    if model.multimodal:
        words += ", text" if vision_problem(Path(config.model_dir), model) else ", images"
    if config.options.max_model_len is not None:
        words += f", to {config.max_model_len:,} tokens"
    return words


def _kept(config: NodeConfig) -> str:
    model = config.model
    if model.weight_format == "unquantized":
        return config.dtype
    kinds = sorted({_FORMS.get(form.kind, form.kind) for form in model.layer_forms.values()})
    return " and ".join(kinds) if kinds else f"{config.dtype} of {model.weight_format}"


_FORMS = {"fp8": "FP8", "e2m1": "NVFP4", "int4": "INT4", "mxfp4": "MXFP4"}


def _with_weights(config: NodeConfig, count: int) -> NodeConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, num_weights=count))


def _refused(exc: PdserveError) -> Row:
    for pattern, reason in _REASONS:
        if match := re.search(pattern, str(exc)):
            return Row(f"refused: {match.expand(reason)}")
    raise AssertionError(f"no words for: {exc}")
