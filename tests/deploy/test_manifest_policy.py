"""Rules that every pod of every overlay must satisfy."""

from __future__ import annotations

from pathlib import Path

import pytest
from overlays import COMPONENT, OVERLAYS, REVISION, Manifest, Pod, of_kind, pods, selects
from policies import NAMESPACE, Endpoint, peer_selects

GRPC = {"prefill": 9001, "decode": 9002, "both": 9001}
HTTP = 8000
METRICS = 9003
LEASE = 3 + 1  # seconds: --lease-seconds and --lease-guard
REQUEST = 600  # seconds: --request-timeout


def peer_of(overlay: str, pod: Pod) -> Pod:
    """Return the pod of a node that this one exchanges KV with; nodes of both roles are peers of each other."""
    return next(other for other in pods(overlay) if other.is_node and (other.role != pod.role or pod.role == "both"))


# Overlays for namespaces of this level: https://kubernetes.io/docs/concepts/security/pod-security-standards/
RESTRICTED = ("cpu-demo", "one-gpu", "single-node")

each_pod = pytest.mark.parametrize(
    ("overlay", "pod"),
    [pytest.param(overlay, pod, id=f"{overlay}-{pod.role}") for overlay in OVERLAYS for pod in pods(overlay)],
)


def probed(probe: Manifest) -> str:
    """Return the health service or path of a probe."""
    if "grpc" in probe:
        return str(probe["grpc"].get("service", ""))
    if "httpGet" in probe:
        return str(probe["httpGet"]["path"])
    service = probe["exec"]["command"][3]
    assert probe["exec"]["command"][:2] == ["pdserve", "probe"]
    return "" if service.startswith("--") else str(service)


@each_pod
def test_each_probe_checks_the_right_state(overlay: str, pod: Pod) -> None:
    names = ("startupProbe", "livenessProbe", "readinessProbe")
    if pod.role.endswith("-ranks"):  # no port; the leader answers probes
        assert not pod.container.keys() & {*names}
        return
    probes: list[Manifest] = [pod.container[name] for name in names]
    meant = {"router": ["/health/live", "/health/live", "/health"], "up": ["/health", "/health/live", "/health"]}
    assert [probed(probe) for probe in probes] == meant.get(pod.role, ["loaded", "live", ""])
    startup = probes[0]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= (120 if pod.role == "router" else 3600)
    if pod.is_node:
        port = GRPC[pod.role]
        assert all(
            f"127.0.0.1:{port}" in probe["exec"]["command"] if "exec" in probe else probe["grpc"]["port"] == port
            for probe in probes
        )


@each_pod
def test_grace_period_exceeds_drain_and_lease(overlay: str, pod: Pod) -> None:
    """Load balancers notice a draining router late; nodes tell routers at once."""
    (drain,) = (float(seconds) for seconds in pod.flags("drain-timeout"))
    notice = sum(float(seconds) for seconds in pod.flags("drain-grace"))
    if "lifecycle" in pod.container:
        notice += pod.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert notice >= 5 or pod.role not in ("router", "up")
    assert drain >= REQUEST or pod.role.startswith("prefill")
    assert pod.spec["terminationGracePeriodSeconds"] > notice + drain + LEASE + 10


@each_pod
def test_no_container_runs_as_root_or_can_gain_privileges(overlay: str, pod: Pod) -> None:
    security = pod.spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod.spec.get("initContainers", ()), *pod.spec["containers"]):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        locks = any(name.startswith("rdma/") for name in container["resources"]["limits"])
        assert security["capabilities"].get("add", []) == (["IPC_LOCK"] if locks else [])
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
    assert not [volume for volume in pod.spec["volumes"] if "hostPath" in volume]


@each_pod
def test_only_routers_have_api_server_access(overlay: str, pod: Pod) -> None:
    assert pod.spec.get("serviceAccountName") == ("router" if pod.role == "router" else None)
    assert pod.spec.get("automountServiceAccountToken", True) is (pod.role == "router")


@each_pod
def test_memory_is_limited_including_shared_memory(overlay: str, pod: Pod) -> None:
    resources = pod.container["resources"]
    assert resources["limits"]["memory"]
    assert {"cpu", "memory"} <= resources["requests"].keys()
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod.container["volumeMounts"]}
    assert mounts["/tmp"]["emptyDir"]["sizeLimit"]
    if pod.role != "router":
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert mounts["/dev/shm"]["emptyDir"]["sizeLimit"]
        on_gpus = overlay != "cpu-demo"
        assert ("nvidia.com/gpu" in resources["limits"]) is on_gpus
        assert (pod.flags("device") == ["cuda"]) is on_gpus


