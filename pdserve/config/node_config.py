"""What a person asks of a node, and the frozen configuration that it becomes (pdserve/config/resolve.py)."""

from __future__ import annotations

import msgspec

from pdserve.config.model_config import ModelConfig
from pdserve.config.parallel import ParallelConfig, RankPosition
from pdserve.config.runner_oracle import Decision
from pdserve.config.simulated_costs import ENGINES, SimulatedCosts
from pdserve.errors import ConfigError
from pdserve.kv import KVLayout, KVShare
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming

LOAD_FORMATS = ("auto", "dummy")
CUDA_GRAPHS = ("auto", "on", "off")


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked of a node. ``None`` and "auto" are decided by ``resolve``."""

    model: str  # directory or hub id
    served_model_name: str | None = None
    engine: str = "device"  # device; simulated: a cost model instead of one
    sim_costs: tuple[str, ...] = ()  # "name=seconds", of pdserve.config.simulated_costs.Costs
    sim_speed: float = 1.0  # how many times as fast as the costs say
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto: the checkpoint's
    load_format: str = "auto"  # auto: the checkpoint's weights; dummy: random ones
    pp: int = 1  # pipeline stages
    tp: int = 1  # tensor shards of each stage
    stage_layers: tuple[int, ...] | None = None  # layers of each stage; None: divided by count
    shared_mlps: str | None = None  # on, off; None: off, but on for prefill nodes
    max_model_len: int | None = None  # tokens
    block_size: int = 16  # tokens
    kernel_block_size: int | None = None  # tokens
    kv_cache_memory: int | None = None  # bytes
    kv_checksum: bool = False  # compare KV that was read from a peer with what the peer computed
    gpu_memory_utilization: float = 0.9
    attention_backend: str = "auto"
    cuda_graphs: str = "auto"  # auto: where V2 runs on a GPU
    max_num_seqs: int = 256  # sequences decoding at once
    max_batch_tokens: int | None = None  # tokens of one step
    max_waiting: int = 1024  # requests queued for room; more are refused
    threads: int | None = None  # of torch, on CPU
    peer_timeout: float = DEFAULT_TIMING.timeout  # seconds
    grpc_tls: str | None = None  # directory with certificates (pdserve/rpc/tls.py); None: plain gRPC

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp

    @property
    def simulated(self) -> bool:
        return self.engine == "simulated"

    @property
    def reads_weights(self) -> bool:
        return not self.simulated and self.load_format != "dummy"


class DeviceInfo(msgspec.Struct, frozen=True):
    """A device as found: ``kind`` is "cpu", "cuda" or "simulated", ``memory`` its total bytes."""

    kind: str
    index: int
    name: str
    memory: int


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node's processes must agree on, as seen by one of its ranks: ``for_rank`` gives that of another.

    ``device`` and ``kv_layout`` are those of the rank; all else is the node's.
    """

    model_dir: str
    model: ModelConfig
    served_model_name: str
    device: DeviceInfo
    dtype: str
    load_format: str
    max_model_len: int
    split: ParallelConfig
    rank: int = 0
    kv_layout: KVLayout
    kv_checksum: bool
    measure_kv_memory: bool  # the runner measures how many blocks there is room for; kv_layout has an estimate
    gpu_memory_utilization: float  # share of the GPU's memory that weights, steps and KV cache take together
    attention_backend: str
    decision: Decision
    cuda_graphs: bool
    max_num_seqs: int
    max_batch_tokens: int
    max_waiting: int
    threads: int
    peer_timing: PeerTiming
    costs: SimulatedCosts | None = None  # of a simulated node
    compat_fields: dict[str, str]  # what two nodes must have in common to exchange KV
    choices: tuple[str, ...] = ()  # every "auto", what it became, and why

    @property
    def place(self) -> RankPosition:
        return self.split.place(self.rank)

    @property
    def share(self) -> KVShare:
        """What this rank holds of the model's KV."""
        return self.shares[self.rank]

    @property
    def shares(self) -> tuple[KVShare, ...]:
        """What each rank holds of the model's KV, by rank."""
        return self.split.shares(self.model.num_kv_heads)

    def whole_layout(self, layout: KVLayout) -> KVLayout:
        """The layout of a rank as if it had all of the model: what the node as a whole is described by."""
        return msgspec.structs.replace(layout, num_layers=self.model.num_layers, num_kv_heads=self.model.num_kv_heads)

    def for_rank(self, rank: int, device: DeviceInfo) -> NodeConfig:
        """The same node, seen by a rank on ``device``."""
        seen = msgspec.structs.replace(self, rank=rank, device=device)
        heads, layers = seen.share.num_heads, seen.share.num_layers
        layout = msgspec.structs.replace(self.kv_layout, num_layers=layers, num_kv_heads=heads)
        return msgspec.structs.replace(seen, kv_layout=layout)


def check_options(options: NodeOptions) -> None:
    """What needs no checkpoint and no device to be wrong. Raises ConfigError."""
    for name in (
        "block_size",
        "max_num_seqs",
        "max_batch_tokens",
        "max_model_len",
        "kv_cache_memory",
        "threads",
        "pp",
        "tp",
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1")
    for name, allowed in (("engine", ENGINES), ("load_format", LOAD_FORMATS), ("cuda_graphs", CUDA_GRAPHS)):
        if getattr(options, name) not in allowed:
            raise ConfigError(f"{name} {getattr(options, name)!r} is not one of {', '.join(allowed)}")
    if options.max_waiting < 0:
        raise ConfigError(f"max_waiting {options.max_waiting} must be at least 0")
    if options.max_batch_tokens is not None and options.max_batch_tokens < options.max_num_seqs:
        raise ConfigError(
            f"max_batch_tokens {options.max_batch_tokens} is less than max_num_seqs {options.max_num_seqs}: "
            "every running sequence needs one token per step; raise the first or lower the second"
        )
    if not 0.0 < options.gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization {options.gpu_memory_utilization} is not within 0 … 1")
    if options.simulated:
        _check_simulated(options)
    elif options.sim_costs or options.sim_speed != 1.0:
        raise ConfigError("sim_costs and sim_speed are for a simulated node; add --engine simulated or leave them out")


def _check_simulated(options: NodeOptions) -> None:
    """A node without a device has one rank, and nothing that could be compared, captured or chosen."""
    for name, allowed in (
        ("device", ("auto", "cpu")),
        ("attention_backend", ("auto",)),
        ("cuda_graphs", ("auto", "off")),
        ("pp", (1,)),
        ("tp", (1,)),
        ("kv_checksum", (False,)),
    ):
        if getattr(options, name) not in allowed:
            raise ConfigError(f"{name} {getattr(options, name)} is not for a simulated node; leave it at {allowed[0]}")
