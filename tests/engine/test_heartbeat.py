"""Whether an engine counts as alive, by its beats and the front's own time."""

from __future__ import annotations

from engine.ipc.messages import Heartbeat
from engine.liveness.heartbeat_monitor import HeartbeatMonitor

PATIENCE = 2.0
NAP = 0.02


def listen(monitor: HeartbeatMonitor, seconds: float) -> None:
    for _ in range(round(seconds / NAP)):
        monitor.pass_time(NAP)


def test_silence_is_trouble_until_the_next_beat() -> None:
    monitor = HeartbeatMonitor(PATIENCE)
    listen(monitor, PATIENCE * 0.9)
    assert not monitor.trouble
    listen(monitor, PATIENCE * 0.2)
    assert "sent no heartbeat for 2 s" in monitor.trouble
    monitor.receive(Heartbeat(0.0, 0.0, 0.0))
    assert not monitor.trouble


def test_time_in_which_the_front_was_stopped_does_not_count() -> None:
    monitor = HeartbeatMonitor(PATIENCE)
    listen(monitor, PATIENCE * 0.5)
    monitor.pass_time(3600.0)
    assert not monitor.trouble


def test_a_step_without_end_is_trouble_though_the_process_lives() -> None:
    monitor = HeartbeatMonitor(PATIENCE)
    monitor.receive(Heartbeat(0.0, 0.0, 60.0))
    assert not monitor.trouble, "large steps on slow machines are none"
    monitor.receive(Heartbeat(0.0, 0.0, 121.0))
    assert "in one step for 121 s" in monitor.trouble
    monitor.receive(Heartbeat(0.0, 0.0, 0.0))
    assert not monitor.trouble


def test_other_ranks_are_named_once_they_are_silent_or_waited_for_long() -> None:
    monitor = HeartbeatMonitor(PATIENCE)
    monitor.receive(Heartbeat(0.0, 0.0, 0.0, silent_ranks="rank 1 is silent"))
    assert monitor.trouble == "rank 1 is silent"
    monitor.receive(Heartbeat(0.0, 0.0, 0.1, waiting_for="rank 1 has not ended step 7"))
    assert (monitor.trouble, monitor.waiting_for) == ("", "")
    monitor.receive(Heartbeat(0.0, 0.0, 0.1, waiting_for="rank 1 has not ended step 8"))
    assert monitor.waiting_for == "", "steps go on"
    monitor.receive(Heartbeat(0.0, 0.0, 121.0, waiting_for="rank 1 has not ended step 8"))
    assert monitor.trouble == "the engine has been in one step for 121 s: rank 1 has not ended step 8"
    monitor.receive(Heartbeat(0.0, 0.0, 0.0))
    assert (monitor.trouble, monitor.waiting_for) == ("", "")
