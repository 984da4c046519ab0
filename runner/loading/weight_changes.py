"""Changes of a running model's weights: another checkpoint, or a patch. All ranks change, or none does.

check ──► all ranks agree ──► write in place, layer by layer ──► all ranks agree
  └ refused: the old weights serve on     └ failed: ``problem``, no weights until a reload succeeds
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import TypeVar

import torch

from pdserve.config.compatibility import weights_hash
from pdserve.config.config_with_weights import with_reload
from pdserve.config.node_config import NodeConfig
from pdserve.config.same_model import check_kv_scales, check_same_model
from pdserve.errors import CheckpointError, PdserveError
from pdserve.weights.change import WeightChange
from runner.loading.model_loader import LoadedModel
from runner.loading.patches import CheckedPatch
from runner.memory.kv_memory import free_memory

T = TypeVar("T")

_log = logging.getLogger(__name__)

_KEPT_BESIDE_A_MODEL = 64 << 20  # bytes of a patch in the memory of a CPU

# Errors of devices and of memory, besides our own.
_FAILURES = (PdserveError, OSError, RuntimeError, MemoryError)


class WeightChanger:
    """Checks and applies the changes of one rank."""

    def __init__(self, config: NodeConfig, model: LoadedModel) -> None:
        self.problem = ""  # why the weights in memory are of no use
        self._config = config
        self._model = model

    def check(self, change: WeightChange) -> None:
        """Raise CheckpointError on every rank unless the change fits the weights in memory."""
        self._on_all_ranks(lambda: self._prepare(change))

    @torch.inference_mode()
    def apply(self, change: WeightChange) -> None:
        """Overwrite the weights; their addresses stay, so captured graphs stay valid. No step may be in flight.

        Raises CheckpointError on every rank. If ``problem`` is then empty, the old weights are in use.
        """
        started = time.monotonic()
        write = self._on_all_ranks(lambda: self._prepare(change))
        self._model.synchronize()
        self.problem = "a change of its weights has not ended"
        try:
            self._on_all_ranks(write)
        except CheckpointError as exc:
            self.problem = str(exc)
            raise
        self.problem = ""
        what = change.patch or change.model_dir
        _log.info("weights are those of %s, after %.2f s", what, time.monotonic() - started)

    def _on_all_ranks(self, step: Callable[[], T]) -> T:
        """Run a step. Raises CheckpointError if it fails on any rank."""
        failure: Exception | None = None
        try:
            result = step()
        except _FAILURES as exc:
            failure = exc
        problem = self._model.parallel.first_problem("" if failure is None else str(failure) or repr(failure))
        if problem:
            raise CheckpointError(problem) from failure
        return result

    def _prepare(self, change: WeightChange) -> Callable[[], None]:
        """Check a change, and return what writes it. Raises CheckpointError."""
        if bool(change.model_dir) == bool(change.patch):
            raise CheckpointError("a change of weights names a checkpoint or a patch, and not both")
        if change.patch:
            return self._prepare_patch(Path(change.patch))
        model_dir = Path(change.model_dir)
        digested = change.weight_files
        check_same_model(self._config, model_dir)
        if change.weights_hash:
            own = with_reload(self._config, change.model_dir)
            if weights_hash(own.compat_fields) != change.weights_hash:
                raise CheckpointError(f"{model_dir} has other weights on {gethostname()} than on the host of rank 0")
            digested = own.weight_files
        check_kv_scales(self._config, model_dir)
        self._model.check_tensors(model_dir, digested)
        return lambda: self._model.load(model_dir, digested)

    def _prepare_patch(self, path: Path) -> Callable[[], None]:
        model = self._model
        if self.problem:
            raise CheckpointError("there are no weights to patch; reload a checkpoint")
        if not model.weights.by_name:
            raise CheckpointError(
                f"patch {path}: {self._config.model.architecture} runs through transformers, whose weights cannot be "
                "patched; reload a checkpoint"
            )
        if model.stored is None:
            raise CheckpointError(f"patch {path}: the weights are random (load_format dummy); reload a checkpoint")
        patch = CheckedPatch(path, model.stored, self._keep_bytes())
        return lambda: model.patch(patch)

    def _keep_bytes(self) -> int:
        """Return the most bytes of a patch that host memory has room for."""
        if self._model.device.type == "cpu":
            return _KEPT_BESIDE_A_MODEL
        free = free_memory(torch.device("cpu"))
        return 0 if free is None else free // (2 * self._config.parallel.num_ranks)
