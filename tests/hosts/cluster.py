"""An overlay's pods on hosts of their own (network.py), as Kubernetes would start them.

    client ──► router ──► decode-0, decode-1 ──► prefill-0, prefill-1        machine: the kubelet, and these tests
                  └─────► api: EndpointSlices                                prometheus: reads metrics of nodes

Arguments and environment are those of the built manifests, names and network policies as well: the switch refuses what
these do not allow. What the machine lacks is replaced, and nothing else:

    the image                        this checkout, and the Python that runs it
    $(MODEL)                         a small checkpoint
    --device=cuda                    --device=cpu, with a small cache and one thread
    --require-transport=rdma         left out: KV goes over TCP
    files of Secrets, /etc/pdserve   files made here
    cluster DNS                      /etc/hosts on each host, with the names of headless Services and of pods
    the Service of the routers       a name that leads to one of them

A pod that is started again gets another address, as in a cluster.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import trustme
from certificates import write_https, write_identity
from network import Network, first_process
from overlays import headless_services, pods
from policies import NAMESPACE, Party, open_ports
from running_pod import RunningPod

from pdserve.api_keys import key_entry, new_key
from pdserve.rpc.tls import PeerTls

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PORTS = {"router": 8000, "prefill": 9001, "decode": 9002}
API_PORT = 6443
SMALL = ("--device=cpu", "--threads=1", "--kv-cache-memory=64MiB")
SERVICE = "pdserve"  # of the routers, for clients
ROUTERS = ("router-0", "router-1")  # of which one runs, and the other one takes over
SPARE = ROUTERS[1]
START_SECONDS = 90.0
OUTSIDE = {"client": "", "machine": "", "api": "", "prometheus": "monitoring"}  # other hosts: namespaces, of pods
METRICS_PORT = 9003


class Cluster:
    """Started by entering it as a context manager; leaving it ends everything."""

    network: Network

    def __init__(self, overlay: str, folder: Path, checkpoint: Path) -> None:
        self.pods: dict[str, RunningPod] = {}
        self.url = ""  # for clients
        self._overlay = overlay
        self._folder = folder
        self._checkpoint = checkpoint
        self._key = new_key()
        self.ca = trustme.CA()  # of all servers, and of the peers' certificates
        self._secrets = folder / "secrets"
        self._service = ROUTERS[0]  # where clients are led to
        self._doors: list[tuple[str, str, socket.socket]] = []  # host that it is on, target, socket
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            self.network = stack.enter_context(Network(self._folder))
            for name in OUTSIDE:
                self.network.add(name)
            self._write_secrets()
            self._find_pods(stack)
            self._start_outside(stack)
            for name in self.pods:
                if name != SPARE:
                    self.start(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------ what is there

    def of(self, role: str) -> list[RunningPod]:
        """Those that run."""
        return [pod for pod in self.pods.values() if pod.role == role and pod.program is not None]

    @property
    def running(self) -> list[RunningPod]:
        return [*self.of("router"), *self.nodes]

    @property
    def nodes(self) -> list[RunningPod]:
        return [*self.of("prefill"), *self.of("decode")]

    @property
    def model(self) -> str:
        return self.pods[SPARE].kind.environment["MODEL_NAME"]

    @property
    def headers(self) -> dict[str, str]:
        """Of a client's requests."""
        return {"Authorization": f"Bearer {self._key}"}

    def wait_until(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not condition():
            for pod in self.running:
                assert pod.program is not None
                status = pod.program.poll()
                assert status is None, f"{pod.name} has ended with {status}:\n{pod.log.read_text()[-2000:]}"
            assert time.monotonic() < end, f"not within {seconds} s"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        """Until all pods are, routers know of all nodes, and every D is connected to every P."""
        for pod in (*self.nodes, *self.of("router")):  # routers are ready once they are told of ready nodes
            self.wait_serving(pod)
        self.wait_connected()

    def wait_connected(self, seconds: float = START_SECONDS) -> None:
        names = {pod.name for pod in self.of("prefill")}
        self.wait_until(lambda: all({*d.describe().connected_peers} == names for d in self.of("decode")), seconds)

    def here(self, words: list[str]) -> list[str]:
        """Of a command, with the files of Secrets where they are."""
        return [word.replace("/etc/pdserve", str(self._secrets)) for word in words]

    # ------------------------------------------------------------ pods

    def start(self, name: str) -> None:
        """On a host of its own, as soon as there is one."""
        pod = self.pods[name]
        self.network.add(name)
        self.network.allow(list(self.allowed()))
        environ = pod.kind.environment_of(name, self.network.address(name)) | {
            "MODEL": str(self._checkpoint),
            "KUBERNETES_SERVICE_HOST": self.network.address("api"),
            "KUBERNETES_SERVICE_PORT": str(API_PORT),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
        }
        if pod.role == "router":
            account = self.network.folder(name) / "run/secrets/kubernetes.io/serviceaccount"
            account.mkdir(parents=True)
            (account / "token").write_text("a token")
            self.ca.cert_pem.write_to_path(account / "ca.crt")
        self._name_all()
        argv = [sys.executable, "-P", "-m", "pdserve", *self._arguments_here(pod.kind.arguments_in(environ))]
        with pod.log.open("ab") as log:
            pod.program = self.network.start(name, argv, environ, log)

    def stop(self, name: str) -> None:
        """As Kubernetes ends a pod: EndpointSlices first, preStop if it has one, SIGTERM to the container's first
        process. It has to end well, within its grace period. Its host is gone afterwards.
        """
        pod = self.pods[name]
        assert pod.program is not None
        pod.ready = False
        self.publish()
        started = time.monotonic()
        if "lifecycle" in pod.kind.container:
            time.sleep(pod.kind.container["lifecycle"]["preStop"]["sleep"]["seconds"])
        first_process(pod.program).send_signal(signal.SIGTERM)
        left = pod.kind.spec["terminationGracePeriodSeconds"] - (time.monotonic() - started)
        status = pod.program.wait(left)
        assert status == 0, f"{name} has ended with {status}:\n{pod.log.read_text()[-2000:]}"
        pod.program = None
        self.network.remove(name)

    def restart(self, name: str) -> None:
        """As a StatefulSet does in a rolling update. The pod is ready again, at another address."""
        self.stop(name)
        self.start(name)
        self.wait_serving(self.pods[name])

    def replace_router(self) -> None:
        """As a Deployment does: the new one is there before the old one ends."""
        (old,) = self.of("router")
        new = next(name for name in ROUTERS if name != old.name)
        self.start(new)
        self.wait_serving(self.pods[new])
        self.lead_to(new)
        self.stop(old.name)

    def wait_serving(self, pod: RunningPod) -> None:
        self.wait_until(pod.serves)
        pod.ready = True
        self.publish()

    def publish(self) -> None:
        """Have EndpointSlices say which nodes are ready."""
        slices = []
        for role in ("prefill", "decode"):
            endpoints = [
                {"addresses": [self.network.address(pod.name)], "conditions": {"ready": pod.ready}}
                for pod in self.of(role)
            ]
            labels = {"kubernetes.io/service-name": role}
            ports = [{"name": "grpc", "port": PORTS[role]}]
            slices.append({"metadata": {"name": role, "labels": labels}, "endpoints": endpoints, "ports": ports})
        _replace(self.network.folder("api") / "slices.json", json.dumps(slices))

    def lead_to(self, name: str) -> None:
        """Let new connections of clients go to this router."""
        self._service = name
        self._name_all()

    # ------------------------------------------------------------ policies

    def party(self, name: str) -> Party:
        return Party(self.pods[name].kind.labels, NAMESPACE) if name in self.pods else Party({}, OUTSIDE[name])

    def allowed(self) -> Iterator[tuple[str, str, int, int]]:
        """Connections that the overlay's policies let through: (from, to, first port, last port).

        The kubelet on its own machine reaches every pod, whatever they say.
        """
        names = self.network.names
        for source in names:
            for target in names:
                if source == "machine":
                    yield source, target, 1, 65535
                elif source != target:
                    for ports in open_ports(self._overlay, self.party(source), self.party(target)):
                        yield source, target, ports.start, ports.stop - 1

    # ------------------------------------------------------------ its parts

    def _find_pods(self, stack: ExitStack) -> None:
        kinds = sorted(pods(self._overlay), key=lambda pod: pod.role, reverse=True)  # router, prefill, decode
        tls = PeerTls(str(self._secrets / "peers")) if kinds[0].flags("grpc-tls") else None
        for kind in kinds:
            names = ROUTERS if kind.role == "router" else [f"{kind.name}-{index}" for index in range(kind.replicas)]
            for name in names:
                door = self._new_door(stack, "machine", f"{name}:{PORTS[kind.role]}")
                port = PORTS["router"] if kind.role == "router" else METRICS_PORT
                metrics = self._new_door(stack, "prometheus", f"{name}:{port}")
                self.pods[name] = RunningPod(kind, name, door, metrics, self._folder / f"{name}.log", tls)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://" + self._new_door(stack, "client", f"{SERVICE}:{PORTS['router']}")

    def _new_door(self, stack: ExitStack, host: str, target: str) -> str:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._doors.append((host, target, listener))
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def _write_secrets(self) -> None:
        (self._secrets / "keys").mkdir(parents=True)
        (self._secrets / "keys/keys.toml").write_text(key_entry("client", self._key))
        write_identity(self._secrets / "peers", self.ca)
        (self._secrets / "https").mkdir()
        write_https(self._secrets / "https/tls.crt", self._secrets / "https/tls.key", self.ca)

    def _start_outside(self, stack: ExitStack) -> None:
        """The doors and the API server."""
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        log = stack.enter_context((self._folder / "outside.log").open("wb"))
        api = self.network.folder("api")
        certificate = self.ca.issue_cert(self.network.address("api"))
        certificate.private_key_and_cert_chain_pem.write_to_path(api / "tls.pem")
        self.publish()
        self.network.start("api", [sys.executable, str(HERE / "api_server.py"), str(API_PORT), str(api)], environ, log)
        for host in ("client", "machine", "prometheus"):
            doors = [(listener, target) for on, target, listener in self._doors if on == host]
            words = [f"{listener.fileno()}={target}" for listener, target in doors]
            fds = [listener.fileno() for listener, _ in doors]
            self.network.start(host, [sys.executable, str(HERE / "door.py"), *words], environ, log, fds)

    def _name_all(self) -> None:
        table = []
        for pod in self.pods.values():
            if pod.name in self.network.names:  # also those that are about to start
                names = [pod.name, *headless_services(self._overlay, pod.kind)]
                names += [SERVICE] if pod.name == self._service else []
                table.append((self.network.address(pod.name), " ".join(names)))
        self.network.name_hosts(table)

    def _arguments_here(self, arguments: list[str]) -> list[str]:
        """A container's arguments for this machine (see above)."""
        lacking = ("--device=", "--require-transport=")
        words = [word for word in arguments if not word.startswith(lacking)]
        return [*self.here(words), *(() if words[0] == "router" else SMALL)]


def _replace(path: Path, text: str) -> None:
    """So that nobody reads half of it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)
