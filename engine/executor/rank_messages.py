"""Messages between a node's leader, rank 0 in the engine process, and its other ranks.

They travel in frames (pdserve/ipc/frames.py): over a Unix socket pair where the leader has started the rank, else TCP.

    leader                                  rank
                                   ◄──        Hello                 over TCP only: its configuration, to be compared
      Welcome or Rejected          ──►
      Assign                       ──►                              it loads its part of the model, as the leader does
                                   ◄──        RankReady or Failed
      Transfers(orders)            ──►                              for its connector
      Step(plan)                   ──►
                                   ◄──        RankOutput            one per plan, in order …
                                   ◄──        RankOutput            … and of NO_STEP, when its connector has events
                                   ◄──        Heartbeat             periodically, from RankReady on
                                   ◄──        Failed                an error that ends the rank
      ChangeRank(change)           ──►                              between steps; the ranks agree on its outcome
      Shutdown                     ──►

The end of the stream means that the other side has died: a rank exits at once, a leader ends the node.
"""

from __future__ import annotations

import msgspec

from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.parallel import ParallelConfig
from pdserve.ipc.messages import Failed, Heartbeat, Shutdown
from pdserve.kv.layout import KVLayout
from pdserve.records import KVConnectorOrders, ModelRunnerOutput, RankKV, StepPlan
from pdserve.weights.change import FileStates, HostDigests, WeightChange
from pdserve.weights.sharing import RankWeights, WeightPeer

MAX_HELLO_BYTES = 1 << 20  # any program may connect; a layer's tensor groups take about 200 bytes, a file 100


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank on another host; ``device``, ``model_dir`` and all fields after it are that host's."""

    rank: int
    parallel: ParallelConfig
    version: str  # pdserve's version
    compat_hash: str
    compat_fields: dict[str, str]
    device: DeviceInfo
    model_dir: str
    draft_dir: str  # as in NodeConfig
    threads: int
    host: str  # its name
    triton_problem: str  # why it runs no Triton kernels; empty if it does
    flashinfer_problem: str = ""  # as in NodeConfig
    forced_runner: str = ""  # by PDSERVE_USE_V2_MODEL_RUNNER; empty if it is unset


class Welcome(msgspec.Struct, frozen=True, tag=True):
    pass


class Rejected(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Assign(msgspec.Struct, frozen=True, tag=True):
    """The node's configuration for this rank. ``agent`` is its connector's name; empty without connector."""

    config: NodeConfig
    agent: str
    rendezvous: str  # host:port for torch.distributed
    peer: WeightPeer | None = None


class Step(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Transfers(msgspec.Struct, frozen=True, tag=True):
    orders: KVConnectorOrders


class ChangeRank(msgspec.Struct, frozen=True, tag=True):
    """Change the weights, or only check the change, as rank 0 does at the same time."""

    change: WeightChange
    only_check: bool


class RankReady(msgspec.Struct, frozen=True, tag=True):
    kv: RankKV
    kv_layout: KVLayout
    weights: RankWeights | None = None
    loaded_files: FileStates = {}  # see ModelRunner
    digests: HostDigests | None = None  # weight digests; sent by the first rank of each host but the leader's


class RankOutput(msgspec.Struct, frozen=True, tag=True):
    output: ModelRunnerOutput


ToRank = Assign | Step | Transfers | ChangeRank | Shutdown
FromRank = RankReady | RankOutput | Heartbeat | Failed
