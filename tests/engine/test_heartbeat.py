"""Liveness of an engine, by its heartbeats and the time of the monitoring process."""

from __future__ import annotations

from engine.ipc.messages import Heartbeat
from engine.liveness.heartbeat_monitor import HeartbeatMonitor

TIMEOUT = 2.0
INTERVAL = 0.02


def stay_silent(monitor: HeartbeatMonitor, seconds: float) -> None:
    for _ in range(round(seconds / INTERVAL)):
        monitor.pass_time(INTERVAL)


def test_silence_is_trouble_until_the_next_heartbeat() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)
    stay_silent(monitor, TIMEOUT * 0.9)
    assert not monitor.trouble
    stay_silent(monitor, TIMEOUT * 0.2)
    assert "sent no heartbeat for 2 s" in monitor.trouble
    monitor.receive(Heartbeat(0.0, 0.0, 0.0))
    assert not monitor.trouble


def test_time_in_which_the_monitoring_process_was_stopped_is_no_silence() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)
    stay_silent(monitor, TIMEOUT * 0.5)
    monitor.pass_time(3600.0)
    assert not monitor.trouble


def test_an_endless_step_is_trouble_despite_heartbeats() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)
    monitor.receive(Heartbeat(0.0, 0.0, 60.0))
    assert not monitor.trouble, "a large step on a slow machine is none"
    monitor.receive(Heartbeat(0.0, 0.0, 121.0))
    assert "in one step for 121 s" in monitor.trouble
    monitor.receive(Heartbeat(0.0, 0.0, 0.0))
    assert not monitor.trouble


def test_a_long_step_stalls_only_beyond_the_timeout_and_many_measured_steps() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)
    monitor.receive(Heartbeat(0.0, 0.0, 3.9))
    assert not monitor.stalled(0.01), "shorter than --peer-timeout, which is twice the longest silence"
    monitor.receive(Heartbeat(0.0, 0.0, 4.1))
    assert monitor.stalled(0.01)
    assert monitor.stalled(0.4)
    assert not monitor.stalled(0.5), "a slow machine"
    assert not monitor.stalled(0.0), "kernels are compiled before the first step is measured"
    assert not monitor.trouble, "the node stays ready"


def test_silent_ranks_and_ranks_waited_for_long_are_named() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)
    monitor.receive(Heartbeat(0.0, 0.0, 0.0, silent_ranks="rank 1 is silent"))
    assert monitor.trouble == "rank 1 is silent"
    monitor.receive(Heartbeat(0.0, 0.0, 0.1, waiting_for="rank 1 has not ended step 7"))
    assert (monitor.trouble, monitor.waiting_for) == ("", "")
    monitor.receive(Heartbeat(0.0, 0.0, 0.1, waiting_for="rank 1 has not ended step 8"))
    assert monitor.waiting_for == "", "steps make progress"
    monitor.receive(Heartbeat(0.0, 0.0, 121.0, waiting_for="rank 1 has not ended step 8"))
    assert monitor.trouble == "the engine has been in one step for 121 s: rank 1 has not ended step 8"
    monitor.receive(Heartbeat(0.0, 0.0, 0.0))
    assert (monitor.trouble, monitor.waiting_for) == ("", "")
