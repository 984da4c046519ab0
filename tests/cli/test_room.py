"""Whether a rank fits in the memory of its device, as ``pdserve explain`` and nodes see it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.device import detect_devices, free_memory
from pdserve.config.memory_fit import check_memory, check_room, dtype_in_memory
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import weight_bytes
from pdserve.config.resolve import resolve
from pdserve.errors import CapacityError
from runner.models.quantization.unquantized import held_dtype
from runner.placement import TensorPlacement, compute_dtype

CPU = detect_devices("cpu", 1)[0]


def config_of(dtype: str) -> NodeConfig:
    return resolve(NodeOptions(model=str(EMBEDDED_MODEL), dtype=dtype, kv_cache_memory=64 << 20), CPU, {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_in_memory_is_that_of_loaded_weights(dtype: str) -> None:
    served = getattr(torch, dtype)
    cpu = torch.device("cpu")
    held = held_dtype(TensorPlacement(cpu, served, compute_dtype(cpu, served)))
    assert dtype_in_memory(config_of(dtype)) == str(held).removeprefix("torch.")


def test_weights_of_16_bits_are_widened_on_cpus_that_are_not_x86() -> None:
    config = config_of("bfloat16")
    assert dtype_in_memory(config, "aarch64") == "float32"
    gpu = msgspec.structs.replace(config, device=msgspec.structs.replace(CPU, kind="cuda"))
    assert dtype_in_memory(gpu, "aarch64") == "bfloat16"


def test_a_rank_fits_in_exactly_its_weights_and_kv_cache() -> None:
    config = config_of("bfloat16")
    needed = weight_bytes(config.model, config.position, "bfloat16") + config.kv_layout.total_bytes
    assert (fits(config, needed), fits(config, needed - 1)) == (True, False)
    assert check_room(config, "bfloat16", None).endswith("unknown free on cpu")


def fits(config: NodeConfig, free: int) -> bool:
    try:
        check_room(config, "bfloat16", free)
    except CapacityError:
        return False
    return True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_free_memory_of_a_gpu_is_that_of_the_runtime() -> None:
    gpu = detect_devices("cuda", 1)[0]
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    free = free_memory(gpu)
    assert free == pytest.approx(torch.cuda.mem_get_info(held.device)[0], abs=64 << 20)
    assert "free on cuda:0" in check_memory(resolve(NodeOptions(model=str(EMBEDDED_MODEL)), gpu, {}))
