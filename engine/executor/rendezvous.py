"""How ranks on other hosts come to their leader: they dial, say who they are, and are told whether they fit.

    leader   listen ──► gather: until every rank that is missing has said a Hello that fits
    rank     dial (until somebody is there) ──► join: Welcome, or the reason why not

The port is open until all are there. Whatever else dials it is shown out: it can neither hold the leader up nor take
a rank's place.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from importlib.metadata import version

import msgspec

from engine.executor.rank_messages import LONGEST_HELLO, Hello, Rejected, Welcome
from engine.ipc.frames import FRAME_HEADER, Frames, framed
from pdserve.compatibility import compat_hash
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.parallel import ParallelConfig
from pdserve.errors import CapacityError, ConfigError, NodeError
from pdserve.rpc.address import split_address
from pdserve.rpc.timeouts import PeerTiming

_log = logging.getLogger(__name__)

GATHER_SECONDS = 300.0  # that ranks and leader wait for each other: hosts do not start at one moment
MOST_CALLERS = 64  # that have not said who they are; the one who has been silent longest makes room
_DIAL_AGAIN = 0.5  # seconds
_ANSWER_SECONDS = 10.0

Joined = tuple[Hello, socket.socket]


def set_timeouts(sock: socket.socket, timing: PeerTiming) -> None:
    """Notice also a host that is gone without a word; send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, int(timing.probe_after))  # whole seconds are all that TCP knows
    for option, value in (
        (socket.TCP_KEEPIDLE, probe),
        (socket.TCP_KEEPINTVL, probe),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, int(timing.timeout * 1000)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


# ---------------------------------------------------------------- the leader


def listen(address: str) -> socket.socket:
    """Raises CapacityError when that cannot be listened on."""
    host, port = split_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=MOST_CALLERS)
    except OSError as exc:
        raise CapacityError(
            f"cannot listen on {address} for the ranks of other hosts: {exc.strerror}; "
            "give --leader an address of this host and a free port"
        ) from exc


