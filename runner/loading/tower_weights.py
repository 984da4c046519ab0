"""The weights of a vision tower: model.visual.*, or visual.* as the first releases named them.

Pixtral's are model.vision_tower.* and model.multi_modal_projector.*, also without "model.".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from pdserve.checkpoint.file_states import check_same_files
from pdserve.checkpoint.safetensors_header import header_of
from pdserve.checkpoint.weight_files import collect_headers, weight_files
from pdserve.config.attention_backends import patch_kernel
from pdserve.config.node_config import NodeConfig
from pdserve.errors import CheckpointError
from pdserve.weights.change import FileStates
from runner.loading.file_slices import FileReader, FileSlice, opened
from runner.loading.weights import check_weights, fill_random, fill_shard
from runner.models.layers.weight_shard import WeightShard
from runner.models.vision.attention import PatchAttention
from runner.models.vision.towers import AnyVisionTower, make_tower
from runner.placement import TensorPlacement

_MODEL = "model."  # the first releases have no such beginning of names
_AT_ONCE = 1 << 25  # values that are read and converted at a time


def build_tower(config: NodeConfig, placement: TensorPlacement) -> AnyVisionTower | None:
    """Return the empty tower of a rank, None if it encodes no images."""
    if not config.has_tower:
        return None
    assert config.model.vision is not None
    assert config.image_processor is not None
    return make_tower(config.model.vision, config.image_processor, placement, _attention(config, placement))


def _attention(config: NodeConfig, placement: TensorPlacement) -> PatchAttention | None:
    """Return FlashInfer's attention of patches where it has one and attends to text, too."""
    vision = config.model.vision
    if config.attention_backend != "flashinfer" or vision is None or placement.device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(placement.device)
    if patch_kernel(vision.head_dim, config.dtype, capability) is None:
        return None
    from runner.models.vision.flashinfer_patches import FlashInferPatchAttention

    return FlashInferPatchAttention(vision.num_heads, vision.head_dim, placement.dtype, placement.device)


@torch.inference_mode()
def load_tower(tower: AnyVisionTower, model_dir: Path, digested: FileStates | None = None) -> None:
    """Fill the tower from a checkpoint. Raises CheckpointError.

    Its files must be those in ``digested``, unless it is empty.
    """
    with _matched(tower, model_dir, digested) as tensors:
        for name, (shard, source) in tensors.items():
            fill_shard(model_dir, name, shard, source, _AT_ONCE)


def check_tower(tower: AnyVisionTower, model_dir: Path, digested: FileStates | None = None) -> None:
    """Raise CheckpointError unless each tensor of a checkpoint's tower has its place in this one. Reads none."""
    with _matched(tower, model_dir, digested):
        pass


@contextmanager
def _matched(
    tower: AnyVisionTower, model_dir: Path, digested: FileStates | None
) -> Iterator[Mapping[str, tuple[WeightShard, FileSlice]]]:
    """Open a checkpoint; give the memory and the stored values of each of the tower's tensors."""
    device = next(tower.parameters()).device
    with FileReader(device) as reader, ExitStack() as files:
        try:
            open_files = {path: files.enter_context(opened(path)) for path in weight_files(model_dir)}
            if digested:
                check_same_files(model_dir, {path.name: file.state for path, file in open_files.items()}, digested)
            headers = collect_headers(model_dir, ((path, header_of(path, f.fd)) for path, f in open_files.items()))
            stored = {
                name: FileSlice(reader, open_files[path], name, tensor)
                for path, tensors in headers.items()
                for name, tensor in tensors.items()
                if name.removeprefix(_MODEL).startswith(tower.config.tensors)
            }
            first = next(iter(stored), _MODEL)
            shards = _shards(tower, _MODEL if first.startswith(_MODEL) else "")
            names = check_weights(model_dir, stored, shards, ignored=())
            yield {name: (shards[name], stored[name]) for name in names}
        except OSError as exc:
            raise CheckpointError(f"{model_dir} cannot be read ({exc}); download the checkpoint again") from exc


@torch.inference_mode()
def fill_tower(tower: AnyVisionTower) -> None:
    """Fill the tower with values that depend on names and shapes only."""
    fill_random(_shards(tower, _MODEL), seed=0)


def _shards(tower: AnyVisionTower, prefix: str) -> dict[str, WeightShard]:
    """Return the memory of the tower's tensors by their names in a checkpoint."""
    return {prefix + tower.name + name: WeightShard.full(parameter) for name, parameter in tower.named_parameters()}
