"""Fill existing tensors from safetensors or with random numbers, so a model never needs its memory twice.

A rank that holds a part of a tensor reads only that part. Quantized weights look like unquantized ones here.
"""

from __future__ import annotations

import hashlib
import logging
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from pdserve.checkpoint.file_states import check_same_files
from pdserve.checkpoint.kv_scales import is_kv_scale
from pdserve.checkpoint.quantized_weights import CheckpointWeights, find_weights
from pdserve.checkpoint.safetensors_header import Tensor as StoredTensor
from pdserve.checkpoint.safetensors_header import header_of
from pdserve.checkpoint.weight_files import collect_headers, weight_files
from pdserve.errors import CheckpointError
from pdserve.model.model_config import NATIVE, ModelConfig
from pdserve.model.quantization.at_load import is_at_load
from pdserve.model.quantization.layer_form import LayerForm
from pdserve.model.quantization.weight_formats import storage_rules
from pdserve.model.text_part import causal_name, text_headers
from pdserve.weights.change import FileStates
from runner.loading.file_slices import FileReader, FileSlice, opened
from runner.loading.peer_weights import PeerSlice, PeerWeights
from runner.models.layers.weight_shard import WeightShard
from runner.models.quantization.dequantize import DequantizedSlice, is_padding_bias
from runner.models.quantization.four_bit_slices import NAMES, four_bit_slices, random_value
from runner.models.quantization.four_bits_at_load import LastWeight, four_bits_at_load
from runner.models.quantization.fp8_at_load import QuantizedRows, ScalesOfRows
from runner.models.quantization.row_scales import RowScales

_log = logging.getLogger(__name__)

_COMPUTED = (".rotary_emb.inv_freq",)  # buffers of old checkpoints that are computed here
_CONVERTIBLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_FLOATS = ("F64", "F32", "BF16", "F16")  # their names in safetensors

_EMBEDDING = "embed_tokens.weight"  # name in a body
_BACKBONE = "backbone."
_HEADS = ("lm_head.",)  # beside the body

_DUMMY_DEVIATION = 0.02
_DUMMY_FP8_DEVIATION = 64.0  # before the scale is applied; FP8 values end at 448
_DUMMY_E8M0 = 120  # 2^-7, which leaves random E2M1 values a deviation of 0.023


def fill_random(shards: Mapping[str, WeightShard], seed: int) -> None:
    """Fill in place, on the device: norms with 1, all else with normal numbers of standard deviation 0.02.

    The numbers of a tensor depend on its name, its full shape and the seed, so ranks with parts of a model hold
    parts of the same one. Devices of one kind draw the same numbers; a CPU and a GPU draw different ones.
    """
    for name, shard in shards.items():
        memory = shard.memory
        if name.endswith("norm.weight"):
            memory.fill_(1.0)
            continue
        key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4)
        generator = torch.Generator(memory.device).manual_seed(int.from_bytes(key.digest(), "little"))
        value = random_value(name, memory.dtype, f"{name.removesuffix(NAMES.scales)}{NAMES.output_scales}" in shards)
        if value is not None:
            memory.fill_(value)
        elif name.endswith(NAMES.order):
            memory.copy_(torch.arange(len(memory), device=memory.device))
        elif name.endswith("_scale"):
            memory.fill_(_DUMMY_DEVIATION / _DUMMY_FP8_DEVIATION)
        elif name.endswith("_scales"):
            memory.fill_(_DUMMY_E8M0)
        elif memory.dtype == torch.uint8:
            full = memory if shard.is_whole else memory.new_empty(shard.full_shape)
            memory.copy_(shard.part_of(full.random_(0, 256, generator=generator)))
        elif memory.dtype not in _CONVERTIBLE:
            full = torch.empty(shard.full_shape, dtype=torch.float32, device=memory.device)
            memory.copy_(shard.part_of(full.normal_(0.0, _DUMMY_FP8_DEVIATION, generator=generator)))
        elif shard.is_whole:
            memory.normal_(0.0, _DUMMY_DEVIATION, generator=generator)
        else:
            full = memory.new_empty(shard.full_shape).normal_(0.0, _DUMMY_DEVIATION, generator=generator)
            memory.copy_(shard.part_of(full))


