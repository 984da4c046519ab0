"""Children that print a lot, ignore SIGTERM, have children of their own, or lose their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from machine import patience

from cli.up.supervisor import Changed, Child, Died, Event, Printed, Supervisor

CHILD = """
import argparse, os, signal, subprocess, sys, time
from pdserve.errors import ConfigError
from pdserve.host.process import StatusWriter, watch_lifeline
parser = argparse.ArgumentParser()
parser.add_argument("what")
parser.add_argument("--status-fd", type=int)
parser.add_argument("--lifeline-fd", type=int)
args = parser.parse_args()
status = StatusWriter(args.status_fd)
if args.what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen(["sleep", "100"])
    print("grandchild", grandchild.pid, flush=True)
elif args.what == "fails":
    status.failed(ConfigError("the disk is on fire; buy another"))
    sys.exit(2)
elif args.what == "crashes":
    print("a first line")
    raise ValueError("an unexpected error")
elif args.what == "talks":
    for _ in range(20000):
        print("x" * 100)
else:
    watch_lifeline(args.lifeline_fd)
status.listening("127.0.0.1:1234")
status.loading("weights", 0.5)
status.ready()
time.sleep(100)
"""


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    (tmp_path / "a_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return Supervisor()


def events_until(supervisor: Supervisor, child: Child, state: str) -> list[Event]:
    events: list[Event] = []
    end = time.monotonic() + patience(30)
    while child.state != state:
        assert time.monotonic() < end, f"{child.name} is {child.state}, not {state}"
        events += supervisor.wait(0.1)
    return events


def test_status_lines_become_states(supervisor: Supervisor) -> None:
    with supervisor:
        child = supervisor.spawn("one", "a_child", ["plain"])
        events = events_until(supervisor, child, "ready")
        assert Changed(child) in events
        assert child.address == "127.0.0.1:1234"
    assert child.process.returncode is not None


def test_error_of_a_dead_child_has_its_last_line(supervisor: Supervisor) -> None:
    with supervisor:
        failing = supervisor.spawn("failing", "a_child", ["fails"])
        crashing = supervisor.spawn("crashing", "a_child", ["crashes"])
        assert Died(failing) in events_until(supervisor, failing, "ended")
        events_until(supervisor, crashing, "ended")
    assert failing.last_error == "the disk is on fire; buy another"
    assert failing.process.returncode == 2
    assert crashing.last_error == "ValueError: an unexpected error"


def test_all_child_output_is_relayed(supervisor: Supervisor) -> None:
    with supervisor:
        child = supervisor.spawn("talking", "a_child", ["talks"])
        events = events_until(supervisor, child, "ready")
        while sum(isinstance(event, Printed) for event in events) < 20000:
            events += supervisor.wait(1.0)


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_stop_kills_children_that_ignore_signals_and_their_children(supervisor: Supervisor) -> None:
    with supervisor:
        children = [supervisor.spawn(f"c{index}", "a_child", ["stubborn"]) for index in range(2)]
        events: list[Event] = []
        for child in children:
            events += events_until(supervisor, child, "ready")
        while len(pids := [int(event.text.split()[1]) for event in events if isinstance(event, Printed)]) < 2:
            events += supervisor.wait(1.0)  # a child's output and status use different pipes
    assert all(child.process.returncode is not None for child in children)
    while not all(has_ended(pid) for pid in pids):  # SIGKILL was sent, but takes effect when the kernel gets to it
        time.sleep(0.01)


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "a_child.py").write_text(CHILD)
    parent = (
        "from cli.up.supervisor import Supervisor\n"
        "s = Supervisor(); c = s.spawn('c', 'a_child', ['plain'])\n"
        "while c.state != 'ready': s.wait(0.1)\n"
        "print(c.process.pid, flush=True)\n"
        "import time; time.sleep(100)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
    child.wait(patience(10))
    assert not child.is_running()


def test_supervisor_closes_all_file_descriptors(supervisor: Supervisor) -> None:
    before = psutil.Process().num_fds()
    with supervisor:
        for index in range(3):
            events_until(supervisor, supervisor.spawn(f"c{index}", "a_child", ["fails"]), "ended")
    assert psutil.Process().num_fds() <= before
