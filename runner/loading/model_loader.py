"""Build a rank's model and load its weights."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from pdserve.checkpoint.kv_scales import read_kv_scales
from pdserve.checkpoint.weight_digests import known_tensor_digests
from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.model_config import TRANSFORMERS, ModelConfig
from pdserve.config.node_config import NodeConfig
from pdserve.config.parallel import shard_of
from pdserve.config.same_model import check_same_model
from pdserve.errors import CheckpointError, ConfigError, PdserveError
from pdserve.kv import UNSCALED
from pdserve.protocols import WeightReader
from pdserve.weight_change import WeightChange
from pdserve.weight_sharing import OfferedMemory
from runner.distributed.parallel_state import ParallelState
from runner.loading.fused_experts import split_experts
from runner.loading.memory import check_room
from runner.loading.offered_weights import offer_shards
from runner.loading.peer_weights import PeerWeights
from runner.loading.weights import fill_random, load_weights, open_weights
from runner.models.decoder import Decoder
from runner.models.quantization.unquantized import held_dtype
from runner.models.registry import decoder_class
from runner.placement import TensorPlacement, compute_dtype

if TYPE_CHECKING:
    from runner.models.from_transformers.decoder import TransformersDecoder

_log = logging.getLogger(__name__)


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
        self._config, self._parallel = config, parallel
        if self.placement.use_triton:
            parallel.enable_fused_all_reduce(config.model.hidden_size)
        if self.device.type == "cpu":
            torch.set_num_threads(config.threads)
        layout = None if config.measure_kv_memory else config.kv_layout
        check_room(config.model, config.position, layout, self.device, held_dtype(self.placement))
        self.decoder = self._build()
        self._offered: list[Tensor] = []
        self.problem = ""  # why the weights in memory are of no use
        peer = None if reader is None or not isinstance(self.decoder, Decoder) else self._ask_peer(reader)
        try:
            self._load(config.model_dir, lambda fraction: progress("loading weights", fraction), peer)
        finally:
            if peer is not None:
                peer.close()

    def offered_weights(self) -> OfferedMemory:
        """Return the tensors that are in memory as the checkpoint stores them. They live as long as this object."""
        if not isinstance(self.decoder, Decoder):
            return OfferedMemory((), ())
        stored = ChainMap(*read_headers(Path(self._config.model_dir)).values())
        memory, self._offered = offer_shards(self.decoder.weight_shards(), stored)
        return memory

    def _ask_peer(self, reader: WeightReader) -> PeerWeights | None:
        """Return the peer's weights; None unless the digests of this host's files are known."""
        digests = known_tensor_digests(Path(self._config.model_dir))
        return None if digests is None else PeerWeights(reader, digests, self.device)

    @property
    def shard(self) -> ModelConfig:
        """This rank's part of the model, with the attention that the decoder's layers ask for."""
        shard = shard_of(self._config.model, self._config.position)
        return msgspec.structs.replace(shard, attention=self.decoder.attention)

    def check(self, change: WeightChange) -> None:
        """Raise CheckpointError, on all ranks, unless the change fits the weights in memory."""
        if change.patch:
            raise CheckpointError("patches of weights are not supported yet; reload a checkpoint")
        check_same_model(self._config, Path(change.model_dir))
        self._check_kv_scales(Path(change.model_dir))

    def change(self, change: WeightChange) -> None:
        """Read another checkpoint of the same architecture and shape. No step may be in flight.

        On a GPU the weights keep their addresses, so captured graphs stay right. Raises CheckpointError; after
        the first write the only remedy is another reload (``problem``). Scales of an FP8 KV cache must stay.
        """
        self.check(change)
        self.problem = "a reload has not ended"
        try:
            if self.device.type == "cpu":
                self.decoder = self._build()  # packed weights cannot be filled again
            self._load(change.model_dir, lambda fraction: None)
        except CheckpointError as exc:
            self.problem = str(exc)
            raise
        self.problem = ""

    def _check_kv_scales(self, model_dir: Path) -> None:
        """Raise CheckpointError unless another checkpoint has the scales that kernels and cached blocks have."""
        config = self._config
        if not config.kv_scales or config.load_format == "dummy":
            return
        found = read_kv_scales(read_headers(model_dir), config.model.num_layers)
        if (found or (UNSCALED,) * config.model.num_layers) != config.kv_scales:
            raise CheckpointError(f"{model_dir} has other scales of the FP8 KV cache; start the node again with it")

    @torch.inference_mode()
    def _build(self) -> Decoder | TransformersDecoder:
        # The table of rotary embeddings takes memory for every position that a sequence can have here.
        model = msgspec.structs.replace(self._config.model, max_position_embeddings=self._config.max_model_len)
        if model.impl == TRANSFORMERS:
            from runner.models.from_transformers.decoder import (
                TransformersDecoder,
            )  # on demand: it imports transformers

            return TransformersDecoder(model, self._parallel, self.placement)
        return decoder_class(model.architecture)(model, self._parallel, self.placement)

    @torch.inference_mode()
    def _load(self, model_dir: str, progress: Callable[[float], None], peer: PeerWeights | None = None) -> None:
        path, dummy = Path(model_dir), self._config.load_format == "dummy"
        model, stored = self._config.model, self.placement.stored
        with nullcontext() if dummy else open_weights(path, model, self.device, stored, peer) as weights:
            if not isinstance(self.decoder, Decoder):
                self._load_library_model(self.decoder, path, weights)
                return
            if weights is None:
                fill_random(dict(self.decoder.weight_shards()), seed=0)
            else:
                shards = dict(self.decoder.weight_shards())
                found = split_experts(weights, shards, self.decoder.checkpoint_name)
                load_weights(path, found, shards, self.decoder.ignored_weights(found), progress)
        self.decoder.process_weights_after_loading()

    def _load_library_model(self, decoder: TransformersDecoder, path: Path, weights: Mapping[str, Any] | None) -> None:
        """Load this rank's part, and test all ranks together. Every rank refuses a model that one rank refuses."""
        from runner.models.from_transformers.self_test import check_exactness

        refusal: PdserveError | None = None
        try:
            decoder.load(path, weights)
        except PdserveError as exc:
            refusal = exc
        problem = self._parallel.first_problem("" if refusal is None else str(refusal))
        if problem:
            raise refusal or ConfigError(problem)
        reference = partial(decoder.eager_logits, path, weights)
        layout = self._config.kv_layout.with_dtype(self._config.dtype)  # without the error of an FP8 cache
        error = check_exactness(decoder, reference, layout, self.placement)
        _log.info("%s of transformers equals its eager forward within %.1e", decoder.config.architecture, error)
