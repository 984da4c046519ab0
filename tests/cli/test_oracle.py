"""The oracle's table: every architecture, every value of the variable, every lack of a runner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

import runner
from pdserve.config import runner_oracle
from pdserve.config.attention_backends import Platform
from pdserve.config.runner_oracle import DEFAULT_ARCHITECTURES, RUNNERS, VARIABLE, Facts, Lack, RunnerRecord, decide
from pdserve.errors import ConfigError
from pdserve.model.families import FAMILIES

GPU = Platform(device="cuda", has_triton=True, has_flashinfer=True)
GPU_INTERPRETED = msgspec.structs.replace(GPU, interpreted=True)
GPU_WITHOUT_TRITON = msgspec.structs.replace(GPU, has_triton=False)
CPU = msgspec.structs.replace(GPU, device="cpu")
CPU_INTERPRETED = msgspec.structs.replace(CPU, interpreted=True)
CPU_INTERPRETED_WITHOUT_TRITON = msgspec.structs.replace(CPU_INTERPRETED, has_triton=False)

V2, V1 = RUNNERS
ROOT = Path(__file__).parents[2]

#: Features that V2 lacks, by name, with facts that need the feature and a word of the explanation.
BEYOND_V2: list[tuple[str, dict[str, Any], str]] = [
    ("model implementation", {"model_impl": "transformers"}, "native layers"),
    ("runner type", {"runner_type": "embed"}, "embed"),
    ("quantization", {"quantization_problem": "these are awq"}, "awq"),
    ("Triton kernels", {"platform": GPU_WITHOUT_TRITON}, "not installed"),
    ("dynamic rope scaling", {"rope_type": "dynamic"}, "length of the sequence"),
    ("attention backend torch", {"attention_backend": "torch"}, "on the host"),
    ("head size", {"head_dim": 96}, "96"),
    ("head size", {"head_dim": 8}, "8"),
    ("CUDA graphs without a GPU", {"cuda_graphs": "on", "platform": CPU_INTERPRETED}, "--cuda-graphs"),
    ("CUDA graphs without a GPU", {"cuda_graphs": "on", "platform": GPU_INTERPRETED}, "--cuda-graphs"),
]


def facts(**changes: Any) -> Facts:
    """Facts of a model that V2 runs on a GPU, with changes."""
    usual = Facts(
        architecture="Qwen3ForCausalLM",
        platform=GPU,
        attention_backend="flashinfer",
        head_dim=128,
        rope_type="default",
        cuda_graphs="auto",
    )
    return msgspec.structs.replace(usual, **changes)


def names_of(record: RunnerRecord, default_only: bool = False) -> set[str]:
    return {lack.name for group in record.lacks for lack in group if lack.default_only == default_only}


@pytest.mark.parametrize("variable", ["", "true", "2", "01", " 1", "V2", "-1"])
@pytest.mark.parametrize("platform", [GPU, CPU])
def test_other_values_of_the_variable_are_errors_that_name_the_allowed_ones(variable: str, platform: Platform) -> None:
    with pytest.raises(ConfigError, match=rf"{VARIABLE}={variable!r} .* 0 \(V1\) or 1 \(V2\), or unset"):
        decide(facts(platform=platform), variable)


@pytest.mark.parametrize("architecture", DEFAULT_ARCHITECTURES)
@pytest.mark.parametrize(("variable", "expected"), [(None, "V2"), ("0", "V1"), ("1", "V2")])
def test_default_architectures_get_v2_unless_v1_is_forced(
    architecture: str, variable: str | None, expected: str
) -> None:
    decision = decide(facts(architecture=architecture), variable)
    assert decision.runner == expected
    word = architecture if variable is None else f"{VARIABLE}={variable}"
    assert any(word in reason for reason in decision.reasons)


@pytest.mark.parametrize("architecture", DEFAULT_ARCHITECTURES)
def test_the_reason_for_v2_says_faster_exactly_where_figures_of_that_architecture_show_it(architecture: str) -> None:
    reason = decide(facts(architecture=architecture), None).reasons[0]
    (claim, anchor) = re.findall(r", (exact|exact and faster) on V2 \(docs/numbers.md#(.+)\)", reason)[0]
    *_, measured = re.findall(r"\w+ForCausalLM", reason)
    section = section_of_numbers(anchor)
    assert f"`{measured}`" in section, "the section names it"
    assert (claim == "exact and faster") is v2_decodes_faster(section, measured)


def section_of_numbers(anchor: str) -> str:
    _, *parts = re.split(r"^#+ (.+)$", (ROOT / "docs" / "numbers.md").read_text(), flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in parts[::2]]
    return parts[1::2][anchors.index(anchor)]


def v2_decodes_faster(section: str, architecture: str) -> bool:
    """Return whether a row of this very architecture has figures V1 / V2, and V2's are lower wherever it decodes."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    if not rows or "V1 / V2" not in section:
        return False
    num_decodes = next(at for at, cell in enumerate(rows[0]) if cell.startswith("prefill"))
    pairs = [
        tuple(float(figure.strip("* ")) for figure in cell.split("/"))
        for row in rows
        if f"`{architecture}`" in row[0]
        for cell in row[1:num_decodes]
        if cell
    ]
    return bool(pairs) and all(v2 < v1 for v1, v2 in pairs)


