"""The options of a node, and the frozen configuration that pdserve/config/resolve.py makes from them."""

from __future__ import annotations

import msgspec

from pdserve.config.parallel import ParallelConfig, RankPosition
from pdserve.config.runner_oracle import Decision
from pdserve.config.simulated_costs import ENGINES, SimulatedCosts
from pdserve.errors import ConfigError
from pdserve.kv import FP8_E4M3, KVLayout, KVScales, KVShare
from pdserve.model.model_config import ModelConfig
from pdserve.model.pooling import PoolingConfig
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming
from pdserve.weight_change import FileStates

LOAD_FORMATS = ("auto", "dummy")
LOAD_SOURCES = ("disk", "auto", "peer")
KV_CACHE_DTYPES = ("auto", FP8_E4M3, "fp8")  # vLLM's names; the last two are the same
CUDA_GRAPHS = ("auto", "on", "off")
GPU_MEMORY_UTILIZATION = 0.9  # default share of a GPU's memory; nodes of `pdserve up` on the same GPU divide it


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options as the user set them. ``resolve`` decides ``None`` and "auto"."""

    model: str  # directory or hub id
    served_model_name: str | None = None
    engine: str = "device"  # device, or simulated: a cost model
    sim_costs: tuple[str, ...] = ()  # "name=seconds" with the fields of SimulatedCosts
    sim_speed: float = 1.0  # divides the costs
    sim_crash_token: int | None = None  # a step that computes a sequence with this token fails, and so the engine
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto: the checkpoint's
    load_format: str = "auto"  # auto: the checkpoint's weights; dummy: random ones
    load_from: str = "disk"  # auto: from a peer if there is one; peer: from a peer; both offer the weights to peers
    weight_peers: tuple[str, ...] = ()  # sources of nodes to ask for weights
    model_impl: str = "auto"  # auto: native layers where the architecture has them, else transformers
    task: str = "auto"  # auto: by the checkpoint; generate; embed or classify: vectors of prompts
    pp: int = 1  # pipeline stages
    tp: int = 1  # tensor shards per stage
    ep: int = 1  # 1: each shard has a slice of every expert; tp: whole experts
    stage_layers: tuple[int, ...] | None = None  # layers of each stage; None: split evenly
    max_model_len: int | None = None  # tokens
    block_size: int = 16  # tokens
    kernel_block_size: int | None = None  # tokens
    kv_cache_memory: int | None = None  # bytes
    kv_cache_dtype: str = "auto"  # auto: the model's dtype; fp8_e4m3 or fp8: 8 bits with a scale per layer
    kv_checksum: str | None = None  # on, off: compare KV read from a peer with its digests; None: on if there is KV
    gpu_memory_utilization: float | None = None  # share of each GPU's memory for this node; None: 0.9
    attention_backend: str = "auto"
    cuda_graphs: str = "auto"  # auto: on if V2 runs on a GPU
    max_num_seqs: int = 256  # sequences that decode at the same time
    max_batch_tokens: int | None = None  # tokens per step
    itl_target: float | None = None  # ms between tokens that prompts on the same node keep; 0: any; None: auto
    max_waiting: int = 1024  # queued requests; further requests are refused
    threads: int | None = None  # CPU threads of torch
    peer_timeout: float = DEFAULT_TIMING.timeout  # seconds
    grpc_tls: str | None = None  # directory of certificates (pdserve/rpc/tls.py); None: no TLS

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp

    @property
    def memory_share(self) -> float:
        """Share of each GPU's memory that this node may use."""
        return self.gpu_memory_utilization or GPU_MEMORY_UTILIZATION

    @property
    def simulated(self) -> bool:
        return self.engine == "simulated"

    @property
    def reads_weights(self) -> bool:
        return not self.simulated and self.load_format != "dummy"


