"""Build a rank's model and load its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from pdserve.adapters.base_layers import adapters_problem
from pdserve.checkpoint.safetensors_header import Tensor as StoredTensor
from pdserve.checkpoint.weight_digests import known_digests
from pdserve.config.memory_fit import check_room
from pdserve.config.node_config import NodeConfig
from pdserve.config.parallel import shard_of
from pdserve.errors import ConfigError
from pdserve.images import ImageMode
from pdserve.model.model_config import TRANSFORMERS, ModelConfig
from pdserve.protocols import WeightReader
from pdserve.weights.change import FileStates
from pdserve.weights.sharing import OfferedMemory
from runner.distributed.parallel_state import ParallelState
from runner.loading.decoder_weights import DecoderWeights
from runner.loading.draft_head import load_draft_head
from runner.loading.model_weights import ModelWeights, Progress
from runner.loading.offered_weights import offer_shards
from runner.loading.patches import CheckedPatch
from runner.loading.peer_weights import PeerWeights
from runner.loading.stored_weights import StoredWeights
from runner.loading.tower_weights import build_tower, check_tower, fill_tower, load_tower
from runner.loading.weights import OpenWeights, open_weights
from runner.memory.kv_memory import free_memory
from runner.models.adapters.slots import AdapterSlots
from runner.models.decoder import Decoder
from runner.models.model import Model
from runner.models.quantization.unquantized import held_dtype
from runner.models.registry import decoder_class
from runner.models.vision.inputs import NO_IMAGE_INPUTS, ImageInputs, NoImageInputs
from runner.placement import TensorPlacement, compute_dtype

_AT_ONCE = 1 << 25  # values that are read and converted at a time
_WHOLE = 1 << 62  # a peer is asked for whole tensors


class LoadedModel:
    """The model of one rank, its weights, and the placement of its tensors."""

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
        self._config = config
        self.parallel = parallel
        if self.placement.use_triton:
            parallel.enable_fused_all_reduce(config.model.hidden_size)
        if self.device.type == "cpu":
            torch.set_num_threads(config.threads)
        check_room(config, str(held_dtype(self.placement)).removeprefix("torch."), free_memory(self.device))
        self.adapter_slots: AdapterSlots | None = None  # None: the node takes no adapters
        if config.adapters is not None:
            if problem := adapters_problem(config.model):
                raise ConfigError(problem)
            self.adapter_slots = AdapterSlots(config.adapters, self.placement, config.max_batch_tokens)
        with torch.inference_mode():
            self.decoder, self.weights = self._build()
            if self.adapter_slots is not None:
                self.adapter_slots.allocate()
            self.images = self._image_inputs()
            self.tower = build_tower(config, self.placement)
        self.stored: StoredWeights | None = None  # None: of no checkpoint
        self._source: Mapping[str, StoredTensor] | None = None  # the checkpoint's tensors that are in memory
        self.files: FileStates = {}  # files that the weights were read from
        self._offered: list[Tensor] = []
        if isinstance(self.decoder, Decoder):
            if self.decoder.auxiliary is not None:
                self.decoder.auxiliary.allocate(config.max_batch_tokens)
            load_draft_head(self.decoder, None if config.random_weights else Path(config.draft_dir))
        if config.random_weights:
            with torch.inference_mode():
                self.weights.load_random(Path(config.model_dir))
                if self.tower is not None:
                    fill_tower(self.tower)
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
        if self._source is None:
            return OfferedMemory((), ())
        memory, self._offered = offer_shards(self.weights.shards(), self._source)
        return memory

    def _ask_peer(self, reader: WeightReader | None) -> tuple[PeerWeights | None, FileStates]:
        """Return the peer's weights, and the files whose digests they must have; None unless these are known."""
        digested = self._config.weight_files
        digests = None if reader is None else known_digests(Path(self._config.model_dir))
        if reader is None or digests is None or digested not in ({}, digests.files) or not self.weights.by_name:
            return None, digested
        return PeerWeights(reader, digests.tensors, self.device), digests.files

    @property
    def shard(self) -> ModelConfig:
        """This rank's part of the model, with the attention that the decoder's layers ask for."""
        shard = shard_of(self._config.model, self._config.position)
        return msgspec.structs.replace(shard, attention=self.decoder.attention)

    def check_tensors(self, model_dir: Path, digested: FileStates) -> None:
        """Raise CheckpointError unless each tensor of another checkpoint has its place in the model. Reads none."""
        with self._open(model_dir, digested) as weights:
            self.weights.check(model_dir, weights)
        if self.tower is not None:
            check_tower(self.tower, model_dir, digested)

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
            self.stored = self.weights.load(model_dir, weights, progress, _AT_ONCE if peer is None else _WHOLE)
            if self.tower is not None:
                load_tower(self.tower, model_dir, digested)
            self.synchronize()
        self._source = weights.tensors
        self.files = weights.files

    def _open(
        self, model_dir: Path, digested: FileStates, peer: PeerWeights | None = None
    ) -> AbstractContextManager[OpenWeights]:
        model = self._config.model
        dtype = self.placement.stored
        return open_weights(model_dir, model, self.device, dtype, peer=peer, digested=digested)

    def patch(self, patch: CheckedPatch) -> None:
        """Write new values in place."""
        self._source = None
        patch.apply(self.weights.groups())
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until all writes on the device have ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _image_inputs(self) -> NoImageInputs:
        """Return what the images of a step add to the decoder's inputs, which are the same object on every step."""
        config = self._config
        if config.images is ImageMode.NONE:
            return NO_IMAGE_INPUTS
        assert isinstance(self.decoder, Decoder)
        assert config.model.vision is not None
        shard = 0 if self.decoder.embeds_whole else config.position.shard
        self.decoder.images = ImageInputs(config.model.vision, config.max_batch_tokens, self.placement, shard)
        return self.decoder.images

    def _build(self) -> tuple[Model, ModelWeights]:
        # The table of rotary embeddings takes memory for every position that a sequence can have here.
        model = msgspec.structs.replace(self._config.model, max_position_embeddings=self._config.max_model_len)
        if model.impl == TRANSFORMERS:  # imported on demand: this takes seconds
            from runner.loading.library_weights import LibraryWeights
            from runner.models.from_transformers.decoder import TransformersDecoder

            library_model = TransformersDecoder(model, self.parallel, self.placement)
            layout = self._config.kv_layout.with_dtype(self._config.dtype)  # without the error of an FP8 cache
            return library_model, LibraryWeights(library_model, layout, self.placement)
        decoder = decoder_class(model.architecture)(model, self.parallel, self.placement, self.adapter_slots)
        return decoder, DecoderWeights(decoder)