@pytest.mark.parametrize(
    ("row", "faster"),
    [
        ("| a (`AForCausalLM`) | 2 / **1** | | 5 / 6 |", True),
        ("| a (`AForCausalLM`) | 2 / **1** | **3** / 4 | 5 / 6 |", False),
        ("| a (`ABForCausalLM`) | 2 / **1** | 4 / 3 | 5 / 6 |", False),
        ("", False),
    ],
)
def test_another_name_and_slower_decodes_are_no_figures(row: str, faster: bool) -> None:
    header = "ms, V1 / V2:\n| | decode, batch 1 | 32 | prefill of 512 |\n|---|---|---|---|\n"
    assert v2_decodes_faster(header + row, "AForCausalLM") is faster


@pytest.mark.parametrize("architecture", DEFAULT_ARCHITECTURES)
@pytest.mark.parametrize("platform", [CPU_INTERPRETED, GPU_INTERPRETED])
def test_the_interpreter_is_not_said_to_be_fast(architecture: str, platform: Platform) -> None:
    decision = decide(facts(architecture=architecture, platform=platform, attention_backend="triton"), None)
    assert decision.runner == "V2"
    assert "faster" not in decision.reasons[0]
    assert "for tests" in decision.reasons[0]


@pytest.mark.parametrize(
    ("changes", "variable", "fallback"),
    [
        ({}, None, False),
        ({"platform": GPU_WITHOUT_TRITON}, None, True),
        ({"head_dim": 96}, None, True),
        ({"platform": GPU_WITHOUT_TRITON}, "0", False),
        ({"architecture": "Qwen2ForCausalLM"}, None, False),
        ({"architecture": "Qwen2ForCausalLM", "platform": GPU_WITHOUT_TRITON}, None, False),
        ({"runner_type": "embed"}, None, False),
    ],
)
def test_v1_is_a_fallback_if_the_model_has_v2_by_default(
    changes: dict[str, Any], variable: str | None, fallback: bool
) -> None:
    assert decide(facts(**changes), variable).fallback is fallback


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Gemma2ForCausalLM", "LlamaForSequenceClassification", "llamaforcausallm", ""]
)
@pytest.mark.parametrize(("variable", "expected"), [(None, "V1"), ("0", "V1"), ("1", "V2")])
def test_other_architectures_get_v2_only_if_it_is_forced(
    architecture: str, variable: str | None, expected: str
) -> None:
    assert decide(facts(architecture=architecture), variable).runner == expected


