"""The oracle's table: every architecture, every value of the variable, every feature that a runner lacks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.config.attention_backends import Platform
from pdserve.config.runner_oracle import DEFAULT_ARCHITECTURES, V1_LACKS, V2_LACKS, VARIABLE, Facts, decide
from pdserve.errors import ConfigError

GPU = Platform(device="cuda", has_triton=True, has_flashinfer=True)
GPU_INTERPRETED = msgspec.structs.replace(GPU, interpreted=True)
GPU_WITHOUT_TRITON = msgspec.structs.replace(GPU, has_triton=False)
CPU = msgspec.structs.replace(GPU, device="cpu")
CPU_INTERPRETED = msgspec.structs.replace(CPU, interpreted=True)
CPU_WITHOUT_TRITON = msgspec.structs.replace(CPU_INTERPRETED, has_triton=False)

#: What V2 lacks, by name, with facts that ask for it and a word of what is said.
ASKS_TOO_MUCH_OF_V2: list[tuple[str, dict[str, Any], str]] = [
    ("runner type", {"runner_type": "embed"}, "embed"),
    ("mixture of experts", {"num_experts": 8}, "8 experts"),
    ("quantization", {"quantization": "awq"}, "awq"),
    ("dynamic rope scaling", {"rope_type": "dynamic"}, "length of the sequence"),
    ("attention backend torch", {"attention_backend": "torch"}, "on the host"),
    ("head size", {"head_dim": 96}, "96"),
    ("head size", {"head_dim": 8}, "8"),
    ("CUDA graphs without a GPU", {"cuda_graphs": "on", "platform": CPU_INTERPRETED}, "--cuda-graphs"),
    ("CUDA graphs without a GPU", {"cuda_graphs": "on", "platform": GPU_INTERPRETED}, "--cuda-graphs"),
]


def facts(**changes: Any) -> Facts:
    """A model that V2 runs on a GPU, but for the changes."""
    usual = Facts(
        architecture="Qwen3ForCausalLM",
        platform=GPU,
        attention_backend="flashinfer",
        head_dim=128,
        rope_type="default",
        cuda_graphs="auto",
    )
    return msgspec.structs.replace(usual, **changes)


@pytest.mark.parametrize("variable", ["", "true", "2", "01", " 1", "V2", "-1"])
@pytest.mark.parametrize("platform", [GPU, CPU])
def test_other_values_of_the_variable_are_refused(variable: str, platform: Platform) -> None:
    with pytest.raises(ConfigError, match=rf"{VARIABLE}={variable!r} .* 0 \(V1\) or 1 \(V2\), or unset"):
        decide(facts(platform=platform), variable)


@pytest.mark.parametrize("architecture", DEFAULT_ARCHITECTURES)
@pytest.mark.parametrize(("variable", "runner"), [(None, "V2"), ("0", "V1"), ("1", "V2")])
def test_default_architectures(architecture: str, variable: str | None, runner: str) -> None:
    decision = decide(facts(architecture=architecture), variable)
    assert decision.runner == runner
    assert any(
        (architecture if variable is None else f"{VARIABLE}={variable}") in reason for reason in decision.reasons
    )


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Gemma2ForCausalLM", "LlamaForSequenceClassification", "llamaforcausallm", ""]
)
@pytest.mark.parametrize(("variable", "runner"), [(None, "V1"), ("0", "V1"), ("1", "V2")])
def test_other_architectures_get_v2_only_when_forced(architecture: str, variable: str | None, runner: str) -> None:
    assert decide(facts(architecture=architecture), variable).runner == runner


@pytest.mark.parametrize(
    ("platform", "usable", "word"),
    [
        (GPU, True, "a CUDA GPU"),
        (GPU_INTERPRETED, True, "interpreter"),
        (CPU_INTERPRETED, True, "interpreter"),
        (CPU, False, "TRITON_INTERPRET=1"),
        (CPU_WITHOUT_TRITON, False, "not installed"),
        (GPU_WITHOUT_TRITON, False, "not installed"),
    ],
)
def test_v2_needs_triton(platform: Platform, usable: bool, word: str) -> None:
    asked = facts(platform=platform, attention_backend="triton")
    decision = decide(asked, None)
    assert decision.runner == ("V2" if usable else "V1")
    assert word in "; ".join(decision.reasons)
    assert decide(asked, "0").runner == "V1"
    if usable:
        assert decide(asked, "1").runner == "V2"
    else:
        with pytest.raises(ConfigError, match=rf"{VARIABLE}=1, but V2 cannot run this: .*{word}"):
            decide(asked, "1")


def test_everything_that_v2_lacks_is_in_the_table() -> None:
    assert {name for name, _, _ in ASKS_TOO_MUCH_OF_V2} == {lack.name for lack in V2_LACKS}


@pytest.mark.parametrize(("name", "changes", "word"), ASKS_TOO_MUCH_OF_V2)
def test_what_v2_lacks(name: str, changes: dict[str, Any], word: str) -> None:
    asked = facts(**changes)
    with pytest.raises(ConfigError, match=rf"{VARIABLE}=1, but V2 cannot run this: {name}: .*{word}"):
        decide(asked, "1")
    if asked.cuda_graphs == "on":
        for variable in (None, "0"):  # V1 has none either
            with pytest.raises(ConfigError, match=r"V1 is chosen \(.*\), but it cannot run this: CUDA graphs"):
                decide(asked, variable)
        return
    decision = decide(asked, None)
    assert decision.runner == "V1"
    assert len(decision.reasons) == 1
    assert decision.reasons[0].startswith(f"{name}: ")
    assert word in decision.reasons[0]
    assert decide(asked, "0").runner == "V1"


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_head_sizes_of_v2(head_dim: int) -> None:
    assert decide(facts(head_dim=head_dim), None).runner == "V2"


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn", "llama3"])
def test_rope_types_of_v2(rope_type: str) -> None:
    assert decide(facts(rope_type=rope_type), None).runner == "V2"


@pytest.mark.parametrize("cuda_graphs", ["auto", "on", "off"])
def test_v2_on_a_gpu_takes_any_setting_of_cuda_graphs(cuda_graphs: str) -> None:
    assert decide(facts(cuda_graphs=cuda_graphs), None).runner == "V2"
    assert decide(facts(cuda_graphs=cuda_graphs), "1").runner == "V2"


def test_what_v1_lacks() -> None:
    assert [lack.name for lack in V1_LACKS] == ["CUDA graphs"]
    asked = facts(cuda_graphs="on")
    with pytest.raises(ConfigError, match=rf"{VARIABLE}=0\), but it cannot run this: CUDA graphs: .*--cuda-graphs"):
        decide(asked, "0")
    for choice in ("auto", "off"):
        assert decide(facts(cuda_graphs=choice), "0").runner == "V1"


@pytest.mark.parametrize(
    "changes", [{"architecture": "Gemma2ForCausalLM"}, {"platform": CPU}, {"rope_type": "dynamic"}]
)
def test_a_choice_of_v1_that_lacks_what_is_asked_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"V1 is chosen .*CUDA graphs"):
        decide(facts(cuda_graphs="on", **changes), None)


def test_an_error_names_everything_that_is_in_the_way() -> None:
    asked = facts(
        platform=CPU, rope_type="dynamic", attention_backend="torch", head_dim=24, num_experts=4, cuda_graphs="on"
    )
    with pytest.raises(ConfigError) as error:
        decide(asked, "1")
    for word in ("Triton", "dynamic rope", "backend torch", "head_dim is 24", "4 experts", "CUDA graphs", "unset"):
        assert word in str(error.value)


def test_reasons_are_those_of_the_first_rule_that_decides() -> None:
    """The model, then Triton, then features; without Triton, say, that the backend is torch's goes without saying."""
    asked = facts(
        architecture="MixtralForCausalLM", num_experts=8, platform=CPU, attention_backend="torch", rope_type="dynamic"
    )
    assert [reason.split(":")[0] for reason in decide(asked, None).reasons] == [
        "MixtralForCausalLM",
        "mixture of experts",
    ]
    dense = msgspec.structs.replace(asked, architecture="LlamaForCausalLM", num_experts=0)
    assert decide(dense, None).reasons == (CPU.triton_problem,)
    on_gpu = msgspec.structs.replace(dense, platform=GPU)
    assert [reason.split(":")[0] for reason in decide(on_gpu, None).reasons] == [
        "dynamic rope scaling",
        "attention backend torch",
    ]
