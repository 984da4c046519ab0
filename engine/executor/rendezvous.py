"""How ranks on other hosts join their leader: they connect and send a Hello, which the leader accepts or rejects.

    leader   listen ──► gather: until every missing rank has sent a Hello that matches
    rank     connect_leader (retries until it listens) ──► join: Welcome, or Rejected with the reason

The port is open until all ranks have joined. Other programs that connect are disconnected: they can neither delay the
leader nor occupy a rank's slot.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time

import msgspec

from engine.executor.rank_messages import MAX_HELLO_BYTES, Hello, Rejected, Welcome
from pdserve import __version__
from pdserve.config.compatibility import compat_hash, differences
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.parallel import ParallelConfig
from pdserve.config.runner_oracle import VARIABLE
from pdserve.errors import CapacityError, ConfigError, NodeError
from pdserve.ipc.frames import FRAME_HEADER, Frames, framed
from pdserve.logs import LimitedWarnings
from pdserve.rpc.address import split_address
from pdserve.rpc.timeouts import PeerTiming

_log = logging.getLogger(__name__)
_log.addFilter(LimitedWarnings())  # any program may connect

MAX_PENDING = 64  # connections without a Hello; one more replaces the oldest
_RETRY_SECONDS = 0.5
_ANSWER_SECONDS = 10.0

JoinedRank = tuple[Hello, socket.socket]


def set_timeouts(sock: socket.socket, timing: PeerTiming) -> None:
    """Detect a host that has gone without closing its connections; send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, int(timing.probe_after))  # TCP takes whole seconds
    for option, value in (
        (socket.TCP_KEEPIDLE, probe),
        (socket.TCP_KEEPINTVL, probe),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, int(timing.timeout * 1000)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


# ---------------------------------------------------------------- the leader


def listen(address: str, seconds: float = 0.0) -> socket.socket:
    """Listen at ``address``. Raises CapacityError.

    A name that does not resolve yet, or not to this host, is tried again for ``seconds``: the name of a pod is
    known some time after the pod has started.
    """
    host, port = split_address(address)
    end = time.monotonic() + seconds
    warned = False
    while True:
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(where[:2], family=family, backlog=MAX_PENDING)
        except OSError as exc:
            late = isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL
            if not late or time.monotonic() + _RETRY_SECONDS > end:
                raise CapacityError(
                    f"cannot listen on {address} for the ranks of other hosts: {exc.strerror}; "
                    "give --leader an address of this host and a free port"
                ) from exc
            if not warned:
                _log.warning("%s is no address of this host yet (%s); trying again", address, exc.strerror)
            warned = True
        time.sleep(_RETRY_SECONDS)


class Rendezvous:
    """Gathers the ranks of other hosts."""

    def __init__(self, listener: socket.socket, config: NodeConfig, missing: range) -> None:
        self._listener = listener
        self._config = config
        self._missing = missing
        self._joined: dict[int, JoinedRank] = {}
        self._pending: dict[socket.socket, Frames[Hello]] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def gather(self, seconds: float) -> dict[int, JoinedRank]:
        """Return all missing ranks, by rank. Raises NodeError that names those that have not joined."""
        end = time.monotonic() + seconds
        try:
            while len(self._joined) < len(self._missing):
                if (left := end - time.monotonic()) <= 0:
                    absent = ", ".join(str(rank) for rank in self._missing if rank not in self._joined)
                    raise NodeError(
                        f"ranks {absent} of this node have not joined within {seconds:.3g} s; "
                        "start each of them with the same --leader"
                    )
                self._poll(left)
        except NodeError:
            for _, sock in self._joined.values():
                sock.close()
            raise
        finally:
            for sock in self._pending:
                sock.close()
            self._selector.close()
        return self._joined

    def _poll(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data.fileno() >= 0:  # else it was replaced by a connection accepted in this loop
                self._read(key.data)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the connection has ended already
            return
        if len(self._pending) == MAX_PENDING:
            self._disconnect(next(iter(self._pending)))
        sock.setblocking(False)
        self._pending[sock] = Frames(Hello, MAX_HELLO_BYTES)
        self._selector.register(sock, selectors.EVENT_READ, sock)

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(MAX_HELLO_BYTES)
        except OSError:
            data = b""
        if not data or sock not in self._pending:  # a joined rank sends nothing until it is assigned
            self._disconnect(sock)
            return
        try:
            hellos = self._pending[sock].cut(data)
        except msgspec.DecodeError:
            _log.warning("a connection to the --leader port is no rank of pdserve; it is closed")
            self._disconnect(sock)
            return
        if hellos:
            self._answer(sock, hellos[0])

    def _answer(self, sock: socket.socket, hello: Hello) -> None:
        problem = find_mismatch(hello, self._config)
        if not problem and hello.rank in self._joined:
            problem = f"rank {hello.rank} has joined already"
        elif not problem and hello.rank not in self._missing:
            others = ", ".join(map(str, self._missing))
            problem = f"rank {hello.rank} is not one of the ranks on other hosts, which are {others}"
        try:
            sock.sendall(framed(Rejected(problem) if problem else Welcome()))
        except OSError:
            problem = problem or "its connection has ended"
        if problem:
            _log.warning("a rank was rejected: %s", problem)
            self._disconnect(sock)
            return
        del self._pending[sock]
        set_timeouts(sock, self._config.options.peer_timing)
        self._joined[hello.rank] = hello, sock
        _log.info("rank %d has joined", hello.rank)

    def _disconnect(self, sock: socket.socket) -> None:
        self._pending.pop(sock, None)
        for rank, (_, joined) in list(self._joined.items()):
            if joined is sock:
                del self._joined[rank]
        self._selector.unregister(sock)
        sock.close()


def find_mismatch(hello: Hello, config: NodeConfig) -> str:
    """Describe why a rank cannot belong to this node, with both values; empty if it can."""
    for name, there, here in (
        ("pdserve", hello.version, __version__),
        ("parallel sizes", _describe(hello.parallel), _describe(config.parallel)),
        ("device", hello.device.kind, config.device.kind),
    ):
        if there != here:
            return f"{name}: {there} there, {here} at the leader"
    forced = config.decision.forced_runner
    if hello.forced_runner not in ("", forced):  # a host without the variable follows the leader
        return (
            f"{VARIABLE} forces {hello.forced_runner} there, {forced or 'nothing'} at the leader; set it on all hosts"
        )
    if hello.compat_hash != compat_hash(config.compat_fields):
        return differences(hello.compat_fields, config.compat_fields, "there", "at the leader")
    return ""


def _describe(parallel: ParallelConfig) -> str:
    experts = f", ep {parallel.ep}" if parallel.ep > 1 else ""
    return f"stages of {','.join(map(str, parallel.stage_layers))} layers with tp {parallel.tp}{experts}"


# ---------------------------------------------------------------- the ranks


def make_hello(config: NodeConfig, rank: int, device: DeviceInfo, threads: int) -> Hello:
    return Hello(
        rank=rank,
        parallel=config.parallel,
        version=__version__,
        compat_hash=compat_hash(config.compat_fields),
        compat_fields=config.compat_fields,
        device=device,
        model_dir=config.model_dir,
        draft_dir=config.draft_dir,
        threads=threads,
        host=socket.gethostname(),
        triton_problem=config.triton_problem,
        flashinfer_problem=config.flashinfer_problem,
        forced_runner=config.decision.forced_runner,
    )


def connect_leader(address: str, seconds: float) -> socket.socket:
    """Connect as soon as the leader listens. Raises NodeError when it does not within ``seconds``."""
    host_port = split_address(address)
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(host_port, timeout=_ANSWER_SECONDS)
        except OSError as exc:
            if time.monotonic() + _RETRY_SECONDS > end:
                reason = exc.strerror or str(exc)
                raise NodeError(
                    f"no leader at {address} for {seconds:.0f} s ({reason}); start the node's rank 0 there, "
                    "with the same --leader"
                ) from exc
        time.sleep(_RETRY_SECONDS)


def join(sock: socket.socket, hello: Hello, timing: PeerTiming) -> None:
    """Send Hello and wait for the answer. Raises ConfigError with the leader's reason for a rejection."""
    sock.settimeout(_ANSWER_SECONDS)
    try:
        sock.sendall(framed(hello))
        (length,) = FRAME_HEADER.unpack(_receive(sock, FRAME_HEADER.size))
        answer = msgspec.msgpack.decode(_receive(sock, min(length, MAX_HELLO_BYTES)), type=Welcome | Rejected)
    except (OSError, EOFError, msgspec.DecodeError) as exc:
        reason = str(exc) or "it closed the connection"
        raise NodeError(f"the leader's address does not answer as a leader: {reason}; check --leader") from exc
    if isinstance(answer, Rejected):
        raise ConfigError(f"the leader rejects rank {hello.rank}: {answer.reason}")
    sock.settimeout(None)
    set_timeouts(sock, timing)


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly ``num_bytes``: the bytes behind belong to the rank process. Raises EOFError."""
    data = b""
    while len(data) < num_bytes:
        more = sock.recv(num_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data