@pytest.mark.parametrize(
    ("platform", "usable", "word"),
    [
        (GPU, True, "a CUDA GPU"),
        (GPU_INTERPRETED, True, "interpreter"),
        (CPU_INTERPRETED, True, "interpreter"),
        (CPU, False, "no NVIDIA GPU"),
        (msgspec.structs.replace(CPU, has_triton=False), False, "no NVIDIA GPU"),
        (CPU_INTERPRETED_WITHOUT_TRITON, False, "not installed"),
        (GPU_WITHOUT_TRITON, False, "not installed"),
    ],
)
def test_v2_needs_triton(platform: Platform, usable: bool, word: str) -> None:
    given = facts(platform=platform, attention_backend="triton")
    decision = decide(given, None)
    assert decision.runner == ("V2" if usable else "V1")
    assert word in "; ".join(decision.reasons)
    assert decide(given, "0").runner == "V1"
    if usable:
        assert decide(given, "1").runner == "V2"
    else:
        with pytest.raises(ConfigError, match=rf"{VARIABLE}=1, but V2 cannot run this: .*{word}"):
            decide(given, "1")


def test_the_tests_cover_every_lack_of_v2() -> None:
    assert {name for name, _, _ in BEYOND_V2} == names_of(V2)
    assert names_of(V2, default_only=True) == {"architecture", "quantization"}


@pytest.mark.parametrize(("name", "changes", "word"), BEYOND_V2)
def test_a_lack_of_v2_leads_to_v1_or_to_an_error_if_v2_is_forced(name: str, changes: dict[str, Any], word: str) -> None:
    given = facts(**changes)
    with pytest.raises(ConfigError, match=rf"{VARIABLE}=1, but V2 cannot run this: {name}: .*{word}"):
        decide(given, "1")
    if given.cuda_graphs == "on":  # V1 has none either
        with pytest.raises(ConfigError, match=rf"no model runner can run this: V2 \({name}: .*\); V1 \(CUDA graphs: "):
            decide(given, None)
        with pytest.raises(ConfigError, match=rf"{VARIABLE}=0, but V1 cannot run this: CUDA graphs: "):
            decide(given, "0")
        return
    decision = decide(given, None)
    assert decision.runner == "V1"
    assert len(decision.reasons) == 1
    assert decision.reasons[0].startswith(f"{name}: ")
    assert word in decision.reasons[0]
    assert decide(given, "0").runner == "V1"


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_v2_runs_head_sizes_that_are_powers_of_two(head_dim: int) -> None:
    assert decide(facts(head_dim=head_dim), None).runner == "V2"


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn", "llama3"])
def test_v2_runs_every_rope_type_but_dynamic(rope_type: str) -> None:
    assert decide(facts(rope_type=rope_type), None).runner == "V2"


@pytest.mark.parametrize("cuda_graphs", ["auto", "on", "off"])
def test_v2_on_a_gpu_takes_any_setting_of_cuda_graphs(cuda_graphs: str) -> None:
    assert decide(facts(cuda_graphs=cuda_graphs), None).runner == "V2"
    assert decide(facts(cuda_graphs=cuda_graphs), "1").runner == "V2"


def test_v1_lacks_cuda_graphs_alone() -> None:
    assert names_of(V1) == {"CUDA graphs"}
    given = facts(cuda_graphs="on")
    with pytest.raises(ConfigError, match=rf"{VARIABLE}=0, but V1 cannot run this: CUDA graphs: .*--cuda-graphs"):
        decide(given, "0")
    for choice in ("auto", "off"):
        assert decide(facts(cuda_graphs=choice), "0").runner == "V1"