class OpenWeights(dict[str, Any]):
    """A FileSlice for each weight, which reads nothing before it is indexed.

    Any thread may index them; more than ``threads`` at the same time gain nothing.
    """

    def __init__(
        self, slices: Mapping[str, Any], tensors: Mapping[str, StoredTensor], files: FileStates, threads: int
    ) -> None:
        super().__init__(slices)
        self.threads = threads
        self.tensors = tensors  # as stored
        self.files = files  # open files; one that replaces them meanwhile is not read


@contextmanager
def open_weights(
    model_dir: Path,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    peer: PeerWeights | None = None,
    digested: FileStates | None = None,
) -> Iterator[OpenWeights]:
    """Open a checkpoint's files, and check at the end that they have not changed.

    Quantized weights are dequantized into ``dtype`` on the device, unless their format has layers of its own or
    ``model`` keeps them: then MXFP4 tensors and FP8's X.weight are as stored, X.weight_scale has a row for each output,
    and weights of 4 bits are as ``four_bit_slices`` says; so it is if they are quantized only now. With ``peer``,
    tensors that it offers are read from there. Raises CheckpointError, also for what cannot be read in the body, and if
    the files are not those in ``digested``.
    """
    # The library copies tensors to the device itself.
    with FileReader(device if model.impl == NATIVE else torch.device("cpu")) as reader, ExitStack() as files:
        try:
            open_files = {path: files.enter_context(opened(path)) for path in weight_files(model_dir)}
            states = {path.name: file.state for path, file in open_files.items()}
            if digested:
                check_same_files(model_dir, states, digested)
            read = ((path, header_of(path, file.fd)) for path, file in open_files.items())
            headers = collect_headers(model_dir, read)
            headers = text_headers(headers) if model.multimodal else headers
            stored = {
                name: FileSlice(reader, open_files[path], name, tensor)
                for path, tensors in headers.items()
                for name, tensor in tensors.items()
                if not is_kv_scale(name)
            }
            threads = 1 if peer is None else peer.threads
            rules = storage_rules(model.weight_format, model.quantization)
            if rules is None:
                slices = _asking(peer, stored)
            else:
                weights = find_weights(model_dir, headers, rules)
                if rules:
                    name_of_dtype = str(dtype).removeprefix("torch.")
                    cost = weights.memory_cost(model.weight_format, name_of_dtype, model.keeps_quantized)
                    _log.info("weights are %s", cost)
                plain = _asking(peer, {name: stored[name] for name in weights.plain})
                slices = plain | _quantized(model, weights, plain, stored, device, dtype)
            yield OpenWeights(_named_as_causal(slices, model), ChainMap(*headers.values()), states, threads)
        except OSError as exc:
            raise CheckpointError(f"{model_dir} cannot be read ({exc}); download the checkpoint again") from exc


