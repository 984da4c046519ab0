"""Tensor shards of a model of the library, by its own plan: tensors to cut, and results to sum or gather.

The plan gives modules a style, such as ``{"layers.*.self_attn.q_proj": "colwise"}``. The library reads only a rank's
part of a tensor that is a DTensor, through all its renamings and conversions. So cut tensors are DTensors while weights
are read, plain ones afterwards, and the ranks communicate through ``ParallelState``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from pdserve.config.library_plans import TENSOR_STYLES
from pdserve.errors import ConfigError
from runner.distributed.parallel_state import ParallelState

Forward = Callable[..., Any]

_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_HEADS = ("k_proj", "v_proj")  # their outputs are KV heads


class Cut(NamedTuple):
    """How a tensor is cut: along ``dim``, each of ``pieces`` equal pieces for itself, as in fused projections."""

    dim: int
    pieces: int = 1

    def divides(self, shape: torch.Size, tp: int) -> bool:
        return shape[self.dim] % (tp * self.pieces) == 0

    def part(self, whole: Tensor, shard: int, tp: int) -> Tensor:
        """Return a shard's part of the whole tensor."""
        parts = [piece.chunk(tp, self.dim)[shard] for piece in whole.chunk(self.pieces, self.dim)]
        return torch.cat(parts, self.dim)


# Cuts of weights [outputs, inputs], and of experts [experts, outputs, inputs].
_OUTPUTS = Cut(-2)
_INPUTS = Cut(-1)
_CUTS: dict[str, Cut] = {
    "colwise": _OUTPUTS,
    "colwise_gather_output": _OUTPUTS,
    "colwise_rep": _OUTPUTS,
    "rowwise": _INPUTS,
    "rowwise_split_input": _INPUTS,
    "rowwise_rep": _INPUTS,
    "packed_colwise": Cut(-2, pieces=2),
    "packed_rowwise": Cut(-1, pieces=2),
    "embedding_rowwise": _OUTPUTS,
    "embedding_colwise": _INPUTS,
}
#: Styles whose module yields its whole output. Its tensors stay whole if their size does not divide.
_WHOLE_OUTPUT = frozenset({"colwise_gather_output", "colwise_rep", "embedding_rowwise", "embedding_colwise"})


class Cuts(NamedTuple):
    styles: dict[str, str]  # by module, if it has one
    cuts: dict[str, Cut]  # by parameter, if it is cut


def find_cuts(model: Any, tp: int, num_kv_heads: int) -> Cuts:
    """Return how the library's plan cuts a model, which may be on the device meta. Raises ConfigError if it cannot."""
    plan = dict(model.tp_plan or {})
    if not plan:
        raise ConfigError(f"tp {tp}: {type(model).__name__} has no tensor-parallel plan in transformers")
    unknown = sorted(set(plan.values()) - TENSOR_STYLES)
    if unknown:
        raise ConfigError(f"tp {tp}: its plan has styles that are not known here: {', '.join(unknown)}")
    model_cuts = Cuts({}, {})
    for name, module in model.named_modules():
        style = _style(name, plan, tp, num_kv_heads)
        if style is not None:
            model_cuts.styles[name] = style
        for key, parameter in module.named_parameters(recurse=False):
            whole = f"{name}.{key}" if name else key
            cut = _cut_of(whole, parameter, _style(whole, plan, tp, num_kv_heads) or style, tp)
            if cut is not None:
                model_cuts.cuts[whole] = cut
    return model_cuts


def _style(name: str, plan: dict[str, str], tp: int, num_kv_heads: int) -> str | None:
    style = plan.get(_LAYER_NUMBER.sub(".*", name))
    if style == "colwise" and name.endswith(_HEADS) and num_kv_heads % tp:
        return "colwise_gather_output"  # the attention picks the heads of this shard
    return style


def _cut_of(name: str, parameter: nn.Parameter, style: str | None, tp: int) -> Cut | None:
    cut = None if style is None else _CUTS.get(style)
    if cut is None or style is None or (parameter.ndim == 1 and cut.dim == -1):  # a bias is added after the sum
        return None
    cut = cut._replace(dim=(cut.dim if parameter.ndim > 1 else -1) % parameter.ndim)
    if cut.divides(parameter.shape, tp):
        return cut
    if style in _WHOLE_OUTPUT:
        return None
    raise ConfigError(
        f"tp {tp} does not divide dimension {cut.dim} of {name} {list(parameter.shape)}"
        f"{f', of {cut.pieces} pieces' if cut.pieces > 1 else ''}; choose a divisor"
    )


