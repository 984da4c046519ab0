"""The pods of an overlay, each on its own host (network.py), started as Kubernetes would start them.

    client ──► router ──► decode-0, decode-1 ──► prefill-0, prefill-1        machine: the kubelet, and these tests
                  └─────► api: EndpointSlices                                prometheus: reads metrics of nodes

Arguments, environment, names and network policies are those of the built manifests; the switch drops connections that
the policies do not allow. Only what this machine lacks is replaced:

    the image                        this checkout, and the Python that runs it
    $(MODEL)                         a small checkpoint
    --device=cuda                    --device=cpu, with a small cache and one thread
    --require-transport=rdma         left out: KV is read over TCP
    files of Secrets, /etc/pdserve   files written by these tests
    cluster DNS                      /etc/hosts on each host, with the names of headless Services and of pods
    the Service of the routers       a host name for one of the routers
    --tp, --local-ranks              1: a pod of a LeaderWorkerSet runs one rank

A restarted pod gets another address, as in a cluster.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import trustme
from certificates import write_https, write_identity
from machine import patience
from network import Network, first_process
from overlays import headless_services, pods
from policies import NAMESPACE, Endpoint, open_ports
from running_pod import RunningPod

from pdserve.rpc.tls import PeerTls
from router.gate.api_keys import key_entry, new_key

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PORTS = {"router": 8000, "prefill": 9001, "decode": 9002}
API_PORT = 6443
SMALL = ("--device=cpu", "--threads=1", "--kv-cache-memory=64MiB")
SERVICE = "pdserve"  # name of the routers' Service
ROUTERS = ("router-0", "router-1")  # one of them runs; the other one replaces it
STANDBY = ROUTERS[1]
START_SECONDS = 90.0
#: Hosts beside the pods, with their namespaces; "" is outside the cluster.
OTHER_HOSTS = {"client": "", "machine": "", "api": "", "prometheus": "monitoring"}
METRICS_PORT = 9003


class Cluster:
    """Entering the context starts all pods but the standby router; leaving it ends all processes and hosts."""

    network: Network

    def __init__(self, overlay: str, folder: Path, checkpoint: Path, late: Sequence[str] = ()) -> None:
        """``late`` are roles whose pods do not start with the others."""
        self.late = late
        self.resolves_leaders = True  # leaders' names have addresses, as in the cluster's DNS at last
        self.pods: dict[str, RunningPod] = {}
        self.url = ""  # URL for clients
        self._overlay = overlay
        self._folder = folder
        self._checkpoint = checkpoint
        self._key = new_key()
        self.ca = trustme.CA()  # issues all certificates of servers and peers
        self._secrets = folder / "secrets"
        self._service = ROUTERS[0]  # the router behind the Service
        self._port_forwards: list[tuple[str, str, socket.socket]] = []  # (host, target, listening socket)
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            self.network = stack.enter_context(Network(self._folder))
            for name in OTHER_HOSTS:
                self.network.add(name)
            self._write_secrets()
            self._list_pods(stack)
            self._start_services(stack)
            for name, pod in self.pods.items():
                if name != STANDBY and pod.role not in self.late:
                    self.start(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------ state

    def running_pods(self, role: str) -> list[RunningPod]:
        """Return the running pods of a role."""
        return [pod for pod in self.pods.values() if pod.role == role and pod.program is not None]

    @property
    def running(self) -> list[RunningPod]:
        return [pod for pod in self.pods.values() if pod.program is not None]

    @property
    def nodes(self) -> list[RunningPod]:
        return [*self.running_pods("prefill"), *self.running_pods("decode")]

    @property
    def model(self) -> str:
        return self.pods[STANDBY].kind.environment["MODEL_NAME"]

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of a client's requests."""
        return {"Authorization": f"Bearer {self._key}"}

    def wait_until(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        end = time.monotonic() + patience(seconds)
        while not condition():
            for pod in self.running:
                assert pod.program is not None
                status = pod.program.poll()
                assert status is None, f"{pod.name} ended with status {status}:\n{pod.log.read_text()[-2000:]}"
            assert time.monotonic() < end, f"not within {seconds} s"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        """Wait until all pods are ready and every node is connected to the nodes that it reads from."""
        for pod in (*self.nodes, *self.running_pods("router")):  # a router becomes ready after the nodes
            self.wait_serving(pod)
        self.wait_connected()

    def wait_connected(self, seconds: float = START_SECONDS) -> None:
        self.wait_until(
            lambda: all({*pod.describe().connected_peers} == self._peers(pod) for pod in self.nodes), seconds
        )

    def _peers(self, pod: RunningPod) -> set[str]:
        """Return the running nodes that one reads from: D from P, and with --kv-source from all others."""
        read = self.nodes if pod.kind.flags("kv-source") else self.running_pods("prefill") * (pod.role == "decode")
        return {node.name for node in read} - {pod.name}

    def connected_prefills(self, pod: RunningPod) -> set[str]:
        """Return the P that a node is connected to."""
        return {*pod.describe().connected_peers} & {
            other.name for other in self.pods.values() if other.role == "prefill"
        }

    def with_local_secrets(self, words: list[str]) -> list[str]:
        """Return a command's words with the paths of Secrets on this machine."""
        return [word.replace("/etc/pdserve", str(self._secrets)) for word in words]

    # ------------------------------------------------------------ pods

    def start(self, name: str) -> None:
        """Add a host for the pod and start the pod there."""
        self.network.add(name)
        self.network.allow(list(self.allowed_connections()))
        if self.pods[name].role == "router":
            account = self.network.folder(name) / "run/secrets/kubernetes.io/serviceaccount"
            account.mkdir(parents=True)
            (account / "token").write_text("a token")
            self.ca.cert_pem.write_to_path(account / "ca.crt")
        self._write_hosts_files()
        self.start_container(name)

    def start_container(self, name: str) -> None:
        """Start the container of a pod on its host, also after it has ended, as the kubelet does."""
        pod = self.pods[name]
        environ = pod.kind.environment_of(name, self.network.address(name)) | {
            "MODEL": str(self._checkpoint),
            "KUBERNETES_SERVICE_HOST": self.network.address("api"),
            "KUBERNETES_SERVICE_PORT": str(API_PORT),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(self._folder / "cache"),
        }
        argv = [sys.executable, "-P", "-m", "cli", *self._arguments_here(pod.kind.arguments_in(environ))]
        with pod.log.open("ab") as log:
            pod.program = self.network.start(name, argv, environ, log)

    def stop(self, name: str) -> None:
        """End a pod as Kubernetes does: EndpointSlices, preStop if any, SIGTERM to the container's first process.

        The pod must end with status 0 within its grace period. Its host is then removed.
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
        assert status == 0, f"{name} ended with status {status}:\n{pod.log.read_text()[-2000:]}"
        pod.program = None
        self.network.remove(name)

    def restart(self, name: str) -> None:
        """Restart a pod as a StatefulSet does in a rolling update, and wait until it is ready at its new address."""
        self.stop(name)
        self.start(name)
        self.wait_serving(self.pods[name])

    def replace_router(self) -> None:
        """Replace the router as a Deployment does: the new one is ready before the old one ends."""
        (old,) = self.running_pods("router")
        new = next(name for name in ROUTERS if name != old.name)
        self.start(new)
        self.wait_serving(self.pods[new])
        self.route_clients_to(new)
        self.stop(old.name)

    def wait_serving(self, pod: RunningPod) -> None:
        self.wait_until(pod.serves)
        pod.ready = True
        self.publish()

    def publish(self) -> None:
        """Publish the ready state of all nodes as EndpointSlices."""
        slices = []
        for role in ("prefill", "decode"):
            endpoints = [
                {"addresses": [self.network.address(pod.name)], "conditions": {"ready": pod.ready}}
                for pod in self.running_pods(role)
            ]
            labels = {"kubernetes.io/service-name": role}
            ports = [{"name": "grpc", "port": PORTS[role]}]
            slices.append({"metadata": {"name": role, "labels": labels}, "endpoints": endpoints, "ports": ports})
        _replace(self.network.folder("api") / "slices.json", json.dumps(slices))

    def route_clients_to(self, name: str) -> None:
        """Route new client connections to this router."""
        self._service = name
        self._write_hosts_files()

    # ------------------------------------------------------------ policies

    def endpoint(self, name: str) -> Endpoint:
        if name in self.pods:
            return Endpoint(self.pods[name].kind.labels, NAMESPACE)
        return Endpoint({}, OTHER_HOSTS[name])

    def allowed_connections(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield the connections that the overlay's policies allow: (from, to, first port, last port).

        The kubelet reaches every pod of its machine regardless of policies.
        """
        names = self.network.names
        for source in names:
            for target in names:
                if source == "machine":
                    yield source, target, 1, 65535
                elif source != target:
                    for ports in open_ports(self._overlay, self.endpoint(source), self.endpoint(target)):
                        yield source, target, ports.start, ports.stop - 1

    # ------------------------------------------------------------ setup

    def _list_pods(self, stack: ExitStack) -> None:
        kinds = sorted(pods(self._overlay), key=lambda pod: pod.role, reverse=True)  # router, prefill, decode
        tls = PeerTls(str(self._secrets / "peers")) if kinds[0].flags("grpc-tls") else None
        for kind in kinds:
            names = ROUTERS if kind.role == "router" else [f"{kind.name}-{index}" for index in range(kind.replicas)]
            if kind.is_rank:
                names = [f"{kind.name}-0-{index + 1}" for index in range(kind.replicas)]
            for name in names:
                port = PORTS[kind.role.removesuffix("-ranks")]  # a pod of ranks has none
                forwarded = self._forward_port(stack, "machine", f"{name}:{port}")
                metrics = self._forward_port(stack, "prometheus", f"{name}:{METRICS_PORT}")
                self.pods[name] = RunningPod(kind, name, forwarded, metrics, self._folder / f"{name}.log", tls)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://" + self._forward_port(stack, "client", f"{SERVICE}:{PORTS['router']}")

    def _forward_port(self, stack: ExitStack, host: str, target: str) -> str:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._port_forwards.append((host, target, listener))
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def _write_secrets(self) -> None:
        (self._secrets / "keys").mkdir(parents=True)
        (self._secrets / "keys/keys.toml").write_text(key_entry("client", self._key))
        write_identity(self._secrets / "peers", self.ca)
        (self._secrets / "https").mkdir()
        write_https(self._secrets / "https/tls.crt", self._secrets / "https/tls.key", self.ca)

    def _start_services(self, stack: ExitStack) -> None:
        """Start the API server and the port forwards."""
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        log = stack.enter_context((self._folder / "outside.log").open("wb"))
        api = self.network.folder("api")
        certificate = self.ca.issue_cert(self.network.address("api"))
        certificate.private_key_and_cert_chain_pem.write_to_path(api / "tls.pem")
        self.publish()
        self.network.start("api", [sys.executable, str(HERE / "api_server.py"), str(API_PORT), str(api)], environ, log)
        for host in ("client", "machine", "prometheus"):
            forwards = [(listener, target) for on, target, listener in self._port_forwards if on == host]
            words = [f"{listener.fileno()}={target}" for listener, target in forwards]
            fds = [listener.fileno() for listener, _ in forwards]
            self.network.start(host, [sys.executable, str(HERE / "port_forward.py"), *words], environ, log, fds)

    def resolve_leaders(self) -> None:
        """Let the names of leaders resolve from now on."""
        self.resolves_leaders = True
        self._write_hosts_files()

    def _write_hosts_files(self) -> None:
        table = []
        for pod in self.pods.values():
            if pod.name in self.network.names:  # includes pods that are about to start
                names = [pod.name, *headless_services(self._overlay, pod.kind)]
                names += [SERVICE] if pod.name == self._service else []
                if self.resolves_leaders and pod.role in ("prefill", "decode"):
                    names.append(pod.kind.leader_address)
                table.append((self.network.address(pod.name), " ".join(names)))
        self.network.write_hosts_files(table)

    def _arguments_here(self, arguments: list[str]) -> list[str]:
        """Return a container's arguments with the replacements of the module docstring."""
        replaced = ("--device=", "--require-transport=", "--tp=", "--local-ranks=")
        words = [word for word in arguments if not word.startswith(replaced)]
        words += ["--local-ranks=1"] if "--node-rank" in " ".join(words) else []
        return [*self.with_local_secrets(words), *(() if words[0] == "router" else SMALL)]


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)
