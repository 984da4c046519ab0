"""Offers of weights by a peer that lies: whatever contradicts the checkpoint, or is too much, is a PeerError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.weights.peers import ReceivedOffer
from pdserve.errors import PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.weights.sharing import StoredSize, cover, find_tensors

SIZES = {
    "a": StoredSize((4, 6), 48),
    "b": StoredSize((10,), 20),
    "scalar": StoredSize((), 2),
    "none": StoredSize((0, 3), 0),
}
HUGE = 1 << 62


def tensor(
    name: str = "a", address: int = 1 << 40, num_bytes: int = 48, dim: int = 0, start: int = 0, size: int = 4
) -> pb.OfferedTensor:
    return pb.OfferedTensor(name=name, address=address, num_bytes=num_bytes, dim=dim, start=start, size=size)


def message(
    *tensors: pb.OfferedTensor, agent: str = "r0", metadata: bytes = b"m", device: str = "cpu", device_id: int = 0
) -> pb.OfferedWeights:
    return pb.OfferedWeights(agent=agent, metadata=metadata, device=device, device_id=device_id, tensors=tensors)


def receive(messages: Iterator[pb.OfferedWeights]) -> ReceivedOffer:
    offer = ReceivedOffer("peer:1", SIZES)
    for offered in messages:
        offer.add(offered)
    return offer


ENDLESS: dict[str, Callable[[], Iterator[pb.OfferedWeights]]] = {
    "ranks": lambda: (message(tensor(), agent=str(number)) for number in count()),
    "ranks with metadata": lambda: (
        message(tensor(), agent=str(number), metadata=bytes(4 << 20)) for number in count()
    ),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_an_endless_offer_is_refused(case: str) -> None:
    with pytest.raises(PeerError, match="the limit is"):
        receive(ENDLESS[case]())


WRONG = {
    "2^62 bytes": message(tensor(num_bytes=HUGE)),
    "2^62 bytes in proportion": message(tensor(num_bytes=HUGE, size=HUGE // 12)),
    "no bytes": message(tensor(num_bytes=0)),
    "no size": message(tensor(size=0, num_bytes=0)),
    "beyond the end": message(tensor(start=1)),
    "start of 2^62": message(tensor(start=HUGE)),
    "another dimension": message(tensor(dim=2)),
    "dimension of a scalar": message(tensor(name="scalar", num_bytes=2, size=1)),
    "an empty tensor": message(tensor(name="none", num_bytes=0, size=1)),
    "address 0": message(tensor(address=0)),
    "the last address": message(tensor(address=(1 << 64) - 1)),
    "an end that wraps": message(tensor(address=(1 << 63) - 8)),
    "nothing": message(),
    "a tensor twice": message(tensor(), tensor()),
    "unknown tensor": message(tensor(name="c")),
    "long name": message(tensor(name="c" * 100_000)),
    "no agent": message(agent=""),
    "long agent": message(agent="a" * 100_000),
    "another kind of device": message(device="tpu"),
    "device 2^32 - 1": message(device_id=(1 << 32) - 1),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_offer_that_contradicts_the_checkpoint_is_refused(case: str) -> None:
    with pytest.raises(PeerError, match="peer:1") as caught:
        receive(iter([WRONG[case]]))
    assert len(str(caught.value)) < 500


def test_messages_of_ranks_are_put_together() -> None:
    lower = tensor(num_bytes=24, size=2)
    upper = tensor(num_bytes=24, start=2, size=2)
    b = tensor(name="b", num_bytes=20, size=10)
    peer = receive(iter([message(lower), message(b, metadata=b""), message(upper, agent="r1", metadata=b"n")])).peer()
    assert [(rank.agent, rank.metadata, len(rank.parts)) for rank in peer.ranks] == [("r0", b"m", 2), ("r1", b"n", 1)]
    assert len(cover(find_tensors(peer)["a"], *SIZES["a"])) == 2


numbers = st.one_of(st.integers(0, 12), st.sampled_from([24, 48, HUGE, (1 << 64) - 1]))
tensors = st.builds(tensor, st.sampled_from(list(SIZES)), numbers, numbers, st.integers(0, 2), numbers, numbers)


@given(st.lists(tensors, max_size=6))
def test_reads_of_an_accepted_offer_fill_a_tensor_exactly(parts: list[pb.OfferedTensor]) -> None:
    offer = ReceivedOffer("peer:1", SIZES)
    for number, part in enumerate(parts):
        try:
            offer.add(message(part, agent=f"r{number}"))
        except PeerError:
            return
    for name, tensor_parts in find_tensors(offer.peer()).items():
        at = 0
        for read in cover(tensor_parts, *SIZES[name]):
            assert read.offset == at
            at += read.part.num_bytes
        assert at in (0, SIZES[name].num_bytes)