class TensorShards:
    """The cuts of one rank: ``cut`` before weights are read, ``finish`` afterwards."""

    def __init__(self, parallel: ParallelState, num_kv_heads: int) -> None:
        """``num_kv_heads`` counts the whole model's."""
        self._parallel = parallel
        self._num_kv_heads = num_kv_heads
        self.tp = parallel.position.parallel.tp
        self.shard = parallel.position.shard
        self._styles: dict[str, str] = {}  # by module, if it has one
        self.cuts: dict[str, Cut] = {}  # by parameter, if it is cut
        self._whole: dict[str, torch.Size] = {}  # uncut shapes of these parameters

    def cut(self, model: Any) -> None:
        """Replace a model's parameters, on the device meta, by their cut form. Raises ConfigError."""
        if self.tp == 1:
            return
        model_cuts = find_cuts(model, self.tp, self._num_kv_heads)
        self._styles = model_cuts.styles
        mesh = DeviceMesh.from_group(self._parallel.shard_group, self._parallel.device.type)
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # else the library may zero this row of each rank's part
            for key, parameter in list(module.named_parameters(recurse=False)):
                whole = f"{name}.{key}" if name else key
                cut = model_cuts.cuts.get(whole)
                if cut is not None:
                    self.cuts[whole] = cut
                    self._whole[whole] = parameter.shape
                    placement = Shard(cut.dim) if cut.pieces == 1 else _StridedShard(cut.dim, split_factor=cut.pieces)
                    sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
                    module._parameters[key] = nn.Parameter(sharded, requires_grad=False)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter."""
        return self.cuts[name].part(whole, self.shard, self.tp) if name in self.cuts else whole

    def finish(self, model: Any) -> None:
        """Replace DTensors by this rank's plain tensors, and let modules sum or gather as their styles say."""
        plain: dict[int, nn.Parameter] = {}  # tied parameters stay one tensor
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    local = plain.setdefault(id(parameter), nn.Parameter(parameter.to_local(), requires_grad=False))
                    module._parameters[key] = local
        for name in self._whole.keys() - (model.all_tied_weights_keys or {}).keys():
            if model.get_parameter(name).shape == self._whole[name]:
                raise ConfigError(f"tp {self.tp}: this version of transformers reads {name} whole; use 5.23 or newer")
        for name, style in self._styles.items():
            module = model.get_submodule(name)
            shapes = ((f"{name}.{key}", one.shape) for key, one in module.named_parameters())
            if style not in _CUTS or any(shape != self._whole.get(key, shape) for key, shape in shapes):
                self._connect(module, style)

    def _connect(self, module: nn.Module, style: str) -> None:
        """Let the module's forward split its input, and sum or gather its output, as the style says."""
        forward = module.forward
        if style in ("colwise_gather_output", "colwise_rep", "embedding_colwise"):
            module.forward = lambda *args, **kwargs: self._gather(forward(*args, **kwargs))
        elif style in ("rowwise", "rowwise_split_input", "rowwise_rep"):
            module.forward = self._summed_product(module, forward, splits_input=style != "rowwise")
        elif style == "embedding_rowwise":
            module.forward = self._summed_embedding(module, forward)
        elif style in ("moe_tp_experts", "all_reduce"):
            module.forward = lambda *args, **kwargs: self._sum(forward(*args, **kwargs))
        elif style == "moe_identity_expert":
            module.forward = lambda x, *args, **kwargs: forward(x / self.tp, *args, **kwargs)

    def _summed_product(self, module: nn.Module, forward: Forward, *, splits_input: bool) -> Forward:
        bias = module._parameters.get("bias")
        if bias is not None:
            module._parameters["bias"] = None  # added once, after the sum

        def product(x: Tensor) -> Tensor:
            mine = x.chunk(self.tp, -1)[self.shard] if splits_input else x
            total = self._sum(forward(mine))
            return total if bias is None else total + bias

        return product

    def _summed_embedding(self, module: Any, forward: Forward) -> Forward:
        """Each shard looks up its own token ids."""
        num_rows = len(module.weight)

        def lookup(ids: Tensor) -> Tensor:
            row = ids - self.shard * num_rows
            foreign = (row < 0) | (row >= num_rows)
            return self._sum(forward(row.masked_fill(foreign, 0)).masked_fill(foreign[..., None], 0))

        return lookup

    def _sum(self, x: Tensor) -> Tensor:
        return self._parallel.all_reduce(x.contiguous())

    def _gather(self, x: Tensor) -> Tensor:
        columns = x.reshape(-1, x.shape[-1])
        return self._parallel.gather_columns(columns, self.tp * x.shape[-1]).view(*x.shape[:-1], -1)
