"""Liveness of an engine, by its heartbeats and the time of the monitoring process."""

from __future__ import annotations

import math

from pdserve.ipc.heartbeat_monitor import HeartbeatMonitor
from pdserve.ipc.messages import Heartbeat

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


def beat(monitor: HeartbeatMonitor, seconds: float, heartbeat: Heartbeat) -> None:
    """Let time pass with heartbeats."""
    for _ in range(round(seconds / INTERVAL)):
        monitor.receive(heartbeat)
        monitor.pass_time(INTERVAL)


def test_a_command_that_is_not_taken_between_two_steps_is_trouble() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)
    monitor.sent()
    beat(monitor, 60.0, Heartbeat(0.0, 0.0, 0.0, num_taken=1))
    assert not monitor.trouble, "nothing is to be taken"
    monitor.sent()
    monitor.sent()
    beat(monitor, 3.5, Heartbeat(0.0, 0.0, 0.0, num_taken=1))
    assert not monitor.trouble
    beat(monitor, 1.0, Heartbeat(0.0, 0.0, 0.0, num_taken=1))
    assert "has taken no command for 4 s between two steps" in monitor.trouble
    beat(monitor, INTERVAL, Heartbeat(0.0, 0.0, 0.0, num_taken=2))
    assert not monitor.trouble


def test_a_command_that_waits_for_a_step_is_no_trouble() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)
    monitor.sent()
    beat(monitor, 60.0, Heartbeat(0.0, 0.0, 7.0))
    beat(monitor, INTERVAL, Heartbeat(0.0, 0.0, 0.0))
    assert not monitor.trouble


def test_a_new_process_has_no_commands_of_the_one_before() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)
    for _ in range(5):
        monitor.sent()
    beat(monitor, 3.0, Heartbeat(0.0, 0.0, 0.0, num_taken=2))
    monitor.restart()
    monitor.sent()
    beat(monitor, 60.0, Heartbeat(0.0, 0.0, 0.0, num_taken=1))
    assert not monitor.trouble
    monitor.sent()
    beat(monitor, 5.0, Heartbeat(0.0, 0.0, 0.0, num_taken=1))
    assert monitor.trouble


def test_an_endless_step_is_trouble_despite_heartbeats() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)
    monitor.receive(Heartbeat(0.0, 0.0, 9.0, expected=0.5))
    assert not monitor.trouble, "a large step on a slow machine is none"
    monitor.receive(Heartbeat(0.0, 0.0, 7.9, expected=0.01))
    assert not monitor.trouble
    monitor.receive(Heartbeat(0.0, 0.0, 8.1, expected=0.01))
    assert "in one step for 8 s" in monitor.trouble
    monitor.receive(Heartbeat(0.0, 0.0, 60.0, expected=math.inf))
    assert not monitor.trouble, "kernels are compiled before the first step is measured"
    monitor.receive(Heartbeat(0.0, 0.0, 121.0, expected=math.inf))
    assert "in one step for 121 s" in monitor.trouble
    monitor.receive(Heartbeat(0.0, 0.0, 0.0))
    assert not monitor.trouble


def test_a_long_step_stalls_only_beyond_the_timeout_and_many_times_the_expected_time() -> None:
    monitor = HeartbeatMonitor(TIMEOUT)

    def stalled(seconds: float, expected: float) -> bool:
        monitor.receive(Heartbeat(0.0, 0.0, seconds, expected=expected))
        return monitor.stalled

    assert not stalled(3.9, 0.01), "shorter than --peer-timeout, which is twice the longest silence"
    assert stalled(4.1, 0.01)
    assert stalled(4.1, 0.4)
    assert not stalled(4.1, 0.5), "a slow machine"
    assert not stalled(4.1, math.inf), "kernels are compiled before the first step is measured"
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
