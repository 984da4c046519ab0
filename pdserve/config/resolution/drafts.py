"""Choose where drafts come from (``--speculate``), and refuse sources that a model cannot have."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.node_options import AUTO, EAGLE3, LOOKUP, MTP, OFF, NodeOptions
from pdserve.config.parallel import ParallelConfig
from pdserve.config.resolution.resolved import Resolved
from pdserve.errors import ConfigError
from pdserve.model.eagle3 import load_eagle3
from pdserve.model.families import FAMILIES
from pdserve.model.model_config import TRANSFORMERS, ModelConfig
from pdserve.model.pooling import PoolingConfig


def choose_draft_source(
    options: NodeOptions,
    model: ModelConfig,
    model_dir: Path,
    parallel: ParallelConfig,
    pooling: PoolingConfig | None,
) -> Resolved[str]:
    """Return the source of drafts, without the directory of a head. Raises ConfigError for a layer that is missing."""
    if options.draft_head:
        return Resolved(EAGLE3)
    if options.speculate not in (AUTO, MTP):
        return Resolved(options.speculate)
    problem = _draft_layer_problem(options, model, model_dir, pooling)
    if options.speculate == AUTO:
        source = LOOKUP if problem else MTP
        if split := _split_states_problem(model, parallel):
            source = OFF
            problem = split
        if pooling is not None:
            source = OFF
        return Resolved(source, problem or "the checkpoint has a layer that predicts further tokens")
    if problem:
        raise ConfigError(f"speculate {MTP}: {problem}. Use lookup or off")
    return Resolved(MTP)


def check_drafts(options: NodeOptions, model: ModelConfig, parallel: ParallelConfig, source: str) -> None:
    """Raise ConfigError if pipeline stages could not verify drafts."""
    problem = _split_states_problem(model, parallel)
    if not problem or (source == OFF and options.synthetic_acceptance is None):
        return
    option = f"speculate {source}"
    if options.synthetic_acceptance is not None:
        option = f"synthetic_acceptance {options.synthetic_acceptance:g}"
    raise ConfigError(f"{option}: {problem}. Remove the option, or use tp in place of pp")


def with_draft_head(
    options: NodeOptions, model: ModelConfig, draft_dir: Path, pooling: PoolingConfig | None
) -> ModelConfig:
    """Return the model with the head in ``draft_dir``. Raises ConfigError unless it can make drafts."""
    if pooling is not None:
        problem = f"a node with task {pooling.task} generates nothing"
    elif model.impl == TRANSFORMERS:
        problem = f"{model.architecture} runs through transformers, which gives no auxiliary hidden states"
    elif model.latent is not None or model.state is not None:
        kind = "latents" if model.latent is not None else "recurrent states"
        problem = f"{model.architecture} keeps {kind}, and a head keys and values"
    else:
        problem = _further_layer_problem(model)
    if problem:
        raise ConfigError(f"speculate {options.speculate}: {problem}. Use lookup or off")
    head = load_eagle3(draft_dir, model.sizes_for_head, weights=options.reads_weights)
    if head.intermediate_size % options.tp:
        raise ConfigError(
            f"tp {options.tp} does not divide the intermediate_size of {draft_dir}, {head.intermediate_size}; choose a "
            "divisor"
        )
    return model.with_draft_layers(1, head)


def _split_states_problem(model: ModelConfig, parallel: ParallelConfig) -> str:
    """Say why the stages of a model cannot verify drafts; empty if they can."""
    if model.state is None or parallel.pp == 1:
        return ""
    return (
        f"{model.architecture} has recurrent layers, and with pp {parallel.pp} its first stages learn too late which "
        "drafts their states go on by"
    )


def _draft_layer_problem(
    options: NodeOptions, model: ModelConfig, model_dir: Path, pooling: PoolingConfig | None
) -> str:
    """Say why no layer of the model can make drafts; empty if one can."""
    if pooling is not None:
        return f"a node with task {pooling.task} generates nothing"
    if not model.predictor:
        able = ", ".join(name for name, family in FAMILIES.items() if family.predictor)
        return f"{model.architecture} has no layer here that predicts further tokens; {able} may have one"
    if not model.num_nextn_layers:
        return (
            "config.json names no layer that predicts further tokens (num_nextn_predict_layers, mtp_num_hidden_layers)"
        )
    if problem := _further_layer_problem(model):
        return problem
    stored = chain.from_iterable(read_headers(model_dir).values()) if options.reads_weights else (model.predictor,)
    if not any(name.startswith(model.predictor) for name in stored):
        return f"the checkpoint has no tensors {model.predictor}…, although config.json names such a layer"
    return ""


def _further_layer_problem(model: ModelConfig) -> str:
    """Return why no layer can follow the model's layers; empty if one can."""
    if any(spec.window for spec in model.attention):
        return "layers of this model have sliding windows, and a draft layer would need a KV cache group of its own"
    if model.gemma4 is not None:
        return "no head takes the hidden states between layers of Gemma 4 here"
    if model.rope.rope_type == "dynamic":
        return "rotary frequencies of this model depend on the length of a sequence"
    return ""