@pytest.mark.parametrize(
    "changes", [{"architecture": "Gemma2ForCausalLM"}, {"platform": CPU}, {"rope_type": "dynamic"}]
)
def test_a_configuration_beyond_every_runner_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no model runner can run this: V2 .*V1 \(CUDA graphs"):
        decide(facts(cuda_graphs="on", **changes), None)


@drawn(
    st.builds(
        Facts,
        architecture=st.sampled_from([*FAMILIES, "OPTForCausalLM"]),
        model_impl=st.sampled_from(["native", "transformers"]),
        platform=st.sampled_from([GPU, GPU_INTERPRETED, GPU_WITHOUT_TRITON, CPU, CPU_INTERPRETED]),
        attention_backend=st.sampled_from(["torch", "triton", "flashinfer"]),
        head_dim=st.sampled_from([64, 80, 128]),
        rope_type=st.sampled_from(["default", "dynamic"]),
        cuda_graphs=st.sampled_from(["auto", "off"]),
        runner_type=st.sampled_from(["generate", "embed"]),
        quantization_problem=st.sampled_from(["", "these are awq"]),
        quantization_doubt=st.sampled_from(["", "nothing else was measured"]),
    )
)
def test_forcing_a_runner_is_advised_exactly_where_it_works(given: Facts) -> None:
    decision = decide(given, None)
    try:
        forced = decide(given, "1")
    except ConfigError:
        forced = None
    advised = f"{VARIABLE}=1 chooses V2" in decision.reasons
    assert advised is (forced is not None and decision.runner != "V2")
    assert not any("chooses" in reason for reason in decision.reasons if not reason.startswith(VARIABLE))


def test_an_error_names_every_obstacle() -> None:
    given = facts(platform=CPU, rope_type="dynamic", attention_backend="torch", head_dim=24, cuda_graphs="on")
    with pytest.raises(ConfigError) as error:
        decide(given, "1")
    for word in ("Triton", "dynamic rope", "backend torch", "head_dim is 24", "CUDA graphs", "unset"):
        assert word in str(error.value)


def test_reasons_come_from_the_first_group_that_rejects() -> None:
    """The groups are the model, Triton, features: a missing Triton explains the backend torch."""
    given = facts(
        architecture="Qwen2ForCausalLM",
        model_impl="transformers",
        platform=CPU,
        attention_backend="torch",
        rope_type="dynamic",
    )
    reasons = decide(given, None).reasons
    assert [reason.split(":")[0] for reason in reasons] == ["architecture", "model implementation"]
    assert "Qwen2ForCausalLM" in reasons[0]
    dense = msgspec.structs.replace(given, architecture="LlamaForCausalLM", model_impl="native")
    assert decide(dense, None).reasons == (f"Triton kernels: {CPU.triton_problem}",)
    on_gpu = msgspec.structs.replace(dense, platform=GPU)
    assert [reason.split(":")[0] for reason in decide(on_gpu, None).reasons] == [
        "dynamic rope scaling",
        "attention backend torch",
    ]


def test_a_third_runner_is_one_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Lack("head size", lambda facts: facts.head_dim > 64, "V3 needs heads of at most 64")
    v3 = RunnerRecord("V3", forced_by="3", captures_graphs=True, lacks=((wide,),))
    monkeypatch.setattr(runner_oracle, "RUNNERS", (v3, *RUNNERS))
    assert decide(facts(head_dim=64), None).runner == "V3"
    second = decide(facts(head_dim=128), None)
    assert (second.runner, second.reasons) == ("V2", ("head size: V3 needs heads of at most 64",))
    third = decide(facts(head_dim=128, rope_type="dynamic"), None)
    assert third.runner == "V1"
    assert [reason.split(":")[0] for reason in third.reasons] == ["head size", "dynamic rope scaling"]
    assert decide(facts(head_dim=64), "3").runner == "V3"
    with pytest.raises(ConfigError, match=rf"{VARIABLE}=3, but V3 cannot run this: head size"):
        decide(facts(head_dim=128), "3")
    with pytest.raises(ConfigError, match=r"set it to 0 \(V1\) or 1 \(V2\) or 3 \(V3\), or unset"):
        decide(facts(), "2")


def test_every_runner_of_the_table_can_be_built() -> None:
    assert {record.name for record in RUNNERS} | {"simulated"} == set(runner.FACTORIES)
