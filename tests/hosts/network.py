"""Several hosts on one machine: network namespaces with an address each, cabled to a switch (switch.py).

    root namespace (pytest)          hub: the switch
                                      h1│    h2│    h3│          a veth pair for each host
                                    eth0│  eth0│  eth0│
                                   10.77.0.1  .2     .3

Every host has a /32 address and a default route by a gateway that is not there, as pods have with Calico. The root
namespace has no way in: nothing of a host can reach the outside, nor does a node outside see the hosts' devices.
Programs on a host have UTS, IPC, PID and mount namespaces of their own, too, as in a container: what one machine's
processes share by other ways than the network, such as UCX's shared memory, ends there.
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
from switch import LOST, Host, Orders, Seen

_PREFIX = "pds"  # of namespaces' names: pds-<pid of pytest>-<number>-<host>
_GATEWAY, _GATEWAY_MAC = "169.254.1.1", "02:00:00:00:ff:ff"
_SWITCH = Path(__file__).with_name("switch.py")

#: $1 is the host's folder, with its /etc/hosts and what else it sees; $2 its name; then the program.
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
    """Skip the test where this process may not make hosts."""
    missing = [name for name in ("ip", "ss", "unshare", "setpriv") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} are not here; Debian has them in iproute2 and util-linux")
    _sweep()
    trial = f"{_PREFIX}-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    _ip("netns", "delete", trial)


class Network:
    """Leaving it as a context manager ends all programs on all hosts, and the hosts.

    ``folder`` gets a folder for each host.
    """

    def __init__(self, folder: Path) -> None:
        self._name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._folder = folder
        self._orders = Orders()
        self._next = 1  # device of the switch, and last byte of an address
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
            program.kill()  # unshare takes its child along, which is the first process of its namespace
        for program in self._programs:
            program.wait()
        for pipe in (self._switch.stdin, self._switch.stdout):
            assert pipe is not None
            pipe.close()
        self._switch.wait()
        for name in ("hub", *(host.name for host in self._orders.hosts)):
            _ip("netns", "delete", self._namespace(name))

    # ------------------------------------------------------------ hosts

    @property
    def names(self) -> list[str]:
        return [host.name for host in self._orders.hosts]

    def add(self, name: str) -> Host:
        """One more host. It knows no name before ``name_hosts``."""
        device, namespace = f"h{self._next}", self._namespace(name)
        host = Host(name, f"10.77.{self._next >> 8}.{self._next & 255}", device, f"02:00:00:00:00:{self._next:02x}")
        self._next += 1
        _ip("netns", "add", namespace)
        self._orders.hosts.append(host)
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
        self.order()
        folder = self.folder(name)
        folder.mkdir(parents=True)
        (folder / "hosts").touch()
        (folder / "resolv.conf").touch()  # no name server: every other name is unknown, at once
        return host

    def remove(self, name: str) -> None:
        """Its programs have ended."""
        self._orders.hosts = [host for host in self._orders.hosts if host.name != name]
        self.order()
        _ip("netns", "delete", self._namespace(name))
        shutil.rmtree(self.folder(name))

    def folder(self, name: str) -> Path:
        """``hosts`` in it is the host's /etc/hosts, and what is in ``run`` its /run when a program starts."""
        return self._folder / name

    def address(self, name: str) -> str:
        return next(host.address for host in self._orders.hosts if host.name == name)

    def name_hosts(self, table: Sequence[tuple[str, str]]) -> None:
        """Let all hosts know names: (address, name)."""
        text = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in table)
        for name in self.names:
            (self.folder(name) / "hosts").write_text(text)  # in place, since it is mounted

    def start(
        self, name: str, argv: Sequence[str], environ: dict[str, str], output: IO[bytes], fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """A program on a host; it keeps ``fds``. What is returned is ``unshare``, which ends with it: ``first_process``
        is the program itself.
        """
        words = ["ip", "netns", "exec", self._namespace(name), "setpriv", "--pdeathsig", "KILL"]  # whatever ends pytest
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
        """What a short command says on a host."""
        words = ["ip", "netns", "exec", self._namespace(name), *argv]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    # ------------------------------------------------------------ links

    def cut(self, ones: Iterable[str], others: Iterable[str], both_ways: bool = True) -> None:
        """Lose, silently, what ``ones`` send to ``others``, and the other way round."""
        self.delay(ones, others, LOST, both_ways)

    def delay(self, ones: Iterable[str], others: Iterable[str], seconds: float, both_ways: bool = True) -> None:
        for one, other in itertools.product(ones, list(others)):
            self._orders.links[f"{one} {other}"] = seconds
            if both_ways:
                self._orders.links[f"{other} {one}"] = seconds
        self.order()

    def unplug(self, name: str) -> None:
        """Its network card sees that the cable is out."""
        self._plug(name, "down")

    def heal(self) -> None:
        """All links of all hosts."""
        self._orders.links.clear()
        for name in self.names:
            self._plug(name, "up")
        self.order()

    def allow(self, rules: list[tuple[str, str, int, int]] | None) -> None:
        """Let only these connections be opened: (from, to, first port, last port); None: all."""
        self._orders.allowed = rules
        self.order()

    def order(self) -> Seen:
        """Have the switch know what holds; returns when it does, with what it has seen."""
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(msgspec.json.encode(self._orders) + b"\n")
        self._switch.stdin.flush()
        answer = self._switch.stdout.readline()
        assert answer, f"the switch has ended, status {self._switch.wait()}"
        return msgspec.json.decode(answer, type=Seen)

    def _plug(self, name: str, state: str) -> None:
        device = next(host.device for host in self._orders.hosts if host.name == name)
        _ip("-n", self._namespace("hub"), "link", "set", device, state)

    def _namespace(self, host: str) -> str:
        return f"{self._name}-{host}"


def first_process(program: subprocess.Popen[bytes]) -> psutil.Process:
    """The program that was started: the first process of its namespace, which ``unshare`` waits for."""
    (found,) = psutil.Process(program.pid).children()
    return found


def _sweep() -> None:
    """Remove what runs that were killed have left."""
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
