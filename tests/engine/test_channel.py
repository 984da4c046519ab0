"""Frames between frontend and engine: complete, in order, without blocking; the end of the stream is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from engine.channel import Channel, ChannelClosed
from pdserve.ipc.frames import FRAME_HEADER, framed
from pdserve.ipc.messages import Cancel, EventBatch, FromEngine, Mode, OutputTokens, Ping, Status, Submit, Totals
from pdserve.sampling_params import SamplingParams

STATUS = Status(1, 0, 0, 0, 1, 0, 0, 0, Totals())


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_messages_split_anywhere_arrive_complete(ends: tuple[Channel, socket.socket]) -> None:
    channel, frontend = ends
    submit = Submit(7, b"\1\0\0\0" * 5, SamplingParams(max_tokens=3, logit_bias={4: 1.5}), Mode.LEASE)
    data = framed(submit) + framed(Cancel(7))
    received = []
    for start in range(0, len(data), 11):
        frontend.sendall(data[start : start + 11])
        received += channel.receive(None)
    assert received == [submit, Cancel(7)]
    assert channel.receive(0) == []


def test_send_never_blocks_if_the_frontend_does_not_read(ends: tuple[Channel, socket.socket]) -> None:
    channel, frontend = ends
    outputs = OutputTokens(list(range(1000)), [0] * 1000, [7] * 1000)
    for _ in range(200):
        channel.send(EventBatch(STATUS, outputs=outputs))
    received = bytearray()
    decoder = msgspec.msgpack.Decoder(FromEngine)
    for _ in range(200):
        while len(received) < 4 or len(received) < 4 + FRAME_HEADER.unpack_from(received)[0]:
            received += frontend.recv(1 << 20)
            channel.receive(0)
        end = 4 + FRAME_HEADER.unpack_from(received)[0]
        assert decoder.decode(received[4:end]) == EventBatch(STATUS, outputs=outputs)
        del received[:end]


def test_a_ping_ends_a_wait_and_is_only_counted(ends: tuple[Channel, socket.socket]) -> None:
    channel, frontend = ends
    frontend.sendall(framed(Ping()) + framed(Cancel(7)) + framed(Ping()))
    assert channel.receive(None) == [Cancel(7)]
    assert channel.num_received == 3


def test_wake_ends_a_wait(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    threading.Timer(0.05, channel.wake).start()
    assert channel.receive(None) == []


def test_end_of_the_frontend_closes_the_channel(ends: tuple[Channel, socket.socket]) -> None:
    channel, frontend = ends
    frontend.close()
    with pytest.raises(ChannelClosed):
        channel.receive(None)
