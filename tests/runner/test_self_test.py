"""The self-test of models of transformers refuses a small fault in every dtype, and nothing that is exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from any_models import make_any_checkpoint
from checkpoints import node_config
from stepper import Stepper
from torch import Tensor
from transformers.models.llama import modeling_llama

import runner
from pdserve.errors import ConfigError
from runner.models.from_transformers.in_float32 import in_float32

SHARE = 0.02  # standard deviation of the leaked state over that of the hidden states


class LeakyConfig(transformers.LlamaConfig):  # type: ignore[misc]
    model_type = "leaky"


class LeakyLayer(modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
    """Adds a mean of the tokens before, which no KV cache holds."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = super().forward(hidden_states, *args, **kwargs)
        before = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
        return hidden + SHARE * before.to(hidden.dtype) * hidden.std() / before.std().clamp(min=1e-6)


class LeakyForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc]
    config_class = LeakyConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = torch.nn.ModuleList(
            LeakyLayer(config, index) if index else layer for index, layer in enumerate(self.model.layers)
        )


@pytest.fixture
def leaky() -> Iterator[None]:
    """Make the library know the model, as a new kind of hybrid would be."""
    configs: Any = transformers.AutoConfig
    models: Any = transformers.AutoModelForCausalLM
    configs.register("leaky", LeakyConfig, exist_ok=True)
    models.register(LeakyConfig, LeakyForCausalLM, exist_ok=True)
    yield
    configs_of: Any = transformers.CONFIG_MAPPING
    configs_of._extra_content.pop("leaky")
    models._model_mapping._extra_content.pop(LeakyConfig)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_state_of_two_percent_that_is_lost_refuses_the_model(dtype: str, leaky: None, tmp_path: Path) -> None:
    directory = make_any_checkpoint(tmp_path / "model", "leaky")
    with pytest.raises(ConfigError, match=r"differ .* in float32, more than 0.001"):
        runner.build(node_config(directory, dtype=dtype), lambda stage, fraction: None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("model_type", ["phi3", "qwen3_moe", "gpt2", "gemma3_text", "gpt_oss"])
def test_an_exact_model_passes_in_sixteen_bits(model_type: str, device: str, tmp_path: Path) -> None:
    directory = make_any_checkpoint(tmp_path / "model", model_type)
    longest = 64  # positions that the embeddings of all have: on a GPU, warm-up uses every one
    config = node_config(
        directory,
        device=device,
        dtype="bfloat16",
        impl="transformers",
        max_model_len=longest,
        max_batch_tokens=longest,
        max_num_seqs=8,
    )
    built = runner.build(config, lambda stage, fraction: None)
    try:
        (sequence,) = Stepper(built).generate([list(range(3, 30))], 4)
        assert len(sequence.output) == 4
    finally:
        built.close()


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe", "opt"])
def test_a_model_computes_in_float32_with_the_weights_that_it_has(model_type: str, tmp_path: Path) -> None:
    directory = make_any_checkpoint(tmp_path / "model", model_type, tie_word_embeddings=True)
    auto: Any = transformers.AutoModelForCausalLM
    model, wide = (auto.from_pretrained(directory, dtype=torch.bfloat16).eval() for _ in range(2))
    ids = torch.tensor([list(range(3, 30))])
    wide = wide.float()
    before = model.state_dict()
    with torch.inference_mode(), in_float32(model, 3):
        assert torch.equal(model(input_ids=ids).logits, wide(input_ids=ids).logits)
    after = model.state_dict()
    assert all(tensor.data_ptr() == after[name].data_ptr() for name, tensor in before.items())
    assert {tensor.dtype for tensor in after.values() if tensor.is_floating_point()} == {torch.bfloat16}
