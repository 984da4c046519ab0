"""Whether an engine counts as alive, by its beats and the front's own time."""

from __future__ import annotations

from engine.ipc.messages import Beat
from engine.liveness.heartbeat_monitor import HeartbeatMonitor

PATIENCE = 2.0
NAP = 0.02


def listen(pulse: HeartbeatMonitor, seconds: float) -> None:
    for _ in range(round(seconds / NAP)):
        pulse.pass_time(NAP)


def test_silence_is_trouble_until_the_next_beat() -> None:
    pulse = HeartbeatMonitor(PATIENCE)
    listen(pulse, PATIENCE * 0.9)
    assert not pulse.trouble
    listen(pulse, PATIENCE * 0.2)
    assert "no sign of life for 2 s" in pulse.trouble
    pulse.beat(Beat(0.0, 0.0, 0.0))
    assert not pulse.trouble


def test_time_in_which_the_front_was_stopped_does_not_count() -> None:
    pulse = HeartbeatMonitor(PATIENCE)
    listen(pulse, PATIENCE * 0.5)
    pulse.pass_time(3600.0)
    assert not pulse.trouble


def test_a_step_without_end_is_trouble_though_the_process_lives() -> None:
    pulse = HeartbeatMonitor(PATIENCE)
    pulse.beat(Beat(0.0, 0.0, 60.0))
    assert not pulse.trouble, "large steps on slow machines are none"
    pulse.beat(Beat(0.0, 0.0, 121.0))
    assert "in one step for 121 s" in pulse.trouble
    pulse.beat(Beat(0.0, 0.0, 0.0))
    assert not pulse.trouble


def test_other_ranks_are_named_once_they_are_silent_or_waited_for_long() -> None:
    pulse = HeartbeatMonitor(PATIENCE)
    pulse.beat(Beat(0.0, 0.0, 0.0, silent="rank 1 is silent"))
    assert pulse.trouble == "rank 1 is silent"
    pulse.beat(Beat(0.0, 0.0, 0.1, waits_for="rank 1 has not ended step 7"))
    assert (pulse.trouble, pulse.waits_for) == ("", "")
    pulse.beat(Beat(0.0, 0.0, 0.1, waits_for="rank 1 has not ended step 8"))
    assert pulse.waits_for == "", "steps go on"
    pulse.beat(Beat(0.0, 0.0, 121.0, waits_for="rank 1 has not ended step 8"))
    assert pulse.trouble == "the engine has been in one step for 121 s: rank 1 has not ended step 8"
    pulse.beat(Beat(0.0, 0.0, 0.0))
    assert (pulse.trouble, pulse.waits_for) == ("", "")