class Rendezvous:
    """Gathers ranks of other hosts."""

    def __init__(self, listener: socket.socket, config: NodeConfig, missing: range) -> None:
        self._listener = listener
        self._config = config
        self._missing = missing
        self._joined: dict[int, Joined] = {}
        self._callers: dict[socket.socket, Frames[Hello]] = {}  # in the order of their coming
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def gather(self, seconds: float) -> dict[int, Joined]:
        """All missing ranks, by rank. Raises NodeError, naming those that did not come."""
        end = time.monotonic() + seconds
        try:
            while len(self._joined) < len(self._missing):
                if (left := end - time.monotonic()) <= 0:
                    absent = ", ".join(str(rank) for rank in self._missing if rank not in self._joined)
                    raise NodeError(
                        f"ranks {absent} of this node have not come within {seconds:.3g} s; "
                        "start each of them with the same --leader"
                    )
                self._turn(left)
        except NodeError:
            for _, sock in self._joined.values():
                sock.close()
            raise
        finally:
            for caller in self._callers:
                caller.close()
            self._selector.close()
        return self._joined

    def _turn(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data.fileno() >= 0:  # not shown out meanwhile, for one that came in this turn
                self._hear(key.data)

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError:  # gone before it was let in
            return
        if len(self._callers) == MOST_CALLERS:
            self._show_out(next(iter(self._callers)))
        caller.setblocking(False)
        self._callers[caller] = Frames(msgspec.msgpack.Decoder(Hello), LONGEST_HELLO)
        self._selector.register(caller, selectors.EVENT_READ, caller)

    def _hear(self, caller: socket.socket) -> None:
        try:
            data = caller.recv(LONGEST_HELLO)
        except OSError:
            data = b""
        if not data or caller not in self._callers:  # a rank says no more until it is assigned
            self._show_out(caller)
            return
        try:
            hellos = self._callers[caller].cut(data)
        except msgspec.DecodeError:
            _log.warning("somebody at the port for ranks is no rank of pdserve")
            self._show_out(caller)
            return
        if hellos:
            self._answer(caller, hellos[0])

    def _answer(self, caller: socket.socket, hello: Hello) -> None:
        objection = objection_to(hello, self._config)
        if not objection and hello.rank in self._joined:
            objection = f"rank {hello.rank} is there already"
        elif not objection and hello.rank not in self._missing:
            objection = f"rank {hello.rank} runs on the leader's host; others are {_names(self._missing)}"
        try:
            caller.sendall(framed(Rejected(objection) if objection else Welcome()))
        except OSError:
            objection = objection or "it has gone"
        if objection:
            _log.warning("a rank was rejected: %s", objection)
            self._show_out(caller)
            return
        del self._callers[caller]
        set_timeouts(caller, self._config.peer_timing)
        self._joined[hello.rank] = hello, caller
        _log.info("rank %d has come", hello.rank)

    def _show_out(self, caller: socket.socket) -> None:
        self._callers.pop(caller, None)
        for rank, (_, sock) in list(self._joined.items()):
            if sock is caller:
                del self._joined[rank]
        self._selector.unregister(caller)
        caller.close()


def objection_to(hello: Hello, config: NodeConfig) -> str:
    """Why a rank cannot be one of this node's, with the values of both; empty if it can."""
    for what, there, here in (
        ("pdserve", hello.version, version("pdserve")),
        ("split", _describe(hello.split), _describe(config.split)),
        ("device", hello.device.kind, config.device.kind),
    ):
        if there != here:
            return f"{what}: {there} there, {here} at the leader"
    if hello.compat_hash != compat_hash(config.compat_fields):
        return "; ".join(
            f"{name}: {hello.compat_fields.get(name)} there, {config.compat_fields.get(name)} at the leader"
            for name in sorted({*hello.compat_fields, *config.compat_fields})
            if hello.compat_fields.get(name) != config.compat_fields.get(name)
        )
    return ""


def _describe(split: ParallelConfig) -> str:
    shared = " and shared MLPs" if split.shared_mlps else ""
    return f"stages of {','.join(map(str, split.stage_layers))} layers with tp {split.tp}{shared}"


def _names(ranks: range) -> str:
    return ", ".join(map(str, ranks))


# ---------------------------------------------------------------- the ranks


def hello_of(config: NodeConfig, rank: int, device: DeviceInfo, threads: int) -> Hello:
    """What a rank on this host says of itself."""
    return Hello(
        rank=rank,
        split=config.split,
        version=version("pdserve"),
        compat_hash=compat_hash(config.compat_fields),
        compat_fields=config.compat_fields,
        device=device,
        model_dir=config.model_dir,
        threads=threads,
    )


def dial(address: str, seconds: float = GATHER_SECONDS) -> socket.socket:
    """A connection to the leader, as soon as it is there. Raises NodeError when it does not come."""
    host_port, end = split_address(address), time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(host_port, timeout=_ANSWER_SECONDS)
        except OSError as exc:
            if time.monotonic() + _DIAL_AGAIN > end:
                reason = exc.strerror or str(exc)
                raise NodeError(
                    f"no leader at {address} for {seconds:.0f} s ({reason}); start the node's rank 0 there, "
                    "with the same --leader"
                ) from exc
        time.sleep(_DIAL_AGAIN)


def join(sock: socket.socket, hello: Hello, timing: PeerTiming) -> None:
    """Say who we are. Raises ConfigError with the leader's reason if it does not want us."""
    sock.settimeout(_ANSWER_SECONDS)
    try:
        sock.sendall(framed(hello))
        (length,) = FRAME_HEADER.unpack(_receive(sock, FRAME_HEADER.size))
        answer = msgspec.msgpack.decode(_receive(sock, min(length, LONGEST_HELLO)), type=Welcome | Rejected)
    except (OSError, EOFError, msgspec.DecodeError) as exc:
        reason = str(exc) or "it hung up"
        raise NodeError(f"whoever listens at the leader's address does not answer as one: {reason}") from exc
    if isinstance(answer, Rejected):
        raise ConfigError(f"the leader does not take rank {hello.rank}: {answer.reason}")
    sock.settimeout(None)
    set_timeouts(sock, timing)


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    """No byte more: what follows is for somebody else. Raises EOFError."""
    data = b""
    while len(data) < num_bytes:
        more = sock.recv(num_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data
