"""``pdserve plan`` and its measured costs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from cli.main import main
from cli.plan.costs import MEASURED, PromptCost, costs_as_toml, find_costs, load_costs, rising
from pdserve.config.simulated_costs import StepTokens
from pdserve.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(file.stem for file in MEASURED.glob("*.toml")))
def test_measured_costs_round_trip_with_provenance(name: str, tmp_path: Path) -> None:
    costs = load_costs(name)
    assert all((costs.hardware, costs.commit, costs.command))
    (tmp_path / "copy.toml").write_text(costs_as_toml(costs))
    assert load_costs(str(tmp_path / "copy.toml")) == costs


@pytest.mark.parametrize("name", ["h200-llama-8b", "h200-llama-70b-tp4", "h200-qwen3-0.6b"])
def test_steps_without_decodes_take_as_long_as_measured_prompts(name: str) -> None:
    costs = msgspec.structs.replace(load_costs(name), under_load=None)
    card = costs.card()
    for tokens, ms in costs.prefill_ms:
        step = StepTokens(prompt_tokens=int(tokens), prompt_context=tokens * tokens / 2)
        assert card.costs.seconds(step) == pytest.approx(ms / 1e3, rel=0.02)
    for batch, ms in costs.decode_ms:
        assert card.costs.seconds(StepTokens(int(batch))) == pytest.approx(ms / 1e3)


def test_costs_of_serving_nodes_take_precedence() -> None:
    costs = load_costs("h200-llama-8b")
    assert costs.under_load is not None
    step = StepTokens(20, 40_000, 500, 1e6)
    assert costs.card().costs.seconds(step) == costs.under_load.seconds(step)


def test_prompt_costs_have_no_negative_term() -> None:
    assert PromptCost.through(((512, 10.0),)).token == pytest.approx(10e-3 / 512)
    flattening = PromptCost.through(((512, 10.0), (1024, 19.0), (2048, 36.0), (4096, 60.0)))
    assert min(flattening) >= 0.0


def test_costs_interpolate_and_skip_cached_tokens() -> None:
    costs = load_costs("h200-llama-8b")
    assert costs.prefill(8192) == pytest.approx(0.2078, rel=0.01)
    assert costs.decode(128, 0) == pytest.approx(0.00609)
    assert costs.prefill(512) <= costs.prefill(8192, 7680) < costs.prefill(2048)
    assert rising([(8, 2.0), (1, 1.5), (4, 2.5)]) == ((1, 1.5), (4, 2.5), (8, 2.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("decode_ms = []", "decode_ms has no points"),
        ("decode_ms = [[1, 5], [2, 4]]", "decode_ms goes from 5 ms at 1 to 4 ms at 2"),
        ("kv_tokens = 0", "kv_tokens 0 must be above 0"),
        ("kv_token = 1", "unknown field `kv_token`"),
        ("gpu = 3", "Expected `str`, got `int`"),
        ("]", "costs"),
    ],
)
def test_broken_costs_file_is_refused(change: str, message: str, tmp_path: Path) -> None:
    name = change.split(" ")[0]
    text = (MEASURED / "h200-llama-8b.toml").read_text()
    file = tmp_path / "costs.toml"
    file.write_text(change + "\n" + re.sub(rf"^{re.escape(name)} = .*\n", "", text, flags=re.M))
    with pytest.raises(ConfigError, match=message):
        load_costs(str(file))


@pytest.mark.parametrize("gpus", [2, pytest.param(2000, marks=pytest.mark.slow)])
def test_plans_have_numbers_without_exponents_and_plurals(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt-tokens", "p50=1000,p99=2000", "--output-tokens", "p50=2,p99=4", "--requests", "300"]
    assert main(["plan", "--costs", "h200-llama-8b", "--gpus", str(gpus), *lengths]) == 0
    text = capsys.readouterr().out
    assert not re.search(r"\de[+-]\d", text)
    assert not re.search(r"\b1 (nodes|decode nodes|GPUs)", text)
    assert ("1 decode node, 2 GPUs" in text) == (gpus == 2)
    assert bool(re.search(r"workload  \d{2,3},\d{3} requests/s", text)) == (gpus == 2000)


def test_costs_of_an_fp8_cache_are_those_measured_with_it() -> None:
    plain = load_costs("h200-llama-8b").shape
    quantized = msgspec.structs.replace(plain, kv_cache_dtype="fp8_e4m3")
    assert quantized.kv_bytes * 2 == plain.kv_bytes
    with pytest.raises(ConfigError, match=r"no measured costs for .*, KV cache in fp8_e4m3 on h200"):
        find_costs(quantized, "h200", 1, 1)


def test_costs_without_an_fp8_cache_are_refused_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--costs", "h200-llama-8b", "--rate", "1", "--kv-cache-dtype", "fp8"]) == 2
    assert "h200-llama-8b were not measured with --kv-cache-dtype fp8" in capsys.readouterr().err


def test_plan_prints_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--output-tokens", "8", "--requests", "300"]
    asked = ["plan", "--costs", "h200-llama-8b", "--rate", "20", "--slo", "ttft:p99=1s,itl:p90=40ms", *lengths]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "TTFT p99 at most 1 s, ITL p90 at most 40 ms" in text
    assert main([*asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    prefill = plan["prefill"]["nodes"]
    decode = plan["decode"]["nodes"]
    assert re.search(f"{prefill} prefill and {decode} decode nodes?, {plan['gpus']} GPUs", text)
    assert plan["costs"]["commit"]
    errors = plan["prediction_errors"]
    assert errors["command"].startswith("bench/plan_check.py")
    low, high = errors["ttft_p50"]
    assert low < high
    assert f"TTFT p50 {low:+.0%} … {high:+.0%}" in text
    assert errors["commit"] in text
    assert set(plan["decode"]["itl"]) == {"50", "90", "99"}
    assert main([*asked, "--json", "--seed", "2"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["prefill"]["ttft"] != plan["prefill"]["ttft"]


def test_the_model_finds_its_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--rate", "5", "--output-tokens", "4", "--requests", "300"]) == 0
    assert "Llama 3.1 8B shape on h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "neither MODEL nor --costs is set"),
        (["--costs", "h200-llama-8b"], "neither --rate nor --gpus is set"),
        (["--costs", "h200-llama-8b", "--rate", "1", "--gpus", "2"], "--rate and --gpus are both set"),
        (["--costs", "b200", "--rate", "1"], "costs 'b200' cannot be read"),
        (["--costs", "h200-llama-8b", "--rate", "0"], "'0' must be a number above 0"),
        (["--costs", "h200-llama-8b", "--rate", "1", "--slo", "ttft=1s"], "slo 'ttft=1s' is invalid; use"),
        (["--costs", "h200-llama-8b", "--rate", "1", "--headroom", "1"], "headroom 1 is not within"),
        (["--costs", "h200-llama-8b", "--rate", "1", "--requests", "9"], "'9' is not within 300 … 8000"),
        (["models/tiny", "--rate", "1"], "no measured costs for 6 layers of 256"),
        (["--costs", "h200-llama-8b", "--trace", "t", "--cached", "0.5"], "the requests of --trace have theirs"),
        (["models/tiny", "--costs", "h200-llama-8b", "--rate", "1"], "remove one of them"),
    ],
)
def test_invalid_plan_arguments_are_refused_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DOCS.parent)
    assert main(["plan", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_documented_examples_equal_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "operate.md").read_text()
    examples = re.findall(r"^    \$ pdserve (plan (?:[^\\\n]|\\\n)*)\n((?:    [^\n]*\n|\n)*)", text, flags=re.M)
    assert examples
    for command, output in examples:
        assert main(shlex.split(command.replace("\\\n", ""))) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.strip().split("\n")]
        assert [line.removeprefix("    ").rstrip() for line in output.strip("\n").split("\n")] == printed
