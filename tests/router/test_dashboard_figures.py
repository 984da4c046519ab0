"""Quantiles and rates over windows of samples."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.metrics import FastHistogram, labels_of, quantile, series, subdivided
from pdserve.pb import pdserve_pb2 as pb
from router.dashboard.node_rates import (
    NAMES,
    ExposedLatency,
    NodeHistory,
    Reader,
    live_reads,
    parse_status,
    sum_handoffs,
)
from router.dashboard.traffic_log import TrafficLog, TrafficSample

BOUNDS = (0.001, 0.01, 0.1, 1.0)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_quantile_is_exact_to_a_fine_bucket(values: list[float], share: float) -> None:
    histogram = FastHistogram("x", "", BOUNDS)
    for value in values:
        histogram.observe(value)
    estimate = quantile(histogram.fine_bounds, histogram.counts, share)
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    assert estimate is not None
    assert estimate / exact < 10 ** (1 / 8) * 1.001 or estimate <= 0.001
    assert exact / estimate < 10 ** (1 / 8) * 1.001 or exact <= 0.001


def test_quantiles_without_samples_and_beyond_all_bounds() -> None:
    assert quantile(BOUNDS, [0] * 5, 0.5) is None
    assert quantile(BOUNDS, [0, 0, 0, 0, 3], 0.5) == 1.0
    assert quantile(BOUNDS, [4, 0, 0, 0, 0], 0.5) == pytest.approx(0.0005)


def test_exported_buckets_are_the_given_ones() -> None:
    histogram = FastHistogram("x_seconds", "", BOUNDS)
    for value in (0.001, 0.0011, 0.05, 0.1, 5.0):
        histogram.observe(value)
    (family,) = histogram.collect()
    buckets = [(s.labels["le"], s.value) for s in family.samples if s.name == "x_seconds_bucket"]
    assert buckets == [("0.001", 1), ("0.01", 2), ("0.1", 4), ("1.0", 4), ("+Inf", 5)]
    assert set(BOUNDS) < set(subdivided(BOUNDS, 8))


def sample(second: float, requests: int, tokens: int, itl: tuple[int, ...] = (0, 0, 0)) -> TrafficSample:
    return TrafficSample(
        at=100 + second,
        running=3,
        waiting=1,
        outcomes={"ok": requests, "node_error": requests // 2},
        prompt_tokens=10 * requests,
        cached_tokens=5 * requests,
        ttft=(tokens, 0, 0),
        itl=itl,
        kv_prefill=None,
        kv_decode=0.5,
    )


def test_rates_cover_ten_seconds_and_counts_a_minute() -> None:
    log = TrafficLog((0.1, 1.0), (0.1, 1.0))
    for second in range(100):
        log.add(second, sample(second, 2 * min(second, 80), 8 * second))
    traffic = log.traffic()  # the last requests ended 19 s ago
    assert (traffic.running, traffic.waiting) == (3, 1)
    assert traffic.request_rate == traffic.failure_rate == traffic.prompt_token_rate == 0.0
    assert traffic.output_token_rate == pytest.approx(8)
    assert traffic.outcomes == {"ok": 82, "node_error": 41}
    assert traffic.cached_share == pytest.approx(0.5)
    assert traffic.itl.p50 is None
    assert traffic.ttft.p50 == pytest.approx(0.05)


def test_history_holds_five_minutes() -> None:
    log = TrafficLog((0.1, 1.0), (0.1, 1.0))
    for second in range(400):
        log.add(second, sample(second, 2 * second, 8 * second, (0, second, 0)))
    history = log.history()
    assert history.seconds == list(range(100, 400))
    assert history.requests[-1] == pytest.approx(3)
    assert history.failures[-1] == pytest.approx(1)
    assert history.output_tokens[-1] == pytest.approx(9)
    assert history.itl_p50[-1] == pytest.approx(0.55)
    assert (history.kv_prefill[-1], history.kv_decode[-1]) == (None, 0.5)
    assert log.history(after=397).seconds == [398, 399]
    assert log.history(after=399).seconds == []


def test_history_ends_with_the_latest_figures_and_bursts_make_no_teeth() -> None:
    """Six requests end each third second: 2 per second, in the tile and in the chart."""
    log = TrafficLog((0.1, 1.0), (0.1, 1.0))
    for second in range(100):
        ended = 6 * (second // 3)
        log.add(second, sample(second, ended, 8 * second, (0, ended, second)))
        traffic = log.traffic()
        history = log.history()
        latest = (history.requests[-1], history.failures[-1], history.output_tokens[-1])
        assert latest == (traffic.request_rate, traffic.failure_rate, traffic.output_token_rate)
        assert (history.ttft_p50[-1], history.ttft_p99[-1]) == (traffic.ttft.p50, traffic.ttft.p99)
        assert (history.itl_p50[-1], history.itl_p99[-1]) == (traffic.itl.p50, traffic.itl.p99)
    assert max(history.requests[20:]) < 1.5 * min(history.requests[20:])


@given(st.dictionaries(st.from_regex(r"[a-z]\w{0,8}", fullmatch=True), st.text(max_size=20), max_size=3))
def test_labels_survive_a_round_trip(labels: dict[str, str]) -> None:
    assert labels_of(series("pdserve_a_total", **labels)) == labels


def status(reads: int, peer: str = 'p"1\\', handoffs: int = 0, connected: bool = True) -> pb.NodeStatus:
    counters = {
        "pdserve_sampled_tokens_total": 100.0 * reads,
        "pdserve_admitted_prompt_tokens_total": 10.0 * reads,
        "pdserve_prefix_cached_tokens_total": 4.0 * reads,
        "pdserve_host_kv_hit_tokens_total": 3.0 * reads,
        "pdserve_pulled_tokens_total": 2.0 * reads,
        "pdserve_spec_decode_num_drafts_total": 20.0 * reads,
        "pdserve_spec_decode_num_draft_tokens_total": 60.0 * reads,
        "pdserve_spec_decode_num_accepted_tokens_total": 30.0 * reads,
        "pdserve_images_encoded_total": 3.0 * reads,
        "pdserve_image_cache_hits_total": 1.0 * reads,
        "pdserve_handoffs_total": float(handoffs),
        series("pdserve_kv_read_bytes_total", peer=peer): 1e9 * reads,
        series("pdserve_kv_read_seconds_total", peer=peer): 0.5 * reads,
        series("pdserve_peer_connected", peer=peer, transport="shm" if connected else "none"): float(connected),
        series("pdserve_handoff_exposed_seconds_bucket", le="0.01"): float(handoffs),
        series("pdserve_handoff_exposed_seconds_bucket", le="0.1"): float(2 * handoffs),
        series("pdserve_handoff_exposed_seconds_bucket", le="+Inf"): float(2 * handoffs),
    }
    return pb.NodeStatus(leased_blocks=7, counters=counters)


def test_every_counter_in_use_is_documented() -> None:
    table = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert {name for name in NAMES if f"| `{name}` |" not in table} == set()


def test_two_status_samples_give_rates() -> None:
    history = NodeHistory()
    exposed = ExposedLatency()
    for second in range(21):
        exposed.add(second, history.add(parse_status(second, "e", status(2 * second, handoffs=second))))
    stats = history.stats()
    assert stats.output_token_rate == pytest.approx(200)
    assert stats.cached_share == pytest.approx(0.4)
    assert stats.host_share == pytest.approx(0.3)
    assert stats.pulled_share == pytest.approx(0.2)
    assert stats.tokens_per_drafted_decode == pytest.approx(2.5)
    assert stats.acceptance == pytest.approx(0.5)
    assert stats.image_rate == pytest.approx(8)
    assert stats.encoded_share == pytest.approx(0.75)
    assert stats.leased_blocks == 7
    (connection,) = history.connections("d", {'p"1\\': "p-one"})
    assert (connection.prefill, connection.decode, connection.transport) == ("p-one", "d", "shm")
    assert connection.byte_rate == pytest.approx(2e9)
    assert connection.throughput == pytest.approx(2e9)
    handoffs = sum_handoffs([history], [connection], exposed.quantiles())
    assert handoffs.rate == pytest.approx(1)
    assert handoffs.total == 20
    assert handoffs.exposed.p50 == pytest.approx(0.01)
    assert handoffs.exposed.p99 == pytest.approx(0.0982)


def test_connections_of_prefill_nodes_are_shown_while_they_pull() -> None:
    def reading(reads: int, peer: str) -> NodeHistory:
        history = NodeHistory()
        for second in range(2):
            history.add(parse_status(second, "e", status(second * reads, peer)))
        return history

    readers = [
        Reader("decode", "d", reading(1, "a:1")),
        Reader("prefill", "p", reading(2, "a:2")),
        Reader("prefill", "idle", reading(0, "a:2")),
    ]
    handoffs, connections = live_reads(readers, {"a:1": "p", "a:2": "d"}, ExposedLatency().quantiles())
    assert [(connection.prefill, connection.decode) for connection in connections] == [("d", "p"), ("p", "d")]
    assert handoffs is not None
    assert handoffs.byte_rate == pytest.approx(1e9), "pulls are no handoffs"
    assert live_reads(readers[1:], {}, ExposedLatency().quantiles())[0] is None


def test_another_epoch_resets_the_history() -> None:
    history = NodeHistory()
    history.add(parse_status(1.0, "first", status(50, handoffs=50)))
    assert not history.has_rates
    assert set(history.add(parse_status(2.0, "second", status(1, handoffs=1))).values()) == {0.0}
    assert not history.has_rates
    history.add(parse_status(3.0, "second", status(2, connected=False)))
    (connection,) = history.connections("d", {})
    assert (connection.prefill, connection.transport) == ('p"1\\', "none")
    assert history.rate("sampled_tokens") == pytest.approx(100)


def test_sum_handoffs_more_than_a_minute_ago_are_forgotten() -> None:
    exposed = ExposedLatency()
    exposed.add(0.0, {0.01: 1.0, inf: 1.0})
    assert exposed.quantiles().p50 == pytest.approx(0.005)
    exposed.add(61.0, {0.01: 0.0, inf: 0.0})
    assert exposed.quantiles().p50 is None