class DeviceInfo(msgspec.Struct, frozen=True):
    """A device of this machine."""

    kind: str  # "cpu", "cuda" or "simulated"
    index: int
    name: str
    memory: int  # total bytes
    capability: tuple[int, int] | None = None  # compute capability of a GPU, where known


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a node for one of its ranks; ``for_rank`` returns that of another rank.

    ``rank``, ``device`` and ``kv_layout`` are the rank's; all other fields are equal on all ranks.
    """

    model_dir: str
    model: ModelConfig
    served_model_name: str
    device: DeviceInfo
    dtype: str
    load_format: str
    load_from: str = "disk"
    weight_peers: tuple[str, ...] = ()
    max_model_len: int
    parallel: ParallelConfig
    rank: int = 0
    kv_layout: KVLayout
    kv_scales: tuple[KVScales, ...] = ()  # of all layers of the model; empty unless the cache is FP8
    kv_checksum: bool
    measure_kv_memory: bool  # kv_layout is an estimate: the runner measures how many blocks fit
    gpu_memory_utilization: float  # share of each GPU's memory for weights, activations and KV cache together
    attention_backend: str
    decision: Decision
    cuda_graphs: bool
    max_num_seqs: int
    max_batch_tokens: int
    itl_target: float | None = None  # seconds; None: pdserve.request_cost.auto_itl_target
    max_waiting: int
    threads: int
    peer_timing: PeerTiming
    costs: SimulatedCosts | None = None  # None unless simulated
    sim_crash_token: int | None = None
    compat_fields: dict[str, str]  # values that must be equal on two nodes that exchange KV
    weight_files: FileStates = {}  # of this host, whose digests are in compat_fields; empty before they are known
    choices: tuple[str, ...] = ()  # the value of each "auto" and its reason
    pooling: PoolingConfig | None = None  # None: the node generates
    triton_problem: str = ""  # why this host runs no Triton kernels

    @property
    def position(self) -> RankPosition:
        return self.parallel.position(self.rank)

    @property
    def share(self) -> KVShare:
        """The layers and KV heads that this rank holds."""
        return self.shares[self.rank]

    @property
    def shares(self) -> tuple[KVShare, ...]:
        """The layers and KV heads that each rank holds, by rank."""
        return self.parallel.shares(self.model.num_kv_heads)

    @property
    def rank_kv_scales(self) -> tuple[KVScales, ...]:
        """The scales of this rank's layers; empty unless the cache is FP8."""
        return self.kv_scales[self.share.first_layer : self.share.first_layer + self.share.num_layers]

    def whole_layout(self, layout: KVLayout) -> KVLayout:
        """Return a rank's layout extended to all layers and heads, which describes the node."""
        return layout.resized(self.model.num_layers, self.model.num_kv_heads)

    def for_rank(self, rank: int, device: DeviceInfo) -> NodeConfig:
        """Return the configuration of the same node for rank ``rank`` on ``device``."""
        config = msgspec.structs.replace(self, rank=rank, device=device)
        heads, layers = config.share.num_heads, config.share.num_layers
        layout = self.kv_layout.resized(layers, heads)
        return msgspec.structs.replace(config, kv_layout=layout)


def check_options(options: NodeOptions) -> None:
    """Raise ConfigError for options that are invalid for every checkpoint and device."""
    sizes = (
        "block_size",
        "max_num_seqs",
        "max_batch_tokens",
        "max_model_len",
        "kv_cache_memory",
        "threads",
        "pp",
        "tp",
        "ep",
    )
    for name in sizes:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1")
    for name, allowed in (
        ("engine", ENGINES),
        ("load_format", LOAD_FORMATS),
        ("load_from", LOAD_SOURCES),
        ("kv_cache_dtype", KV_CACHE_DTYPES),
        ("cuda_graphs", CUDA_GRAPHS),
    ):
        if getattr(options, name) not in allowed:
            raise ConfigError(f"{name} {getattr(options, name)!r} is not one of {', '.join(allowed)}")
    if options.load_from != "disk" and not options.reads_weights:
        raise ConfigError(f"load_from {options.load_from}: this node has no weights of a checkpoint; leave it at disk")
    if options.load_from == "peer" and not options.weight_peers:
        raise ConfigError("load_from peer needs weight_peers, the nodes to ask; or choose auto")
    if options.max_waiting < 0:
        raise ConfigError(f"max_waiting {options.max_waiting} must be at least 0")
    if options.itl_target is not None and not 0.0 <= options.itl_target <= 60_000.0:
        raise ConfigError(f"itl_target {options.itl_target:g} is not within 0 … 60000 ms; 0 turns it off")
    if options.max_batch_tokens is not None and options.max_batch_tokens < options.max_num_seqs:
        raise ConfigError(
            f"max_batch_tokens {options.max_batch_tokens} is less than max_num_seqs {options.max_num_seqs}: "
            "each running sequence needs one token per step; raise the former or lower the latter"
        )
    if options.gpu_memory_utilization is not None and not 0.0 < options.gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization {options.gpu_memory_utilization} is not within 0 … 1")
    if options.simulated:
        _check_simulated(options)
    elif options.sim_costs or options.sim_speed != 1.0 or options.sim_crash_token is not None:
        names = "sim_costs, sim_speed and sim_crash_token"
        raise ConfigError(f"{names} need a simulated node; add --engine simulated or remove them")


def _check_simulated(options: NodeOptions) -> None:
    """Refuse options of devices and ranks, which a simulated node does not have."""
    for name, allowed in (
        ("device", ("auto", "cpu")),
        ("attention_backend", ("auto",)),
        ("cuda_graphs", ("auto", "off")),
        ("pp", (1,)),
        ("tp", (1,)),
        ("ep", (1,)),
        ("kv_checksum", (None, "off")),
    ):
        if getattr(options, name) not in allowed:
            raise ConfigError(f"{name} {getattr(options, name)} is not possible for a simulated node; use {allowed[0]}")