@each_pod
def test_object_names_are_unique(overlay: str, pod: Pod) -> None:
    """A patch that applies twice passes the schema, but Kubernetes refuses it."""
    volumes = [volume["name"] for volume in pod.spec["volumes"]]
    paths = [mount["mountPath"] for mount in pod.container["volumeMounts"]]
    flags = [word.partition("=")[0] for word in pod.arguments]
    for names in (volumes, paths, [flag for flag in flags if flag not in ("--prefill", "--kv-source")]):
        assert len(set(names)) == len(names)
    assert {mount["name"] for mount in pod.container["volumeMounts"]} == set(volumes)


@each_pod
def test_secrets_are_mounted_as_files(overlay: str, pod: Pod) -> None:
    container = pod.container
    assert "envFrom" not in container
    assert not [entry for entry in container["env"] if "secretKeyRef" in entry.get("valueFrom", {})]
    secret = {volume["name"] for volume in pod.spec["volumes"] if "secret" in volume}
    assert all(mount["readOnly"] for mount in container["volumeMounts"] if mount["name"] in secret)
    if overlay == "mtls":
        assert pod.flags("grpc-tls") == ["/etc/pdserve/peers"]
        assert pod.role != "router" or (pod.flags("tls-cert") and pod.flags("tls-key"))


@each_pod
def test_disruption_budget_allows_one_pod(overlay: str, pod: Pod) -> None:
    budgets = [manifest["spec"] for manifest in of_kind(overlay, "PodDisruptionBudget")]
    (budget,) = [budget for budget in budgets if selects(budget["selector"], pod.labels)]
    assert budget["maxUnavailable"] == 1


@each_pod
def test_pods_of_a_kind_are_spread_over_machines(overlay: str, pod: Pod) -> None:
    if pod.role == "up":  # is alone
        return
    (spread,) = pod.spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert selects(spread["labelSelector"], pod.labels)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_roles_may_read_endpointslices_only(overlay: str) -> None:
    assert not of_kind(overlay, "ClusterRole")
    assert not of_kind(overlay, "ClusterRoleBinding")
    rules = [rule for role in of_kind(overlay, "Role") for rule in role["rules"]]
    allowed = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    assert rules == ([] if overlay in ("one-gpu", "single-node") else [allowed])


# ---------------------------------------------------------------- the network


def opened(overlay: str, labels: dict[str, str], to: Pod, namespace: str = NAMESPACE) -> set[range | None]:
    """Return the ports of ``to`` that a pod with these labels may reach; None if all are open.

    ``namespace`` is where that is, if not where the pods are.
    """
    ports: set[range | None] = set()
    for policy in of_kind(overlay, "NetworkPolicy"):
        spec = policy["spec"]
        if not selects(spec["podSelector"], to.labels):
            continue
        for rule in spec.get("ingress", ()):
            peers = rule.get("from")
            if peers is None or any(peer_selects(peer, Endpoint(labels, namespace)) for peer in peers):
                ports |= ports_of(rule)
    return ports


def ports_of(rule: Manifest) -> set[range | None]:
    """Return the ports of a rule; None if it has all."""
    ports = rule.get("ports")
    return {None} if ports is None else {range(p["port"], p.get("endPort", p["port"]) + 1) for p in ports}


@each_pod
def test_only_peers_reach_grpc_and_ucx(overlay: str, pod: Pod) -> None:
    stranger = {COMPONENT: "stranger"}
    if not pod.is_node:
        expected: set[range | None] = set() if pod.role.endswith("-ranks") else {range(HTTP, HTTP + 1)}
        assert opened(overlay, stranger, pod) == expected
        return
    first, last = map(int, pod.environment["UCX_TCP_PORT_RANGE"].split("-"))
    grpc = range(GRPC[pod.role], GRPC[pod.role] + 1)
    ucx = range(first, last + 1)
    other = peer_of(overlay, pod)
    assert opened(overlay, stranger, pod) == set()
    assert opened(overlay, {COMPONENT: "router"}, pod) == {grpc}
    is_asked = pod.role != "decode" or bool(other.flags("kv-source"))
    assert opened(overlay, other.labels, pod) == ({grpc, ucx} if is_asked else {ucx})
    assert opened(overlay, {**other.labels, REVISION: "rev0"}, pod) == set(), "old P never meets new D"


