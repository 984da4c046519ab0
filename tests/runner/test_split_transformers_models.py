"""Models of transformers on several ranks, by the library's plans: exact, or refused by name.

python -m pytest -m slow tests/runner/test_split_transformers_models.py      every type with a plan
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import transformers
from any_models import FAMILIES, make_any_checkpoint
from checkpoints import make_checkpoint, node_config
from safetensors.torch import load_file
from staged_node import Outputs, Request, StagedNode, generate, generate_alone

from pdserve.config.library_plans import check_split, read_plans
from pdserve.config.node_config import NodeConfig
from pdserve.errors import ConfigError, PdserveError
from pdserve.sampling_params import SamplingParams

#: Two tensor shards share the one KV head of Llama. Phi-3's plan does not split its heads.
MODELS: dict[str, dict[str, Any]] = {"llama": {"num_key_value_heads": 1}, "phi3": {}, "qwen3_moe": {}}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, ignore_eos=True)


def checkpoint(folder: Path, model_type: str, **overrides: Any) -> Path:
    path = folder / model_type
    if path.exists():
        return path
    return (make_checkpoint if model_type == "llama" else make_any_checkpoint)(path, model_type, **overrides)


def config_of(directory: Path, **split: Any) -> NodeConfig:
    return node_config(
        directory,
        impl="transformers",
        max_num_seqs=5,
        max_batch_tokens=16,
        max_model_len=96,
        num_blocks=36,
        block_size=8,
        kernel_block_size=8,
        **split,
    )


def requests() -> list[Request]:
    numbers = random.Random(3)
    prompts = [tuple(numbers.randrange(3, 128) for _ in range(length)) for length in (5, 37, 20)]
    return [Request(prompt, GREEDY) for prompt in prompts]


def tokens(outputs: Outputs) -> dict[tuple[int, int], list[int]]:
    return {key: [sample.token_id for sample in samples] for key, samples in outputs.items()}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_shards_sample_the_tokens_of_one_rank(tmp_path: Path) -> None:
    with StagedNode(2) as node:
        for model_type, overrides in MODELS.items():
            directory = checkpoint(tmp_path, model_type, **overrides)
            config = config_of(directory, tp=2)
            outputs = generate(node.started(config), config, requests())
            assert tokens(outputs) == tokens(generate_alone(config_of(directory), requests())), model_type


TWO_RANKS = """
import json, socket, sys
from pathlib import Path
import msgspec, transformers
from pdserve.config.node_config import NodeConfig
from pdserve.errors import PdserveError
from runner.distributed.parallel_state import ParallelState
from runner.loading.model_loader import LoadedModel

rank = int(sys.argv[1])
rendezvous = sys.argv[2] if rank else socket.socket(fileno=int(sys.argv[2]))
config = msgspec.json.decode(sys.argv[3], type=NodeConfig)
config = config.for_rank(rank, config.device)
parallel = ParallelState(config.position, config.device, rendezvous)
plan = transformers.MixtralConfig.base_model_tp_plan
answers = []
for changed in ({}, {"layers.*.mlp.experts": "replicate"}, {"layers.*.self_attn.o_proj": "strange"}):
    transformers.MixtralConfig.base_model_tp_plan = {**plan, **changed}
    try:
        model = LoadedModel(config, parallel, lambda stage, fraction: None).decoder._model
        answers.append({name: list(one.shape) for name, one in model.named_parameters()})
    except PdserveError as exc:
        answers.append(str(exc))
