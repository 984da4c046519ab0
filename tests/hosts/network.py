"""Several hosts on one machine: network namespaces with one address each, connected to a switch (switch.py).

    root namespace (pytest)          hub: the switch
                                      h1│    h2│    h3│          a veth pair for each host
                                    eth0│  eth0│  eth0│
                                   10.77.0.1  .2     .3

Every host has a /32 address and a default route through a gateway that does not exist, as pods have with Calico. The
root namespace is not connected: hosts cannot reach it, and its processes do not see the hosts' devices. Programs on a
host also have their own UTS, IPC, PID and mount namespaces, as in a container. So processes on different hosts share
nothing but the network, for example no shared memory of UCX.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec
import psutil
import pytest
from switch import DROPPED, Host, SwitchConfig, SwitchReport

_PREFIX = "pds"  # namespaces are named pds-<pid of pytest>-<number>-<host>
_GATEWAY = "169.254.1.1"
_GATEWAY_MAC = "02:00:00:00:ff:ff"
_SWITCH = Path(__file__).with_name("switch.py")

#: $1 is the host's folder, with its /etc/hosts and other files; $2 its name; then the program.
_BOOT = """
hostname "$2"
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
mount -t tmpfs -o size=256m tmpfs /dev/shm
mount -t tmpfs tmpfs /run
[ ! -d "$1/run" ] || cp -r "$1/run/." /run
shift 2
exec "$@"
"""
_numbers = itertools.count()


def require_namespaces() -> None:
    """Skip the test if this process cannot create network namespaces."""
    missing = [name for name in ("ip", "ss", "unshare", "setpriv") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found; install iproute2 and util-linux")
    _remove_stale_namespaces()
    trial = f"{_PREFIX}-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot create network namespaces: {made.stderr.strip()}")
    _ip("netns", "delete", trial)


class Network:
    """The hosts and their switch. Leaving the context ends all programs and removes all hosts.

    ``folder`` gets one folder per host.
    """

    def __init__(self, folder: Path) -> None:
        self._name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._folder = folder
        self._config = SwitchConfig()
        self._next = 1  # number of the next host: its switch device, address and MAC
        self._programs: list[subprocess.Popen[bytes]] = []
        _ip("netns", "add", self._namespace("hub"))
        try:
            self._switch = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace("hub"), sys.executable, str(_SWITCH)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except BaseException:
            _ip("netns", "delete", self._namespace("hub"))
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        for program in self._programs:
            program.kill()  # unshare also kills its child, the first process of the PID namespace
        for program in self._programs:
            program.wait()
        for pipe in (self._switch.stdin, self._switch.stdout):
            assert pipe is not None
            pipe.close()
        self._switch.wait()
        for name in ("hub", *(host.name for host in self._config.hosts)):
            _ip("netns", "delete", self._namespace(name))

    # ------------------------------------------------------------ hosts

    @property
    def names(self) -> list[str]:
        return [host.name for host in self._config.hosts]

    def add(self, name: str) -> Host:
        """Add a host. It can resolve names only after ``write_hosts_files``."""
        device = f"h{self._next}"
        namespace = self._namespace(name)
        host = Host(name, f"10.77.{self._next >> 8}.{self._next & 255}", device, f"02:00:00:00:00:{self._next:02x}")
        self._next += 1
        _ip("netns", "add", namespace)
        self._config.hosts.append(host)
        _ip(*f"link add eth0 address {host.mac} netns {namespace} type veth peer name {device}".split(),
            "netns", self._namespace("hub"))  # fmt: skip
        for words in (
            f"-n {self._namespace('hub')} link set {device} up",
            f"-n {namespace} link set lo up",
            f"-n {namespace} address add {host.address}/32 dev eth0",
            f"-n {namespace} link set eth0 up",
            f"-n {namespace} route add {_GATEWAY} dev eth0 scope link",
            f"-n {namespace} route add default via {_GATEWAY} dev eth0",
            f"-n {namespace} neighbor add {_GATEWAY} lladdr {_GATEWAY_MAC} dev eth0 nud permanent",
        ):
            _ip(*words.split())
        self.update_switch()
        folder = self.folder(name)
        folder.mkdir(parents=True)
        (folder / "hosts").touch()
        (folder / "resolv.conf").touch()  # without a name server, other names fail immediately
        return host

    def remove(self, name: str) -> None:
        """Remove a host whose programs have ended."""
        self._config.hosts = [host for host in self._config.hosts if host.name != name]
        self.update_switch()
        _ip("netns", "delete", self._namespace(name))
        shutil.rmtree(self.folder(name))

    def folder(self, name: str) -> Path:
        """Return the host's folder: ``hosts`` is its /etc/hosts; ``run`` is copied to /run when a program starts."""
        return self._folder / name

    def address(self, name: str) -> str:
        return next(host.address for host in self._config.hosts if host.name == name)

    def write_hosts_files(self, table: Sequence[tuple[str, str]]) -> None:
        """Write (address, names) to /etc/hosts of all hosts."""
        text = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in table)
        for name in self.names:
            (self.folder(name) / "hosts").write_text(text)  # in place, because it is bind-mounted

    def start(
        self, name: str, argv: Sequence[str], environ: dict[str, str], output: IO[bytes], fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host; it inherits ``fds``.

        The returned process is ``unshare``, which ends with the program; ``first_process`` returns the program.
        """
        words = ["ip", "netns", "exec", self._namespace(name), "setpriv", "--pdeathsig", "KILL"]  # ends with pytest
        words += ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]
        program = subprocess.Popen(
            [*words, _BOOT, "sh", str(self.folder(name)), name, *argv],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            start_new_session=True,
        )
        self._programs.append(program)
        return program

    def run(self, name: str, *argv: str) -> str:
        """Return the output of a short command on a host."""
        words = ["ip", "netns", "exec", self._namespace(name), *argv]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    # ------------------------------------------------------------ links

    def partition(self, ones: Iterable[str], others: Iterable[str], both_ways: bool = True) -> None:
        """Drop all packets from ``ones`` to ``others`` silently, and by default also the other way."""
        self.delay(ones, others, DROPPED, both_ways)

    def delay(self, ones: Iterable[str], others: Iterable[str], seconds: float, both_ways: bool = True) -> None:
        for one, other in itertools.product(ones, list(others)):
            self._config.links[f"{one} {other}"] = seconds
            if both_ways:
                self._config.links[f"{other} {one}"] = seconds
        self.update_switch()

    def unplug(self, name: str) -> None:
        """Set a host's link down; its network device sees this."""
        self._set_link(name, "down")

    def heal(self) -> None:
        """Restore all links of all hosts."""
        self._config.links.clear()
        for name in self.names:
            self._set_link(name, "up")
        self.update_switch()

    def allow(self, rules: list[tuple[str, str, int, int]] | None) -> None:
        """Allow new connections only by these rules, (from, to, first port, last port); None allows all."""
        self._config.allowed = rules
        self.update_switch()

    def update_switch(self) -> SwitchReport:
        """Send the configuration to the switch, wait until it is in effect, and return the switch's report."""
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(msgspec.json.encode(self._config) + b"\n")
        self._switch.stdin.flush()
        answer = self._switch.stdout.readline()
        assert answer, f"the switch ended with status {self._switch.wait()}"
        return msgspec.json.decode(answer, type=SwitchReport)

    def _set_link(self, name: str, state: str) -> None:
        device = next(host.device for host in self._config.hosts if host.name == name)
        _ip("-n", self._namespace("hub"), "link", "set", device, state)

    def _namespace(self, host: str) -> str:
        return f"{self._name}-{host}"


def first_process(program: subprocess.Popen[bytes]) -> psutil.Process:
    """Return a started program: the first process of its PID namespace, and the child of ``unshare``."""
    (child,) = psutil.Process(program.pid).children()
    return child


def _remove_stale_namespaces() -> None:
    """Remove the namespaces and processes of test runs that were killed."""
    names = [line.split()[0] for line in _ip("netns", "list").splitlines()]
    for name in names:
        prefix, _, rest = name.partition("-")
        owner = rest.partition("-")[0]
        if prefix != _PREFIX or not owner.isdecimal() or psutil.pid_exists(int(owner)):
            continue
        for pid in _ip("netns", "pids", name).split():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()
        _ip("netns", "delete", name)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
