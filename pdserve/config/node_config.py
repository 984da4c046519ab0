"""The frozen configuration that pdserve/config/resolve.py makes from a node's options."""

from __future__ import annotations

import msgspec

from pdserve.adapters.adapter import AdapterLimits
from pdserve.config.attention_backends import FlashInferKernel
from pdserve.config.compatibility import compat_hash
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import ParallelConfig, RankPosition
from pdserve.config.runner_oracle import Decision
from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.images import EncodingCost, ImageInput, ImageMode, largest_image
from pdserve.kv.layout import DTYPE_BYTES, UNSCALED, KVLayout, KVScales, KVShare
from pdserve.kv.states import StateLayout, StateShare
from pdserve.model.image_processor import ImageProcessor
from pdserve.model.model_config import ModelConfig
from pdserve.model.pooling import PoolingConfig
from pdserve.weights.change import FileStates


class DeviceInfo(msgspec.Struct, frozen=True):
    """A device of this machine."""

    kind: str  # "cpu", "cuda" or "simulated"
    index: int
    name: str
    memory: int  # total bytes
    capability: tuple[int, int] | None = None  # compute capability of a GPU, where known


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a node for one of its ranks; ``for_rank`` returns the one for another rank.

    ``options`` travel as they are; the other fields are derived from them, the checkpoint and the machine.

    ``rank``, ``device``, ``kv_layout`` and ``state_layout`` are the rank's; all other fields are equal on all ranks.
    """

    options: NodeOptions  # as the user set them
    model_dir: str
    model: ModelConfig
    pooling: PoolingConfig | None = None  # None: the node generates
    served_model_name: str
    device: DeviceInfo
    dtype: str
    random_weights: bool = False  # until a checkpoint is loaded in their place
    parallel: ParallelConfig
    rank: int = 0
    decision: Decision
    attention_backend: str
    cuda_graphs: bool
    triton_problem: str = ""  # why this host runs no Triton kernels
    kv_layout: KVLayout
    state_layout: StateLayout | None = None  # recurrent states; None: the model has no recurrent layers
    kv_scales: tuple[KVScales, ...] = ()  # one per layer with a KV cache; empty unless the cache is FP8
    measure_kv_memory: bool  # kv_layout is an estimate: the runner measures how many blocks fit
    disk_kv: str = ""  # absolute path of a directory; empty: KV that leaves host memory is dropped
    max_model_len: int
    max_batch_tokens: int
    max_num_seqs: int  # sequences that decode at the same time
    itl_target: float | None = None  # seconds; None: pdserve.request_cost.auto_itl_target
    threads: int
    costs: SimulatedCosts | None = None  # None unless simulated
    speculate: str = "off"  # source of drafts: one of node_options.SPECULATE, without its directory
    draft_dir: str = ""  # checkpoint of ``model.draft_head``
    draft_digest: str = ""  # digest of the draft head's weights; empty until known
    max_drafts: int = 0  # most drafts of a decode in one step
    images: ImageMode = ImageMode.NONE
    image_problem: str = ""  # why images are refused; empty also for a checkpoint without a vision tower
    image_input: ImageInput | None = None  # None: images are refused
    image_processor: ImageProcessor | None = None  # set if ``images`` is TOWER
    image_cache: int = 0  # bytes of embeddings on each device of the first stage; at least those of the largest image
    image_token_bytes: int = 0  # embeddings of a token of an image, with what joins later layers
    image_token_cost: EncodingCost = EncodingCost()
    adapters: AdapterLimits | None = None  # None: the node takes no adapters
    compat_fields: dict[str, str]  # values that must be equal on two nodes that exchange KV
    weight_files: FileStates = {}  # this host's files whose digests compat_fields has; empty until known
    choices: tuple[str, ...] = ()  # the value of each "auto" and its reason
    flashinfer_problem: str = ""  # why this host cannot use FlashInfer before its next start, or at all
    uncompiled_kernels: tuple[FlashInferKernel, ...] = ()  # FlashInfer's, which this host compiles while it serves

    @property
    def position(self) -> RankPosition:
        return self.parallel.position(self.rank)

    @property
    def has_tower(self) -> bool:
        """Whether this rank encodes images: all shards of the first stage do."""
        return self.images is ImageMode.TOWER and self.position.is_first and not self.options.simulated

    @property
    def tower_bytes(self) -> int:
        """Bytes of the weights of this rank's vision tower; 0 if it encodes no images."""
        vision = self.model.vision
        return 0 if vision is None or not self.has_tower else vision.num_weights * DTYPE_BYTES[self.dtype]

    @property
    def image_hidden_bytes(self) -> int:
        """Bytes of the hidden states of the largest image between two pieces of its encoding; 0 without a tower."""
        vision = self.model.vision
        if vision is None or self.image_input is None or not self.has_tower:
            return 0
        return largest_image(self.image_input, self.max_model_len) * vision.merged_size * DTYPE_BYTES[self.dtype]

    @property
    def share(self) -> KVShare:
        """The layers and KV heads that this rank holds."""
        return self.shares[self.rank]

    @property
    def shares(self) -> tuple[KVShare, ...]:
        """The layers and KV heads that each rank holds, by rank."""
        return self.parallel.shares(self.model)

    @property
    def state_share(self) -> StateShare | None:
        """The part of the recurrent state that this rank holds; None if there is no state."""
        return None if self.state_layout is None else self.parallel.state_shares(self.model)[self.rank]

    @property
    def drafts_by(self) -> str:
        """The draft source that has KV of its own: "mtp", the digest of a head, or empty. Peers compare it."""
        if self.model.draft_head is not None:
            return self.draft_digest
        return "mtp" if self.model.num_draft_layers else ""

    @property
    def kv_version(self) -> str:
        """The version of the KV, beside its layout: equal KV of equal tokens, in all layers. Files on disk carry it."""
        return " ".join(filter(None, (compat_hash(self.compat_fields), self.drafts_by)))

    def kv_layers_with(self, other_drafts: bool) -> int:
        """Return the layers whose KV this node can use of a peer; see Peer.other_drafts."""
        return self.model.num_kv_layers - (self.model.num_draft_layers if other_drafts else 0)

    @property
    def split_block(self) -> int:
        """Tokens of a block if a prompt may be computed while later blocks of it are pulled; else 0.

        A recurrent state depends on all earlier tokens, and a pull decides where windows lie.
        """
        layout = self.kv_layout
        several = layout.groups.has_windows or layout.groups.num_groups > 1
        return 0 if self.state_layout is not None or several else layout.block_size

    @property
    def copies_blocks(self) -> bool:
        """Whether the choices of a prompt may begin with copies of its last block (engine/kv_cache/block_copies.py)."""
        return not self.kv_layout.groups.has_windows

    @property
    def rank_kv_scales(self) -> tuple[KVScales, ...]:
        """The scales of this rank's layers; empty unless the cache is FP8. Checkpoints have none of draft layers."""
        scales = self.kv_scales and self.kv_scales + (UNSCALED,) * self.model.num_draft_layers
        return scales[self.share.first_layer : self.share.layers.stop]

    def whole_layout(self, layout: KVLayout) -> KVLayout:
        """Return a rank's layout extended to all layers and heads, which describes the node."""
        return layout.resized(range(self.model.num_kv_layers), self.model.num_kv_heads)

    def for_rank(self, rank: int, device: DeviceInfo) -> NodeConfig:
        """Return the configuration of the same node for rank ``rank`` on ``device``."""
        config = msgspec.structs.replace(self, rank=rank, device=device)
        layout = self.kv_layout.resized(config.share.layers, config.share.num_heads)
        states = self.state_layout
        if states is not None and config.state_share is not None:
            states = msgspec.structs.replace(states, num_layers=config.state_share.num_layers)
        return msgspec.structs.replace(config, kv_layout=layout, state_layout=states)
