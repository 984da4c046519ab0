"""Sums of requests that a node's reports do not include yet, against plain sums."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.kv.groups import blocks_for
from router.fleet.unreported import SentRequest, UnreportedRequests

SHAPES = (((None,), 16), ((None,), 128), ((None, 512), 16))
REQUESTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 5000), st.booleans(), st.sampled_from(SHAPES)),
    max_size=30,
)


@given(REQUESTS, st.integers(0, 40))
def test_sums_are_those_of_the_requests(requests: list[tuple[int, int, int, bool, object]], dropped: int) -> None:
    unreported = UnreportedRequests()
    sent: list[SentRequest] = []
    now = 0
    for later, uncached, tokens, for_peer, shape in requests:
        now += later
        sent.append(SentRequest(float(now), uncached, tokens, for_peer))
        unreported.add(sent[-1])
        unreported.drop_before(float(now - dropped))
        sent = [request for request in sent if request.at >= now - dropped]
        assert isinstance(shape, tuple)
        windows, block_size = shape
        assert len(unreported) == len(sent)
        assert unreported.uncached_tokens == sum(request.uncached_tokens for request in sent)
        assert unreported.for_peers == sum(request.for_peer for request in sent)
        expected = sum(blocks_for(windows, request.num_tokens, block_size) for request in sent)
        assert unreported.blocks(windows, block_size) == expected
