"""Configuration of simulated nodes, and options that they refuse."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cli.explain import as_text, describe
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.compatibility import differences
from pdserve.config.device import detect_devices, node_devices
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.config.simulated_costs import SimulatedCosts, SimulatedSteps, StepTokens, choose_costs
from pdserve.errors import ConfigError
from pdserve.records import NewSequence, ScheduledSequence, StepPlan
from pdserve.sampling_params import SamplingParams


def simulated(environ: dict[str, str] | None = None, **asked: Any) -> NodeConfig:
    options = NodeOptions(**{"model": str(EMBEDDED_MODEL), "engine": "simulated", **asked})
    return resolve(options, node_devices(options, 1)[0], environ or {})


def test_explain_describes_a_simulated_node() -> None:
    config = simulated()
    assert describe(config)["runner"] == "simulated"
    assert "runner     simulated: --engine simulated" in as_text(config)
    assert f"sim_costs={SimulatedCosts()}" in as_text(config)


def test_simulated_kv_size_defaults_to_a_large_gpu() -> None:
    config = simulated()
    assert config.kv_layout.num_blocks * config.kv_layout.block_size == 800_000
    assert not config.measure_kv_memory
    assert simulated(kv_cache_memory=config.kv_layout.block_bytes * 40, max_model_len=100).kv_layout.num_blocks == 40


def test_simulated_nodes_are_compatible_only_with_each_other() -> None:
    ours = simulated().compat_fields
    for load_format in ("auto", "dummy"):
        real = resolve(NodeOptions(model=str(EMBEDDED_MODEL), load_format=load_format), detect_devices("cpu", 1)[0], {})
        assert "weights: simulated here, " in differences(ours, real.compat_fields)
    assert ours == simulated(sim_speed=3.0, sim_costs=("step=1",), load_format="dummy").compat_fields


def test_simulated_costs_are_set_by_name_and_divided_by_speed() -> None:
    costs = choose_costs(["prompt-token=0.5", "read=2"], 4.0)
    usual = SimulatedCosts()
    assert costs == msgspec.structs.replace(
        SimulatedCosts(*(value / 4 for value in msgspec.structs.astuple(usual))), prompt_token=0.125, read=0.5
    )
    assert set(msgspec.structs.astuple(choose_costs([], float("inf")))) == {0.0}
    assert choose_costs(str(costs).split(","), 1.0) == costs


def test_step_cost_counts_prompt_tokens_drafts_and_decodes() -> None:
    costs = SimulatedCosts(1.0, 0.1, 0.01, 5.0, 0.5, hidden=0.0, prompt_context=1e-3, decode_context=1e-4)
    steps = SimulatedSteps(costs)
    new = tuple(NewSequence(seq, bytes(4), 1, 0, (), SamplingParams(max_tokens=9)) for seq in (1, 2, 3))
    first = StepPlan(1, new=new, scheduled=(ScheduledSequence(1, 40, 1), ScheduledSequence(3, 10, 1)))
    assert steps.seconds(first) == pytest.approx(1.0 + 5.0 + 1e-3 * (40 * 20 + 10 * 5))
    decodes = ScheduledSequence.decode(1), ScheduledSequence.decode(3)
    plan = StepPlan(2, scheduled=(*decodes, ScheduledSequence(2, 30, 0)), num_decodes=2)
    assert steps.seconds(plan) == pytest.approx(1.0 + 3.0 + 0.02 + 1e-3 * 30 * 15 + 1e-4 * (41 + 11))
    drafted = StepPlan(3, scheduled=(ScheduledSequence.decode(1, num_drafts=3),), num_decodes=1)
    assert steps.seconds(drafted) == pytest.approx(1.0 + 0.3 + 0.01 + 1e-4 * 42)
    assert steps.seconds(StepPlan(4)) == 0.0


def test_read_of_the_weights_hides_a_part_of_prompts() -> None:
    costs = SimulatedCosts(hidden=1e-3)
    short, long = (costs.seconds(StepTokens(8, 0, tokens)) - costs.seconds(StepTokens(8)) for tokens in (16, 8000))
    assert short < 16 * costs.prompt_token
    assert long == pytest.approx(8000 * costs.prompt_token - 1e-3)


def test_read_cost_counts_tokens() -> None:
    costs = SimulatedCosts(read=5.0, read_token=0.5)
    assert costs.of_read(4) == 7.0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"engine": "simulate"}, "engine 'simulate' is not one of device, simulated"),
        ({"engine": "device", "sim_speed": 2.0}, "add --engine simulated"),
        ({"engine": "device", "sim_costs": ("step=1",)}, "add --engine simulated"),
        (
            {"engine": "device", "synthetic_acceptance": 3.5, "num_drafts": 2},
            "synthetic_acceptance 3.5: a step yields at most 3 tokens of a sequence; lower it or raise num_drafts",
        ),
        ({"synthetic_acceptance": 0.5}, "synthetic_acceptance 0.5 must be at least 1"),
        ({"synthetic_acceptance": 4.5}, "synthetic_acceptance 4.5: a step yields at most 4 tokens"),
        (
            {"synthetic_acceptance": 2.0, "max_batch_tokens": 512, "max_num_seqs": 256},
            "max_batch_tokens 512 is less than 4 times max_num_seqs 256: each running sequence needs 4 tokens per step",
        ),
        ({"sim_speed": 0.0}, "sim_speed 0 must be above 0"),
        ({"sim_speed": float("nan")}, "sim_speed nan must be above 0"),
        ({"sim_costs": ("steps=1",)}, "sim_costs 'steps' is not one of step, prompt-token, decode, read, read-token"),
        ({"sim_costs": ("step=x",)}, "sim_costs step=x is not a number of seconds"),
        ({"sim_costs": ("step=-1",)}, "sim_costs step=-1 is not a number of seconds"),
        ({"sim_costs": ("step",)}, "sim_costs step= is not a number of seconds"),
        ({"device": "cuda:1"}, "device cuda:1 is not possible for a simulated node; use auto"),
        ({"tp": 2}, "tp 2 is not possible for a simulated node; use 1"),
        ({"cuda_graphs": "on"}, "cuda_graphs on is not possible for a simulated node"),
        ({"attention_backend": "triton"}, "attention_backend triton is not possible for a simulated node"),
        ({"kv_checksum": "on"}, "kv_checksum on is not possible for a simulated node"),
    ],
)
def test_device_options_are_refused_for_simulated_nodes(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(**asked)


def test_forcing_a_runner_on_a_simulated_node_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE}=1, but a simulated node runs neither V1 nor V2"):
        simulated({VARIABLE: "1"})
