"""Resolution of "auto" per machine, and refused combinations, without weights or devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.explain import as_text, describe
from cli.plan.costs import Shape
from pdserve.checkpoint.hub import resolve_model
from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.attention_backends import ATTENTION_BACKENDS, find_platform
from pdserve.config.compatibility import compat_hash
from pdserve.config.config_with_weights import with_weight_digests
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import num_parameters
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.errors import CapacityError, CheckpointError, ConfigError

H200 = DeviceInfo(kind="cuda", index=0, name="H200", memory=140 << 30)
HOST = DeviceInfo(kind="cpu", index=0, name="CPU", memory=64 << 30)

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}

Resolve = Callable[..., NodeConfig]


@pytest.fixture
def resolved(tmp_path: Path) -> Resolve:
    """resolved(device, has_triton=…, has_flashinfer=…, env={…}, model={…}, **options of the node)."""

    def make(
        device: DeviceInfo = H200,
        *,
        has_triton: bool = True,
        has_flashinfer: bool = True,
        env: dict[str, str] | None = None,
        model: dict[str, Any] | None = None,
        **options: Any,
    ) -> NodeConfig:
        (tmp_path / "config.json").write_text(json.dumps({**MODEL, **(model or {})}))
        env = env or {}
        platform = msgspec.structs.replace(
            find_platform(device.kind, env), has_triton=has_triton, has_flashinfer=has_flashinfer
        )
        asked = NodeOptions(**{"model": str(tmp_path), "load_format": "dummy", **options})
        return resolve(asked, device, env, platform)

    return make


def choice(config: NodeConfig, name: str) -> str:
    """Return the line that explains the value of an option."""
    (line,) = (line for line in config.choices if line.startswith(f"{name}="))
    return line.removeprefix(f"{name}=")


INTERPRETED = {"TRITON_INTERPRET": "1"}


@pytest.mark.parametrize(
    ("device", "changes", "backend", "runner", "word"),
    [
        (H200, {}, "flashinfer", "V2", "fastest"),
        (H200, {"has_flashinfer": False}, "triton", "V2", "not installed"),
        (H200, {"dtype": "float32"}, "triton", "V2", "float32"),
        (H200, {"model": {"head_dim": 32}}, "triton", "V2", "head_dim 32"),
        (H200, {"has_triton": False}, "torch", "V1", "triton"),
        (H200, {"has_triton": False, "has_flashinfer": False}, "torch", "V1", "triton cannot run"),
        (H200, {"model": {"head_dim": 96}}, "torch", "V1", "head_dim 96"),
        (H200, {"env": {VARIABLE: "0"}}, "flashinfer", "V1", "fastest"),
        (H200, {"model": {"rope_scaling": {"type": "dynamic", "factor": 2.0}}}, "flashinfer", "V1", "fastest"),
        (HOST, {}, "torch", "V1", "CPUs"),
        (HOST, {"env": {VARIABLE: "0"}}, "torch", "V1", "CPUs"),
        (HOST, {"env": INTERPRETED}, "triton", "V2", "interpreter"),
        (HOST, {"env": INTERPRETED | {VARIABLE: "1"}}, "triton", "V2", "interpreter"),
        (HOST, {"env": INTERPRETED | {VARIABLE: "0"}}, "torch", "V1", "CPUs"),
        (HOST, {"env": {"TRITON_INTERPRET": "0"}}, "torch", "V1", "CPUs"),
        (HOST, {"env": INTERPRETED, "has_triton": False}, "torch", "V1", "not installed"),
    ],
)
def test_auto_backend_and_runner(
    resolved: Resolve, device: DeviceInfo, changes: dict[str, Any], backend: str, runner: str, word: str
) -> None:
    config = resolved(device, **changes)
    assert (config.attention_backend, config.decision.runner) == (backend, runner)
    assert choice(config, "attention_backend").startswith(f"{backend}: ")
    assert word in choice(config, "attention_backend")


@pytest.mark.parametrize(
    ("device", "changes", "words"),
    [
        (HOST, {"attention_backend": "flashinfer"}, ["flashinfer", "CUDA GPU", "torch"]),
        (HOST, {"attention_backend": "triton"}, ["triton", "TRITON_INTERPRET=1", "torch"]),
        (H200, {"attention_backend": "triton", "has_triton": False}, ["not installed", "torch"]),
        (H200, {"attention_backend": "flashinfer", "has_triton": False}, ["triton", "not installed", "torch"]),
        (H200, {"attention_backend": "triton", "model": {"head_dim": 96}}, ["96", "torch"]),
        (H200, {"attention_backend": "flashinfer", "has_flashinfer": False}, ["not installed", "triton"]),
        (H200, {"attention_backend": "flashinfer", "dtype": "float32"}, ["float32", "bfloat16"]),
        (H200, {"attention_backend": "flashinfer", "model": {"head_dim": 32}}, ["32", "64, 128, 256"]),
        (H200, {"attention_backend": "xformers"}, ["xformers", "torch, triton, flashinfer"]),
        (H200, {"env": {VARIABLE: "1"}, "attention_backend": "torch"}, [VARIABLE, "backend torch"]),
        (H200, {"env": {VARIABLE: "1"}, "model": {"head_dim": 96}}, ["backend torch", "head_dim is 96"]),
        (HOST, {"env": {VARIABLE: "1"}}, [VARIABLE, "TRITON_INTERPRET=1"]),
        (H200, {"env": {VARIABLE: "0"}, "cuda_graphs": "on"}, [VARIABLE, "CUDA graphs"]),
        (HOST, {"cuda_graphs": "on"}, ["CUDA graphs", "--cuda-graphs"]),
        (H200, {"env": {VARIABLE: ""}}, [VARIABLE, "0 (V1) or 1 (V2)"]),
        (H200, {"cuda_graphs": "yes"}, ["yes", "auto, on, off"]),
        (H200, {"load_format": "gguf"}, ["gguf", "auto, dummy"]),
        (HOST, {"max_batch_tokens": 100, "max_num_seqs": 256}, ["100", "256"]),
    ],
)
def test_invalid_options_are_refused(
    resolved: Resolve, device: DeviceInfo, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(device, **changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("block_size", "page"), [(16, 16), (32, 32), (48, 16), (64, 64), (96, 32), (128, 64)])
def test_pages_are_the_same_for_all_backends_and_runners(resolved: Resolve, block_size: int, page: int) -> None:
    """Equal page sizes let nodes with different backends exchange KV."""
    configs = [
        resolved(env=env, attention_backend=backend, block_size=block_size, kv_cache_memory=1 << 30)
        for backend in ATTENTION_BACKENDS
        for env in ({}, {VARIABLE: "0"})
    ]
    assert {config.decision.runner for config in configs} == {"V1", "V2"}
    assert configs[0].kv_layout.kernel_block_size == page
    for other in configs[1:]:
        assert other.kv_layout == configs[0].kv_layout
        assert other.compat_fields == configs[0].compat_fields


@pytest.mark.parametrize("backend", ["auto", "triton", "flashinfer"])
@pytest.mark.parametrize(("block_size", "page"), [(1, None), (8, None), (100, None), (100, 50), (100, 16)])
def test_block_size_without_a_supported_page_is_refused(
    resolved: Resolve, backend: str, block_size: int, page: int | None
) -> None:
    with pytest.raises(ConfigError, match=rf"block_size {block_size} has no page size .*\[16, 32, 64\].*multiple"):
        resolved(attention_backend=backend, block_size=block_size, kernel_block_size=page)


@pytest.mark.parametrize("block_size", [1, 8, 100])
def test_torch_backend_supports_any_block_size(resolved: Resolve, block_size: int) -> None:
    assert resolved(attention_backend="torch", block_size=block_size).kv_layout.kernel_block_size == block_size


def test_requested_page_size_is_used(resolved: Resolve) -> None:
    assert resolved(block_size=64, kernel_block_size=16).kv_layout.kernel_block_size == 16
    assert resolved(HOST, block_size=64, kernel_block_size=4).kv_layout.kernel_block_size == 4
    with pytest.raises(ConfigError, match=r"kernel_block_size 8 is not supported by flashinfer; .*\[16, 32, 64\]"):
        resolved(block_size=64, kernel_block_size=8)


@pytest.mark.parametrize(
    ("device", "changes", "captured"),
    [
        (H200, {}, True),
        (H200, {"cuda_graphs": "on"}, True),
        (H200, {"cuda_graphs": "off"}, False),
        (H200, {"env": {VARIABLE: "0"}}, False),
        (H200, {"env": INTERPRETED}, False),
        (HOST, {}, False),
        (HOST, {"env": INTERPRETED}, False),
        (HOST, {"cuda_graphs": "off"}, False),
    ],
)
def test_cuda_graphs(resolved: Resolve, device: DeviceInfo, changes: dict[str, Any], captured: bool) -> None:
    config = resolved(device, **changes)
    assert config.cuda_graphs is captured
    if "cuda_graphs" not in changes:
        assert choice(config, "cuda_graphs").startswith("on: " if captured else "off: ")


@pytest.mark.parametrize(
    ("device", "options", "tokens"),
    [
        (HOST, {}, 2048),
        (H200, {}, 8192),
        (HOST, {"pp": 2}, 512),
        (H200, {"pp": 2}, 2048),
        (HOST, {"max_num_seqs": 4096}, 4096),
        (H200, {"max_batch_tokens": 512}, 512),
    ],
)
def test_tokens_of_a_step(resolved: Resolve, device: DeviceInfo, options: dict[str, int], tokens: int) -> None:
    config = resolved(device, **options)
    assert config.max_batch_tokens == tokens
    if "max_batch_tokens" not in options:
        assert choice(config, "max_batch_tokens").startswith(f"{tokens}: ")


def test_kv_memory_on_a_gpu_is_an_estimate_until_measured(resolved: Resolve) -> None:
    config = resolved(gpu_memory_utilization=0.5)
    assert config.measure_kv_memory
    assert config.options.memory_share == 0.5
    weights = num_parameters(config.model, config.position) * 2
    assert 60 << 30 < config.kv_layout.total_bytes <= (70 << 30) - weights
    assert "an estimate" in choice(config, "kv_cache_memory")
    assert "estimated" in as_text(config)


@pytest.mark.parametrize(("device", "memory"), [(HOST, None), (HOST, 1 << 28), (H200, 1 << 28)])
def test_requested_kv_memory_is_not_an_estimate(resolved: Resolve, device: DeviceInfo, memory: int | None) -> None:
    config = resolved(device, kv_cache_memory=memory)
    assert not config.measure_kv_memory
    assert "estimated" not in as_text(config)


def test_max_model_len_from_an_estimate_keeps_a_margin(resolved: Resolve) -> None:
    card = msgspec.structs.replace(H200, memory=3 << 30)
    long = {"max_position_embeddings": 10**8}
    estimated = resolved(card, model=long)
    room = estimated.kv_layout.num_blocks * estimated.kv_layout.block_size
    assert 0.85 * room < estimated.max_model_len < 0.95 * room
    certain = resolved(card, model=long, kv_cache_memory=1 << 28)
    assert certain.max_model_len == certain.kv_layout.num_blocks * certain.kv_layout.block_size


def test_too_small_gpu_is_refused(resolved: Resolve) -> None:
    with pytest.raises(CapacityError, match="larger GPU"):
        resolved(msgspec.structs.replace(H200, memory=2 << 30))


def test_dummy_weights_need_no_weights(resolved: Resolve, tmp_path: Path) -> None:
    config = resolved()
    assert config.random_weights
    assert config.compat_fields["weights"] == "dummy"
    assert resolve_model(str(tmp_path), weights=False) == tmp_path
    for needs_weights in (lambda: resolved(load_format="auto"), lambda: read_headers(tmp_path)):
        with pytest.raises(CheckpointError, match=r"has no \*.safetensors"):
            needs_weights()


def test_explain_shows_the_decision(resolved: Resolve) -> None:
    config = resolved()
    fields = describe(config)
    assert fields["runner"] == "V2"
    assert fields["reasons"] == list(config.decision.reasons)
    assert (fields["attention_backend"], fields["cuda_graphs"], fields["load_format"]) == ("flashinfer", True, "dummy")
    assert f"V2: {'; '.join(config.decision.reasons)}" in as_text(config)


def test_platform_describes_this_process() -> None:
    platform = find_platform("cpu", {})
    assert platform.device == "cpu"
    assert platform.has_triton  # a dependency of the tests
    assert not platform.interpreted
    assert find_platform("cpu", INTERPRETED).interpreted
    assert not find_platform("cpu", {"TRITON_INTERPRET": "0"}).interpreted


def test_speculation_needs_room_for_drafts(resolved: Resolve) -> None:
    config = resolved(speculate="lookup", num_drafts=7, max_num_seqs=2000)
    assert (config.max_drafts, config.max_batch_tokens) == (7, 16_000)
    assert resolved(num_drafts=7).max_drafts == 0
    assert resolved(speculate="lookup", num_drafts=7, max_batch_tokens=1024).max_num_seqs == 128
    with pytest.raises(ConfigError, match="max_batch_tokens 1024 is less than 8 times max_num_seqs 256"):
        resolved(speculate="lookup", num_drafts=7, max_batch_tokens=1024, max_num_seqs=256)


HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": 1000,
    "draft_vocab_size": 600,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


@pytest.fixture
def head(tmp_path: Path) -> str:
    directory = tmp_path / "head"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(HEAD))
    return str(directory)


def test_peers_and_files_on_disk_tell_heads_apart(resolved: Resolve, head: str) -> None:
    """Peers exchange the KV of all other layers. A block on disk has that of all layers."""

    def with_head(**fields: Any) -> NodeConfig:
        (Path(head) / "config.json").write_text(json.dumps(HEAD | fields))
        return with_weight_digests(resolved(speculate=f"eagle3:{head}"))

    one = with_head()
    equal = with_head()
    other = with_head(norm_output=True)
    without = with_weight_digests(resolved(speculate="lookup"))
    assert one.drafts_by == equal.drafts_by != other.drafts_by
    assert one.kv_version == equal.kv_version != other.kv_version
    assert compat_hash(one.compat_fields) == compat_hash(other.compat_fields) == without.kv_version
    assert without.drafts_by == ""


def test_a_head_counts_in_weights_and_kv(resolved: Resolve, head: str) -> None:
    with_head = resolved(speculate=f"eagle3:{head}")
    without = resolved()
    attention = 128 * 128 * (3 * 4 + 4 * 2)
    mlp = 3 * 128 * 192
    weights = 3 * 256 * 128 + attention + mlp + (1000 + 600) * 128
    sizes = [num_parameters(config.model, config.position) for config in (with_head, without)]
    assert sizes[0] - sizes[1] == weights
    assert with_head.kv_layout.bytes_per_token * 4 == without.kv_layout.bytes_per_token * 5
    assert Shape.of(with_head.model).kv_bytes == with_head.kv_layout.bytes_per_token
    text = as_text(with_head)
    assert f"by the EAGLE-3 head {head}: 1 MiB of these weights, 1024 bytes of KV per token, up to 3 per step" in text
    assert "from the hidden states before layers 1, 2, 3 of 4" in text


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2},
            {},
            "layers of this model have slid",
        ),
        ({}, {"model_impl": "transformers"}, "Qwen3ForCausalLM runs through transformers, which gives no auxiliary"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, "rotary frequencies of this model depend"),
        ({"num_key_value_heads": 4}, {}, "num_key_value_heads 2, here it must be 4"),
        ({}, {"engine": "simulated"}, "is not possible for a simulated node; use off"),
        ({}, {"speculate": "eagle3:"}, "'eagle3:' is not one of off, auto, lookup, mtp, eagle3:DIR"),
        ({}, {"speculate": "eagle3:/no/such"}, "model '/no/such' is neither an existing directory nor a hub id"),
    ],
)
def test_heads_that_cannot_draft_are_refused(
    model: dict[str, Any], options: dict[str, Any], message: str, resolved: Resolve, head: str
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        resolved(HOST, model=model, **{"speculate": f"eagle3:{head}", **options})


def test_synthetic_acceptance_is_in_the_name(resolved: Resolve) -> None:
    """Once, also where it was in the name before."""
    for name in ("m", "m-synthetic-acceptance"):
        config = resolved(synthetic_acceptance=2.5, served_model_name=name)
        assert config.served_model_name == "m-synthetic-acceptance"
    with pytest.raises(ConfigError, match=r"synthetic_acceptance 2.5 replaces speculate lookup; remove one"):
        resolved(synthetic_acceptance=2.5, speculate="lookup")