def _quantized(
    model: ModelConfig,
    weights: CheckpointWeights,
    plain: Mapping[str, Any],
    stored: Mapping[str, FileSlice],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return slices of the weights that are quantized in the checkpoint, or become so when they are read."""
    slices: dict[str, Any] = {}
    if is_at_load(model.weight_format):
        last = LastWeight()
        for name in weights.plain:
            form = model.form_of(name)
            if form is not None:
                slices |= _at_load(name, plain[name], form, last)
    for name, weight in weights.quantized.items():
        form = model.form_of(name)
        if form is None:
            slices[name] = DequantizedSlice(name, weight, stored, device, dtype)
        elif form.is_four_bits:
            slices |= four_bit_slices(name, weight, form, stored, device)
        elif form.kind == "mxfp4":
            slices |= {part: stored[part] for part in weight.parts}
        else:
            slices |= {name: stored[weight.values], f"{name}_scale": RowScales(weight, stored)}
    return slices


def _at_load(name: str, source: Any, form: LayerForm, last: LastWeight) -> dict[str, Any]:
    """Return slices of an unquantized weight in ``form``."""
    if form.is_four_bits:
        return four_bits_at_load(name, source, form, last)
    return {name: QuantizedRows(source), f"{name}_scale": ScalesOfRows(source)}


def _asking(peer: PeerWeights | None, stored: dict[str, Any]) -> dict[str, Any]:
    return stored if peer is None else {name: peer.slice(name, tensor) for name, tensor in stored.items()}


def _named_as_causal(weights: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return weights by the names of a causal model.

    Tensors of a multimodal checkpoint have other prefixes, and tensors of a body that was saved alone have none.
    """
    if model.multimodal:
        return {str(causal_name(name)): weight for name, weight in weights.items()}
    if model.impl == NATIVE and any(name.startswith(_BACKBONE) for name in weights):  # Nemotron-H as NVIDIA saves it
        return {
            f"model.{name.removeprefix(_BACKBONE)}" if name.startswith(_BACKBONE) else name: weight
            for name, weight in weights.items()
        }
    if model.impl != NATIVE or _EMBEDDING not in weights:
        return weights
    return {name if name.startswith(_HEADS) else f"model.{name}": weight for name, weight in weights.items()}


def check_weights(
    model_dir: Path, weights: Mapping[str, Any], shards: Mapping[str, WeightShard], ignored: Collection[str]
) -> list[str]:
    """Return the names of the weights to load: one for each shard. Reads none; shards may be on the meta device.

    Weights named in ``ignored`` are skipped. Raises CheckpointError naming the tensor, and both shapes where they
    differ.
    """
    names = []
    for name, source in weights.items():
        if name.endswith(_COMPUTED) or name in ignored or (name not in shards and is_padding_bias(name, weights)):
            continue
        if name not in shards and 0 in source.get_shape():
            continue  # no values: in a layer of size 0, such as GLM's with n_shared_experts 0
        if name not in shards:
            raise CheckpointError(
                f"{model_dir}: tensor {name} has no place in the model that config.json describes; leaving it out "
                "would change results. Check architectures, num_hidden_layers and the bias flags"
            )
        _check_tensor(model_dir, name, shards[name], source)
        names.append(name)
    if missing := [name for name in shards if name not in weights]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{model_dir} lacks the tensors {', '.join(missing[:3])}{more}; config.json and weights belong to "
            "different models"
        )
    return names


def _check_tensor(model_dir: Path, name: str, shard: WeightShard, source: Any) -> None:
    """Compare shapes and dtypes; ``source`` is a slice of safetensors, which reads nothing before it is indexed."""
    shape = tuple(source.get_shape())
    if shape != shard.full_shape:
        raise CheckpointError(
            f"{model_dir}: tensor {name} has shape {shape}, config.json asks for {shard.full_shape}; "
            "the two belong to different models"
        )
    dtype = source.get_dtype()
    memory = shard.memory
    if dtype not in _FLOATS and not isinstance(source, DequantizedSlice) and memory.dtype in _CONVERTIBLE:
        raise _wrong_dtype(model_dir, name, dtype, memory)


def fill_shard(model_dir: Path, name: str, shard: WeightShard, source: Any, at_once: int) -> None:
    """Copy the shard's part of ``source``, about ``at_once`` values at a time. Raises CheckpointError."""
    with source.whole() if isinstance(source, PeerSlice) else nullcontext(source) as values:
        for memory, part in shard.pieces_of(values, getattr(source, "at_once", at_once)):
            if part.dtype != memory.dtype and not (part.dtype in _CONVERTIBLE and memory.dtype in _CONVERTIBLE):
                raise _wrong_dtype(model_dir, name, source.get_dtype(), memory)
            memory.copy_(part)


def _wrong_dtype(model_dir: Path, name: str, dtype: str, memory: torch.Tensor) -> CheckpointError:
    return CheckpointError(
        f"{model_dir}: tensor {name} has dtype {dtype}, which cannot become {memory.dtype}; the weight format that "
        "config.json names is another. Download the checkpoint again"
    )
