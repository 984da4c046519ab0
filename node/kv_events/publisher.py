"""The sockets of KV events, and the thread that encodes and sends."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence

import zmq

from node.cache_listener import CacheListener
from node.kv_events.event_log import EventLog, GroupKind
from node.kv_events.options import KVEventOptions
from node.kv_events.replays import Replays, encode_number
from pdserve.errors import CapacityError, ConfigError
from pdserve.host.process import log_failure
from pdserve.ipc.cache_changes import CacheChanges

_log = logging.getLogger(__name__)

_UNSENT_BATCHES = 1_000  # per subscriber, 64 MiB; it loses further batches until it asks for a replay
_MESSAGE_BYTES = 4096  # largest frame from a client: a subscription, or a request for a replay
_REQUESTS = 16  # unread requests per connection


class KVEventPublisher(CacheListener):
    """Owns the sockets. ``publish`` and ``clear`` return at once; a thread encodes and sends."""

    listens = True

    def __init__(self, options: KVEventOptions, kinds: Sequence[GroupKind], block_size: int) -> None:
        """Bind the sockets, before a model loads. Raises CapacityError for a port in use, ConfigError otherwise."""
        self._topic = options.topic.encode()
        self._adapter_names: dict[str, str] = {}  # by digest
        self._event_log = EventLog(
            kinds, block_size, options.as_maps, name_of=lambda digest: self._adapter_names.get(digest, digest)
        )
        self._changes: deque[CacheChanges] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = self._failed = False
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._publisher = self._socket(zmq.PUB)
            self._publisher.setsockopt(zmq.SNDHWM, _UNSENT_BATCHES)
            _bind(self._publisher, options.endpoint, "--kv-events-endpoint")
            self._replays: Replays | None = None
            if options.replay_endpoint:
                replays = self._socket(zmq.ROUTER)
                replays.setsockopt(zmq.RCVHWM, _REQUESTS)
                self._replays = Replays(replays, self._event_log)
                _bind(replays, options.replay_endpoint, "--kv-events-replay-endpoint")
        except BaseException:
            self._close_sockets()
            raise
        self.endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets]
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)

    @property
    def num_batches(self) -> int:
        """Batches published since the start."""
        return self._event_log.next_number

    def start(self) -> None:
        self._thread.start()
        _log.info("KV events at %s with topic %s", " and ".join(self.endpoints), self._topic.decode())

    def publish(self, changes: CacheChanges) -> None:
        if not self._failed:
            self._changes.append(changes)
            os.eventfd_write(self._wake_fd, 1)

    def name_adapter(self, digest: str, name: str) -> None:
        self._adapter_names[digest] = name

    def clear(self) -> None:
        self.publish(CacheChanges(cleared=True, removed=[], stored=[]))

    def close(self) -> None:
        """Send what is left, and close the sockets. Idempotent."""
        if self._ended:
            return
        self._ended = True
        if self._thread.is_alive():
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
        self._close_sockets()
        os.close(self._wake_fd)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)  # a longer one ends its connection
        return socket

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as exc:
            self._failed = True
            log_failure(_log, exc)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays.socket, zmq.POLLIN)
        pause = None
        while not self._ended:
            ready = dict(poller.poll(pause))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            while self._changes:
                for number, payload in self._event_log.add(self._changes.popleft()):
                    message = [self._topic, encode_number(number), payload]
                    self._publisher.send_multipart(message)  # a PUB socket never blocks
            if self._replays is not None:
                pause = self._replays.advance()


def _bind(socket: zmq.Socket[bytes], endpoint: str, flag: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise CapacityError(f"{flag} {endpoint}: the port is in use; choose another one") from exc
        text = f"{flag} {endpoint!r}: {exc.strerror}; write tcp://*:PORT, tcp://ADDRESS:PORT or ipc:///PATH"
        raise ConfigError(text) from exc
