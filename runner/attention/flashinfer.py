"""FlashInfer's attention of chunks of prompts and of patches: FA3 on Hopper, FA2 on other GPUs.

This is the only file that imports FlashInfer.

This uses the modules below FlashInfer's wrappers, as its own ``fast_decode_plan`` does. The wrappers compute maxima by
Python loops over tensors (0.5 ms for 256 rows). They also write a plan to pinned memory that the copy of the previous
plan may still read when steps overlap.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from flashinfer.jit import get_batch_prefill_uri, jit_spec_registry
from flashinfer.prefill import get_batch_prefill_module
from flashinfer.utils import MaskMode, PosEncodingMode, TensorLayout, determine_attention_backend, device_support_pdl
from torch import Tensor

from pdserve.config.attention_backends import FlashInferKernel
from pdserve.config.kernels.flashinfer_hosts import record_compiled, search_path
from pdserve.model.attention_spec import AttentionSpec

_PLAN_BYTES = 8 << 20  # FlashInfer's own size for a plan
_TILE = 128  # query rows
_PLANS_IN_FLIGHT = 4  # plans that may be in copy to the device: of two steps, each with drafts behind it
_UNUSED = (1.0, 1e4, 0)  # scale and theta of FlashInfer's own rotary embedding, length of positions in items


@dataclass(frozen=True)
class Rows:
    """Host inputs of a plan: consecutive sequences."""

    query_starts: Tensor  # [rows + 1] int32, from 0
    page_starts: Tensor  # [rows + 1] int32, in a list of pages
    key_starts: Tensor | None  # [rows + 1] int32, of gathered keys; None: they are not gathered
    seq_lens: Tensor  # [rows] int32
    num_tokens: int


@dataclass(frozen=True)
class Pages:
    """Device inputs of a run: the pages of the same sequences."""

    query_starts: Tensor  # [rows + 1] int32, from 0
    starts: Tensor  # [rows + 1] int32
    last_lens: Tensor  # [rows] int32
    pages: Tensor  # int32


@dataclass(frozen=True)
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int  # queries and keys
    value_dim: int
    page: int
    dtype: torch.dtype

    def workspace(self, device: torch.device) -> Tensor:
        """Allocate memory for partial results of split keys: float32 values and a weight for each row of each tile.

        FlashInfer 0.6.13, ``attention/scheduler.cuh``: keys are split if the tiles of 128 rows fill the device less
        than twice.
        """
        filled = 2 * torch.cuda.get_device_properties(device).multi_processor_count // self.kv_heads
        size = self.heads * _TILE * filled * (self.value_dim + 1) * 4 + (1 << 20)
        return torch.zeros(size, dtype=torch.uint8, device=device)


class LoadedKernel(NamedTuple):
    name: str  # "fa2" or "fa3"
    module: Any


def load_kernel(kernel: FlashInferKernel, device: torch.device) -> LoadedKernel:
    """Load a kernel, and record that it is compiled. Compile it first unless FlashInfer has cached it: 1 to 3 minutes.

    FlashInfer starts ninja also for a cached kernel.
    """
    os.environ["PATH"] = search_path()
    dtype = getattr(torch, kernel.dtype)
    no_encoding = PosEncodingMode.NONE.value
    name = determine_attention_backend(device, no_encoding, False, False, dtype, dtype)
    arguments = (
        dtype,  # queries
        dtype,  # keys and values
        dtype,  # results
        torch.int32,  # indices
        kernel.head_dim,
        kernel.value_dim,
        no_encoding,
        kernel.windowed,
        False,  # soft cap of scores
        False,  # float16 products of queries and keys
    )
    module = get_batch_prefill_module(name, *arguments)
    status = jit_spec_registry.get_spec_status(get_batch_prefill_uri(name, *arguments))
    if status is not None and status.library_path is not None:
        with suppress(OSError):  # the next start looks for the kernel again
            record_compiled(kernel, torch.cuda.get_device_capability(device), status.library_path)
    return LoadedKernel(name, module)


class FlashInferPrefill:
    """FlashInfer's attention of one AttentionSpec, and its current plan."""

    def __init__(self, sizes: Sizes, workspace: Tensor, spec: AttentionSpec, causal: bool = True) -> None:
        """Load the kernel, see ``load_kernel``."""
        self._causal = causal
        dtype = str(sizes.dtype).removeprefix("torch.")
        window = spec.window
        kernel = FlashInferKernel(dtype, sizes.head_dim, sizes.value_dim, windowed=window is not None)
        device = workspace.device
        self._name, self._module = load_kernel(kernel, device)
        self._sizes = sizes
        self._scale = spec.scale
        self._window_left = -1 if window is None else window - 1  # keys before a query's own that it sees
        self._workspace = workspace
        self._has_pdl = device_support_pdl(device)
        self._device_plan = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._host_plans = [_HostPlan() for _ in range(_PLANS_IN_FLIGHT)]
        self._plan: Any = None  # offsets into the device's plan
        self._no_starts = torch.zeros(1, dtype=torch.int32, device=device)  # FA3 has them from its plan
        self.runs_in_graphs = self._name == "fa3"  # it has as many programs for any plan
        self.gains_by_gathering = self._name == "fa3" and window is None
        self.gathers = False  # as planned

    def plan(self, rows: Rows, gather: bool, graph: bool = False) -> None:
        """Divide the keys of these sequences over the device's processors, and copy the plan to the device.

        With ``gather`` the plan is for ``run_gathered``, else for ``run_paged``. With ``graph`` its parts lie where the
        parts of any plan for as many rows and tokens do, so a captured call finds them.
        """
        self.gathers = gather
        host_plan = self._host_plans.pop(0)
        self._host_plans.append(host_plan)
        host_plan.sent.synchronize()
        sizes = self._sizes
        fa2_options = (-1, False, 0) if self._name == "fa2" else ()  # splits of any size; no other kernel runs beside
        self._plan = self._module.plan(
            self._workspace,
            self._device_plan,
            host_plan.memory,
            rows.query_starts,
            rows.key_starts if gather else rows.page_starts,
            rows.seq_lens,
            rows.num_tokens,
            rows.seq_lens.shape[0],
            sizes.heads,
            sizes.kv_heads,
            1 if gather else sizes.page,
            graph,
            sizes.head_dim,
            sizes.value_dim,
            self._causal,
            self._window_left,
            *fa2_options,
        )
        host_plan.sent.record()

    def run_paged(self, q: Tensor, cache: Tensor, pages: Pages, out: Tensor) -> None:
        """Write the attention output of queries q over a layer's cache to ``out``, both [tokens, heads, head_dim].

        cache: a layer's view [pages, kv_heads, 2, page_size, head_dim].
        """
        self._module.paged_run(
            self._workspace,
            self._device_plan,
            self._plan,
            q,
            cache[:, :, 0],
            cache[:, :, 1],
            pages.query_starts,
            pages.starts,
            pages.pages,
            pages.last_lens,
            out,
            *self._common_arguments(TensorLayout.HND),
            *(None,) * 3,  # scales of 8-bit queries, keys and values
            *_UNUSED,
            self._workspace.shape[0],
        )

    def run_gathered(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Like ``run_paged``, over gathered keys [keys, kv_heads, head_dim] and values [keys, kv_heads, value_dim]."""
        self._module.ragged_run(
            self._workspace,
            self._device_plan,
            self._plan,
            q,
            keys,
            values,
            self._no_starts,
            self._no_starts,
            out,
            *self._common_arguments(TensorLayout.NHD),
            *_UNUSED,
        )

    def _common_arguments(self, layout: TensorLayout) -> tuple[Any, ...]:
        """Return the arguments behind ``out`` of both calls."""
        return (
            None,  # log of the sums of exp
            (MaskMode.CAUSAL if self._causal else MaskMode.NON_CAUSAL).value,
            layout.value,
            self._window_left,
            self._has_pdl,
            *(None,) * 6,  # custom mask and its starts, ALiBi slopes, prefix lengths, positions in items, item lengths
            0.0,  # soft cap of scores
            self._scale,
        )


class _HostPlan:
    """Pinned memory of a plan, and the event of its copy to the device."""

    def __init__(self) -> None:
        self.memory = torch.empty(_PLAN_BYTES, dtype=torch.uint8, pin_memory=True)
        self.sent = torch.cuda.Event()