print(json.dumps(answers))
"""


def answers_of_two_ranks(config: NodeConfig) -> list[Any]:
    import msgspec

    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    with ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        fd = listener.fileno()
        ranks = []
        for rank in range(2):
            rendezvous = f"127.0.0.1:{listener.getsockname()[1]}" if rank else str(fd)
            command = [sys.executable, "-c", TWO_RANKS, str(rank), rendezvous, msgspec.json.encode(config).decode()]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, pass_fds=() if rank else (fd,))
            ranks.append(ends.enter_context(process))
            ends.callback(process.kill)
        return [json.loads(process.communicate()[0]) for process in ranks]


@pytest.mark.slow
def test_shards_hold_their_part_and_both_refuse_a_plan_that_is_wrong_or_unknown(tmp_path: Path) -> None:
    for loaded, wrong, unknown in answers_of_two_ranks(config_of(checkpoint(tmp_path, "mixtral"), tp=2)):
        layer = "model.layers.0."
        assert loaded[layer + "self_attn.q_proj.weight"] == [32, 64]
        assert loaded[layer + "self_attn.o_proj.weight"] == [64, 32]
        assert loaded[layer + "mlp.experts.gate_up_proj"] == [4, 96, 64]
        assert loaded[layer + "mlp.experts.down_proj"] == [4, 64, 48]
        assert loaded["model.embed_tokens.weight"] == loaded["lm_head.weight"] == [64, 64]
        assert "differ from those of transformers' eager forward" in wrong, "the experts' results are not summed"
        assert "its plan has styles that are not known here: strange" in unknown


def test_a_stage_holds_its_layers_only(tmp_path: Path) -> None:
    import torch

    from runner.models.from_transformers.loading import build_model
    from runner.models.from_transformers.part import ModelPart
    from runner.placement import TensorPlacement

    placement = TensorPlacement(torch.device("cpu"), torch.float32, torch.float32)
    for model_type, tied in (("llama", False), ("gemma2", True)):
        directory = checkpoint(tmp_path, model_type, tie_word_embeddings=tied)
        weights = load_file(directory / "model.safetensors")
        names = [
            {name for name, _ in build_model(directory, placement, "eager", part, weights).named_parameters()}
            for part in (ModelPart(3, range(1), is_last=False), ModelPart(3, range(1, 3), is_first=False))
        ]
        layers = [{name.split(".")[2] for name in of_stage if ".layers." in name} for of_stage in names]
        assert layers == [{"0"}, {"1", "2"}]
        others = [{name for name in of_stage if ".layers." not in name} for of_stage in names]
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        assert others == [{"model.embed_tokens.weight"}, {"model.norm.weight", head}]


def test_plans_are_read_from_the_librarys_source() -> None:
    for model_type in FAMILIES:
        config: Any = transformers.AutoConfig.for_model(model_type)
        plans = read_plans(model_type)
        assert (plans.tp, plans.pp) == (config.base_model_tp_plan or {}, config.base_model_pp_plan or {})


def types_with_plans() -> list[str]:
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return sorted({config.model_type for config in mapping if config.base_model_tp_plan or config.base_model_pp_plan})


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_every_type_with_a_plan_samples_the_tokens_of_one_rank(pp: int, tp: int, tmp_path: Path) -> None:
    """Types that run on one rank and have the plans."""
    tried = 0
    with StagedNode(pp * tp) as node:
        for model_type in types_with_plans():
            plans = read_plans(model_type)
            if (tp > 1 and not plans.tp) or (pp > 1 and not plans.pp):
                continue
            if tp > 1 and model_type == "youtu":
                continue  # refused: no shard zeroes the padding token's embedding
            try:
                directory = checkpoint(tmp_path, model_type)
                expected = generate_alone(config_of(directory), requests())
            except (PdserveError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
                continue  # refused on one rank, too, or without a small config
            config = config_of(directory, pp=pp, tp=tp)
            if pp > 1 and json.loads((directory / "config.json").read_text()).get("hidden_size_per_layer_input"):
                with pytest.raises(ConfigError, match="reads embeddings of its own"):
                    check_split(directory, model_type, config.parallel)
                continue
            outputs = generate(node.started(config), config, requests())
            assert tokens(outputs) == tokens(expected), model_type
            tried += 1
    assert tried >= {(1, 2): 69, (2, 1): 60, (2, 2): 60, (1, 4): 60}[pp, tp]
