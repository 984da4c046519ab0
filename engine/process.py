"""The engine process of a node: ``python -m engine.process FD HEART_FD``, its ends of two sockets to the front.

It builds what the first message describes, says Ready or StartFailed, and runs the step loop until the front tells it
to stop or ends. It ignores SIGINT: Ctrl-C is the front's to handle.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import socket
import sys

from engine.channel import Channel, ChannelClosed
from engine.draft import FULL_STEP
from engine.engine import Engine
from engine.heart import Heart
from engine.messages import Configure, Progress, Ready, Shutdown, StartFailed
from engine.rank import Rank
from engine.scheduler import Scheduler
from pdserve.config import NodeConfig
from pdserve.errors import PdserveError
from pdserve.kv import KVLayout
from pdserve.records import RankKV

_log = logging.getLogger(__name__)


_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A front that is killed takes its engine along at once, also one that is stopped or in the middle of a long step.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    channel = Channel(socket.socket(fileno=int(argv[0])))
    try:
        return _serve(channel, socket.socket(fileno=int(argv[1])))
    except ChannelClosed:
        return 0


def _serve(channel: Channel, heart: socket.socket) -> int:
    messages = channel.receive(wait=True)
    while not messages:
        messages = channel.receive(wait=True)
    configure, *rest = messages
    if isinstance(configure, Shutdown):
        return 0
    assert isinstance(configure, Configure), configure
    try:
        rank, ranks = _build(configure, channel)
    except Exception as exc:
        expected = isinstance(exc, PdserveError)
        if not expected:
            _log.exception("the engine could not start")
        text = " ".join(str(exc).split()) or type(exc).__name__
        channel.send(StartFailed(type(exc).__name__ if expected else "EngineDied", text))
        channel.drain()
        return 1
    engine = Engine(_scheduler(configure.config, rank.kv_layout), rank, channel)
    gc.collect()
    gc.freeze()
    channel.send(Ready(rank.kv_layout, ranks))
    Heart(heart, engine.turns).start()
    try:
        engine.obey(rest)
        engine.run()
    finally:
        rank.close()
    return 0


def _build(configure: Configure, channel: Channel) -> tuple[Rank, tuple[RankKV, ...]]:
    """Load the model, allocate the KV cache and register it."""
    import connector
    import runner

    def progress(stage: str, fraction: float) -> None:
        channel.send(Progress(stage, fraction))

    model_runner = runner.build(configure.config, progress)
    kind = "nixl" if configure.agent else "none"
    progress("registering KV cache", -1.0)
    shares = configure.config.split.shares(configure.config.model.num_kv_heads)
    kv_connector = connector.build(kind, configure.agent, configure.config.peer_timing, shares, configure.config.rank)
    registered = kv_connector.register(model_runner.kv_region, model_runner.kv_layout, channel.wake)
    return Rank(model_runner, kv_connector), (registered,) if configure.agent else ()


def _scheduler(config: NodeConfig, layout: KVLayout) -> Scheduler:
    return Scheduler(
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        full_step=FULL_STEP[config.device.kind],
        max_waiting=config.max_waiting,
        stages=config.split.pp,
        eos_token_ids=config.model.eos_token_ids,
        kv_checksum=config.kv_checksum,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
