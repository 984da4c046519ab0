"""Build a rank's model and load its weights."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from pdserve.checkpoint.safetensors_header import Tensor as StoredTensor
from pdserve.checkpoint.weight_digests import known_digests
from pdserve.config.node_config import NodeConfig
from pdserve.config.parallel import shard_of
from pdserve.errors import ConfigError, PdserveError
from pdserve.model.model_config import TRANSFORMERS, ModelConfig
from pdserve.protocols import WeightReader
from pdserve.weight_change import FileStates
from pdserve.weight_sharing import OfferedMemory
from runner.distributed.parallel_state import ParallelState
from runner.loading.fused_experts import split_experts
from runner.loading.memory import check_room
from runner.loading.offered_weights import offer_shards
from runner.loading.patches import CheckedPatch
from runner.loading.peer_weights import PeerWeights
from runner.loading.stored_weights import StoredWeights
from runner.loading.weights import OpenWeights, check_weights, fill_random, fill_shard, open_weights
from runner.models.decoder import Decoder
from runner.models.layers.weight_shard import WeightShard
from runner.models.quantization.unquantized import held_dtype
from runner.models.registry import decoder_class
from runner.placement import TensorPlacement, compute_dtype

if TYPE_CHECKING:
    from runner.models.from_transformers.decoder import TransformersDecoder

_log = logging.getLogger(__name__)

Progress = Callable[[float], None]

_AT_ONCE = 1 << 25  # values that are read and converted at a time
_C_LIBRARY = ctypes.CDLL(None)
_WHOLE = 1 << 62  # a peer is asked for whole tensors


class LoadedModel:
    """The decoder of one rank, and the placement of its tensors."""

    def __init__(
        self,
        config: NodeConfig,
        parallel: ParallelState,
        progress: Callable[[str, float], None],
        reader: WeightReader | None = None,
    ) -> None:
        """Raise CapacityError before, CheckpointError while reading the weights."""
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.device = parallel.device
        self.placement = TensorPlacement(
            self.device, dtype, compute_dtype(self.device, dtype), use_triton=config.attention_backend != "torch"
        )
        self._config, self.parallel = config, parallel
        if self.placement.use_triton:
            parallel.enable_fused_all_reduce(config.model.hidden_size)
        if self.device.type == "cpu":
            torch.set_num_threads(config.threads)
        layout = None if config.measure_kv_memory else config.kv_layout
        check_room(config.model, config.position, layout, self.device, held_dtype(self.placement))
        self.decoder = self._build()
        self.stored: StoredWeights | None = None  # None: of no checkpoint
        self._source: Mapping[str, StoredTensor] | None = None  # the checkpoint's tensors that are in memory
        self.files: FileStates = {}  # that the weights were read from
        self._offered: list[Tensor] = []
        if config.load_format == "dummy":
            self._load_random()
            return
        peer, digested = self._ask_peer(reader)
        try:
            self.load(Path(config.model_dir), digested, lambda fraction: progress("loading weights", fraction), peer)
        finally:
            if peer is not None:
                peer.close()

    def offered_weights(self) -> OfferedMemory:
        """Return the tensors that are in memory as the checkpoint stores them; none after a patch.

        They live as long as this object. They may be read until the next change of weights.
        """
        if self._source is None or not isinstance(self.decoder, Decoder):
            return OfferedMemory((), ())
        memory, self._offered = offer_shards(self.decoder.weight_shards(), self._source)
        return memory

    @torch.inference_mode()
    def run_products(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        """See Decoder. A model of transformers runs none."""
        if isinstance(self.decoder, Decoder):
            self.decoder.run_products(tokens, samples)

    def _ask_peer(self, reader: WeightReader | None) -> tuple[PeerWeights | None, FileStates]:
        """Return the peer's weights, and the files whose digests they must have; None unless these are known."""
        digested = self._config.weight_files
        known = None if reader is None else known_digests(Path(self._config.model_dir))
        if (
            reader is None
            or known is None
            or digested not in ({}, known.files)
            or not isinstance(self.decoder, Decoder)
        ):
            return None, digested
        return PeerWeights(reader, known.tensors, self.device), known.files

    @property
    def shard(self) -> ModelConfig:
        """This rank's part of the model, with the attention that the decoder's layers ask for."""
        shard = shard_of(self._config.model, self._config.position)
        return msgspec.structs.replace(shard, attention=self.decoder.attention)

    def check_tensors(self, model_dir: Path, digested: FileStates) -> None:
        """Raise CheckpointError unless each tensor of another checkpoint has its place in the model. Reads none."""
        with self._open(model_dir, digested) as weights:
            if isinstance(self.decoder, Decoder):
                self._weights_to_load(self.decoder, model_dir, weights)

    @torch.inference_mode()
    def load(
        self,
        model_dir: Path,
        digested: FileStates,
        progress: Progress | None = None,
        peer: PeerWeights | None = None,
    ) -> None:
        """Fill the weights in place, from ``peer`` where it has them. Raises CheckpointError.

        They are then a mixture, and the only remedy is another checkpoint. The files must be those in ``digested``,
        unless it is empty.
        """
        self.stored = self._source = None
        with self._open(model_dir, digested, peer) as weights:
            if not isinstance(self.decoder, Decoder):
                self._load_library_model(self.decoder, model_dir, weights)
            else:
                found = self._weights_to_load(self.decoder, model_dir, weights)
                self._fill(self.decoder, model_dir, found, progress, _AT_ONCE if peer is None else _WHOLE)
                self.stored = StoredWeights(weights.tensors, found)
            self.synchronize()
        self._source, self.files = weights.tensors, weights.files

    def _open(
        self, model_dir: Path, digested: FileStates, peer: PeerWeights | None = None
    ) -> AbstractContextManager[OpenWeights]:
        model, dtype = self._config.model, self.placement.stored
        return open_weights(model_dir, model, self.device, dtype, peer=peer, digested=digested)

    def patch(self, patch: CheckedPatch) -> None:
        """Write new values in place."""
        assert isinstance(self.decoder, Decoder)
        self._source = None
        patch.apply(self.decoder.weight_groups())
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until all writes on the device have ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def _build(self) -> Decoder | TransformersDecoder:
        # The table of rotary embeddings takes memory for every position that a sequence can have here.
        model = msgspec.structs.replace(self._config.model, max_position_embeddings=self._config.max_model_len)
        if model.impl == TRANSFORMERS:
            from runner.models.from_transformers.decoder import (
                TransformersDecoder,
            )  # on demand: it imports transformers

            return TransformersDecoder(model, self.parallel, self.placement)
        return decoder_class(model.architecture)(model, self.parallel, self.placement)

    @torch.inference_mode()
    def _load_random(self) -> None:
        if not isinstance(self.decoder, Decoder):
            self._load_library_model(self.decoder, Path(self._config.model_dir), None)
            return
        for group in self.decoder.weight_groups():
            group.refill(partial(fill_random, seed=0))

    def _weights_to_load(self, decoder: Decoder, model_dir: Path, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the weights by the names that the model asks for. Raises CheckpointError unless all are there."""
        shards = dict(decoder.weight_shards())
        found = split_experts(weights, shards, decoder.checkpoint_name)
        check_weights(model_dir, found, shards, decoder.ignored_weights(found))
        return found

    def _fill(
        self, decoder: Decoder, model_dir: Path, weights: Mapping[str, Any], progress: Progress | None, at_once: int
    ) -> None:
        """Fill and process one group of tensors after the other."""
        total, done = sum(shard.memory.numel() for _, shard in decoder.weight_shards()), 0

        def fill(shards: Mapping[str, WeightShard]) -> None:
            nonlocal done
            for name, shard in shards.items():
                fill_shard(model_dir, name, shard, weights[name], at_once)
                done += shard.memory.numel()
                if progress is not None:
                    progress(done / total)

        for group in decoder.weight_groups():
            group.refill(fill)
            return_free_memory()

    def _load_library_model(self, decoder: TransformersDecoder, path: Path, weights: Mapping[str, Any] | None) -> None:
        """Load this rank's part, and test all ranks together. Every rank refuses a model that one rank refuses."""
        from runner.models.from_transformers.self_test import check_exactness

        decoder.unload()
        refusal: PdserveError | None = None
        try:
            decoder.load(path, weights)
        except PdserveError as exc:
            refusal = exc
        problem = self.parallel.first_problem("" if refusal is None else str(refusal))
        if problem:
            raise refusal or ConfigError(problem)
        reference = partial(decoder.eager_logits, path, weights)
        layout = self._config.kv_layout.with_dtype(self._config.dtype)  # without the error of an FP8 cache
        error = check_exactness(decoder, reference, layout, self.placement)
        _log.info("%s of transformers equals its eager forward within %.1e", decoder.config.architecture, error)


def return_free_memory() -> None:
    """Return freed host memory to the system, which the C library keeps for later; without glibc, do nothing."""
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)