@each_pod
def test_only_prometheus_reaches_metrics(overlay: str, pod: Pod) -> None:
    if pod.role == "up" or pod.role.endswith("-ranks"):  # no port for metrics
        return
    clients = set() if pod.is_node else {range(HTTP, HTTP + 1)}
    assert pod.flags("metrics-port") == [str(METRICS)]
    assert {"name": "metrics", "containerPort": METRICS} in pod.container["ports"]
    monitored = bool(of_kind(overlay, "PodMonitor"))
    assert opened(overlay, {}, pod, "monitoring") == clients | ({range(METRICS, METRICS + 1)} if monitored else set())
    assert opened(overlay, {}, pod, "somewhere") == clients


@each_pod
def test_every_metrics_port_has_a_pod_monitor(overlay: str, pod: Pod) -> None:
    monitors = [manifest["spec"] for manifest in of_kind(overlay, "PodMonitor")]
    selecting = [monitor for monitor in monitors if selects(monitor["selector"], pod.labels)]
    assert len(selecting) == (0 if not monitors or pod.role.endswith("-ranks") else 1)
    for endpoint in (endpoint for monitor in selecting for endpoint in monitor["podMetricsEndpoints"]):
        assert endpoint["path"] == "/metrics"
        assert endpoint["port"] in [port["name"] for port in pod.container["ports"]]
        assert endpoint.get("scheme", "http") == "http"
        source = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
        assert endpoint["relabelings"] == [{"sourceLabels": [source], "targetLabel": "component"}]


@each_pod
def test_default_policy_denies_all_traffic(overlay: str, pod: Pod) -> None:
    closing = {"Ingress", "Egress"}
    policies = [manifest["spec"] for manifest in of_kind(overlay, "NetworkPolicy")]
    assert any(
        set(policy["policyTypes"]) == closing and selects(policy["podSelector"], pod.labels) for policy in policies
    )


@each_pod
def test_ingress_and_egress_rules_match(overlay: str, pod: Pod) -> None:
    """The egress rules of a node equal the ingress rules of its peers."""
    if not pod.is_node:
        return
    for other in (peer_of(overlay, pod), *([pod] if pod.flags("kv-source") else [])):
        leaving: set[range | None] = set()
        for policy in of_kind(overlay, "NetworkPolicy"):
            if selects(policy["spec"]["podSelector"], pod.labels):
                for rule in policy["spec"].get("egress", ()):
                    if any(selects(peer["podSelector"], other.labels) for peer in rule.get("to", ())):
                        leaving |= ports_of(rule)
        assert leaving == opened(overlay, pod.labels, other)


def test_groups_are_not_recreated_when_a_container_ends() -> None:
    groups = of_kind("multi-node-pp", "LeaderWorkerSet")
    assert len(groups) == 2
    assert {group["spec"]["leaderWorkerTemplate"]["restartPolicy"] for group in groups} == {"None"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_fit_the_pod_security_level_of_the_documentation(overlay: str) -> None:
    """Without RDMA, pods meet all rules of the level restricted; IPC_LOCK is in the level privileged only."""
    restricted = all(map(is_restricted, pods(overlay)))
    assert restricted == (overlay in RESTRICTED)
    rows = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text().splitlines()
    (row,) = (row for row in rows if row.startswith("| `restricted` |"))
    assert (f"`{overlay}`" in row) == restricted


def is_restricted(pod: Pod) -> bool:
    security = pod.spec["securityContext"]
    volumes = pod.spec["volumes"]
    kinds = {kind for volume in volumes for kind in volume if kind != "name"}
    containers = [*pod.spec.get("initContainers", ()), *pod.spec["containers"]]
    return (
        security["runAsNonRoot"]
        and security["seccompProfile"]["type"] == "RuntimeDefault"
        and not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        and kinds <= {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
        and all(
            not container["securityContext"]["allowPrivilegeEscalation"]
            and container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            and not [port for port in container.get("ports", ()) if "hostPort" in port]
            for container in containers
        )
    )
