"""Whether an engine counts as alive, by its beats and the front's own time."""

from __future__ import annotations

from engine.messages import Beat
from engine.pulse import Pulse

PATIENCE = 2.0
NAP = 0.02


def listen(pulse: Pulse, seconds: float) -> None:
    for _ in range(round(seconds / NAP)):
        pulse.pass_time(NAP)


def test_silence_is_trouble_until_the_next_beat() -> None:
    pulse = Pulse(PATIENCE)
    listen(pulse, PATIENCE * 0.9)
    assert not pulse.trouble
    listen(pulse, PATIENCE * 0.2)
    assert "no sign of life for 2 s" in pulse.trouble
    pulse.beat(Beat(0.0, 0.0, 0.0))
    assert not pulse.trouble


def test_time_in_which_the_front_was_stopped_does_not_count() -> None:
    pulse = Pulse(PATIENCE)
    listen(pulse, PATIENCE * 0.5)
    pulse.pass_time(3600.0)
    assert not pulse.trouble


def test_a_step_without_end_is_trouble_though_the_process_lives() -> None:
    pulse = Pulse(PATIENCE)
    pulse.beat(Beat(0.0, 0.0, 60.0))
    assert not pulse.trouble, "large steps on slow machines are none"
    pulse.beat(Beat(0.0, 0.0, 121.0))
    assert "in one step for 121 s" in pulse.trouble
    pulse.beat(Beat(0.0, 0.0, 0.0))
    assert not pulse.trouble
