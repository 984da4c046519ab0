"""What the leader of a node, rank 0 in the engine process, and the node's other ranks say to each other.

In frames (engine/ipc/frames.py): over a Unix socket pair where the leader has started the rank, else over TCP.

    leader                                  rank
                                   ◄──        Hello                 over TCP only: who it is, whether it fits
      Welcome or Rejected          ──►
      Assign                       ──►                              it loads its part of the model, as the leader does
                                   ◄──        RankReady or Failed
      Step(plan)                   ──►
                                   ◄──        RankOutput            one per plan, in their order …
                                   ◄──        RankOutput            … and of no step, whenever its connector has news
                                   ◄──        Heartbeat                  often, from RankReady on
                                   ◄──        Failed                anything that it cannot go on after
      Shutdown                     ──►

The end of the stream is the other's death: a rank ends at once, a leader takes the node down.
"""

from __future__ import annotations

import msgspec

from engine.ipc.messages import Heartbeat, Shutdown
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.parallel import ParallelConfig
from pdserve.kv import KVLayout
from pdserve.records import ModelRunnerOutput, RankKV, StepPlan

LONGEST_HELLO = 1 << 16  # bytes: whoever dials the port may send anything


class Hello(msgspec.Struct, frozen=True, tag=True):
    """From another host; ``device``, ``model_dir`` and ``threads`` are its own."""

    rank: int
    split: ParallelConfig
    version: str  # of pdserve
    compat_hash: str
    compat_fields: dict[str, str]
    device: DeviceInfo
    model_dir: str
    threads: int


class Welcome(msgspec.Struct, frozen=True, tag=True):
    pass


class Rejected(msgspec.Struct, frozen=True, tag=True):
    reason: str  # for a person


class Assign(msgspec.Struct, frozen=True, tag=True):
    """The node as this rank sees it. ``agent`` is its connector's name; empty for a node without connector."""

    config: NodeConfig
    agent: str
    meeting: str  # host:port where ranks find each other for torch.distributed


class Step(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class RankReady(msgspec.Struct, frozen=True, tag=True):
    kv: RankKV
    kv_layout: KVLayout


class RankOutput(msgspec.Struct, frozen=True, tag=True):
    output: ModelRunnerOutput


class Failed(msgspec.Struct, frozen=True, tag=True):
    """``kind`` is the name of a class in pdserve.errors, or "EngineDied" for what nobody foresaw."""

    kind: str
    message: str  # one line for a person


ToRank = Assign | Step | Shutdown
FromRank = RankReady | RankOutput | Heartbeat | Failed
