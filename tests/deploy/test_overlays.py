"""Every overlay builds, fits Kubernetes' schemas, and uses existing flags."""

from __future__ import annotations

import re
import subprocess

import kubernetes_validate
import pytest
import yaml
from overlays import KUBERNETES, OVERLAYS, REVISION, Pod, build, builder, of_kind, pods
from queries import check_query

from cli.commands import parser_of
from cli.doctor.command import make_parser
from cli.up.flags import make_parser as make_up_parser
from decode_node.decode_role import make_role as make_decode
from elastic_node.elastic_role import make_role as make_elastic
from node.frontend_flags import FrontendOptions
from pdserve.config.multi_host import local_ranks_from
from pdserve.config.node_options import node_options_from
from pdserve.discovery.sources import check_source
from pdserve.flags.declaration import options_from
from prefill_node.prefill_role import make_role as make_prefill
from router.options import parse_options

SCHEMAS = "1.33"  # the oldest Kubernetes that the manifests are for: preStop.sleep is on by default since 1.30
CUSTOM = (
    "LeaderWorkerSet",
    "ScaledObject",
    "PodMonitor",
    "PrometheusRule",
    "InferencePool",
)  # custom kinds without a schema in any package

#: Plugins that llm-d-router registers in v0.10.0 and does not deprecate, as far as the example uses them.
LLM_D_PLUGINS = {
    "metrics-data-source",
    "core-metrics-extractor",
    "endpoint-notification-source",
    "token-producer",
    "precise-prefix-cache-producer",
    "prefix-cache-scorer",
    "queue-scorer",
    "kv-cache-utilization-scorer",
    "prefill-filter",
    "decode-filter",
    "max-score-picker",
    "always-disagg-pd-decider",
    "disagg-profile-handler",
}

EVENT_ENDPOINTS = ("kv-events-endpoint", "kv-events-replay-endpoint")

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@each_overlay
def test_overlay_fits_the_kubernetes_schemas(overlay: str) -> None:
    for manifest in build(overlay):
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, SCHEMAS, strict=True)


@each_overlay
def test_pod_templates_of_custom_kinds_fit_the_pod_schema(overlay: str) -> None:
    for pod in pods(overlay):
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod.name, "labels": pod.labels},
            "spec": pod.spec,
        }
        kubernetes_validate.validate(manifest, SCHEMAS, strict=True)


def check_flags(pod: Pod) -> None:
    """Parse the arguments like the program; raises its ConfigError."""
    command, *words = pod.arguments
    if command == "router":
        parse_options(words)
    elif command == "up":
        node_options_from(make_up_parser().parse_args(words))
    else:
        make = {"prefill": make_prefill, "decode": make_decode, "serve": make_elastic}[command]
        parser = parser_of(command)
        args = parser.parse_args(words)
        options = node_options_from(args)
        make(args)
        options_from(FrontendOptions, args).address(1)
        assert local_ranks_from(args, options.num_ranks).has_leader is not pod.role.endswith("-ranks")


@each_overlay
def test_programs_parse_the_flags_of_manifests(overlay: str) -> None:
    for pod in pods(overlay):
        assert not [word for word in pod.arguments if "$(" in word]
        check_flags(pod)
        for container in pod.spec.get("initContainers", ()):
            command, *words = container["args"]
            assert command == "doctor"
            node_options_from(make_parser().parse_args(words))
            assert container["image"] == pod.container["image"]


@each_overlay
def test_decode_nodes_find_only_prefill_nodes_of_their_revision(overlay: str) -> None:
    pod_of = {pod.role: pod for pod in pods(overlay)}
    if "up" in pod_of:
        return
    prefill, decode = (pod_of[role if role in pod_of else "both"] for role in ("prefill", "decode"))
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(overlay, "Service")}
    (source,) = decode.flags("prefill")
    name = re.fullmatch(r"dns://([a-z0-9-]+):9001", check_source(source)).group(1)  # type: ignore[union-attr]
    assert services[name]["clusterIP"] == "None"
    assert [pod for pod in pods(overlay) if services[name]["selector"].items() <= pod.labels.items()] == [prefill]
    assert services[name]["selector"][REVISION] == prefill.labels[REVISION] == decode.labels[REVISION]
    assert prefill.name.endswith(prefill.labels[REVISION])


@each_overlay
def test_nodes_pull_from_nodes_of_their_revision(overlay: str) -> None:
    """P reads from D and P, D from D beside its P. Nodes of both roles list each other with --prefill."""
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(overlay, "Service")}
    wanted = {"prefill": ["decode", "prefill"], "decode": ["decode"]}
    for pod in pods(overlay):
        sources = [re.fullmatch(r"dns://([a-z0-9-]+):(\d+)", check_source(source)) for source in pod.flags("kv-source")]
        named = [(services[match[1]], int(match[2])) for match in sources if match]
        read = [
            other
            for service, port in named
            for other in pods(overlay)
            if service["selector"].items() <= other.labels.items() and other.flags("port") == [str(port)]
        ]
        assert [other.role for other in read] == wanted.get(pod.role.removesuffix("-ranks"), [])
        assert all(other.labels[REVISION] == pod.labels[REVISION] for other in read)
        for service, port in named:
            assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
            assert [entry["port"] for entry in service["ports"]] == [port]


@each_overlay
def test_router_sources_name_existing_services(overlay: str) -> None:
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(overlay, "Service")}
    routers = [pod for pod in pods(overlay) if pod.role == "router"]
    for router in routers:
        roles = {"node": "both"} if router.flags("node") else {"prefill": "prefill", "decode": "decode"}
        for flag, role in roles.items():
            (source,) = router.flags(flag)
            service, port = re.fullmatch(r"k8s://ai/([a-z-]+):([a-z]+)", check_source(source)).groups()  # type: ignore[union-attr]
            assert services[service]["clusterIP"] == "None"
            nodes = [pod for pod in pods(overlay) if services[service]["selector"].items() <= pod.labels.items()]
            assert [pod.role for pod in nodes] == [role]
            assert [entry["name"] for entry in services[service]["ports"]] == [port]


@each_overlay
def test_router_and_nodes_have_one_model_and_one_image(overlay: str) -> None:
    all_pods = list(pods(overlay))
    assert len({(pod.environment["MODEL"], pod.environment["MODEL_NAME"]) for pod in all_pods}) == 1
    assert len({pod.container["image"] for pod in all_pods}) == 1


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if (KUBERNETES / "overlays" / name / "nodes").is_dir()])
def test_node_names_carry_their_revision(overlay: str) -> None:
    builder()
    folder = KUBERNETES / "overlays" / overlay / "nodes"
    checked = subprocess.run([KUBERNETES / "revise", "--check", folder], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_pool_selects_the_nodes_and_their_http_port() -> None:
    (pool,) = of_kind("gateway", "InferencePool")
    chosen = [pod for pod in pods("gateway") if pool["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()]
    assert sorted((pod.role, pod.labels["llm-d.ai/role"]) for pod in chosen) == [
        ("decode", "decode"),
        ("prefill", "prefill"),
    ]
    (decode,) = [pod for pod in chosen if pod.role == "decode"]
    assert [{"number": int(port)} for port in decode.flags("http")] == pool["spec"]["targetPorts"]
    for pod in chosen:
        ports = {entry["containerPort"] for entry in pod.container["ports"]}
        assert {int(pod.flags(name)[0].rpartition(":")[2]) for name in EVENT_ENDPOINTS} <= ports


def test_arguments_of_the_kserve_example_are_those_of_the_program() -> None:
    runtime = next(yaml.safe_load_all((KUBERNETES.parent / "examples" / "kserve.yaml").read_text()))
    (container,) = runtime["spec"]["containers"]
    command, *words = container["args"]
    args = parser_of(command).parse_args(words)
    assert [{"containerPort": args.http, "protocol": "TCP"}] == container["ports"]


def test_query_of_the_keda_example_asks_for_an_exported_series() -> None:
    scaled = yaml.safe_load((KUBERNETES.parent / "examples" / "keda.yaml").read_text())
    (trigger,) = scaled["spec"]["triggers"]
    check_query(trigger["metadata"]["query"])


def test_configuration_of_llm_d_fits_its_release_and_the_overlay() -> None:
    """Names of plugins are those of llm-d-router v0.10.0; ports and the block size are those of the nodes."""
    config = yaml.safe_load((KUBERNETES.parent / "examples" / "llm-d.yaml").read_text())
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    assert plugins.keys() == LLM_D_PLUGINS
    sources = config["dataLayer"]["sources"]
    parts = [*sources, *(part for source in sources for part in source["extractors"])]
    parts += [part for profile in config["schedulingProfiles"] for part in profile["plugins"]]
    assert {part["pluginRef"] for part in parts} <= plugins.keys()
    assert plugins["disagg-profile-handler"]["deciders"]["prefill"] in plugins
    scored = plugins["prefix-cache-scorer"]["prefixMatchInfoProducerName"]
    events = plugins[scored]["kvEventsConfig"]
    for pod in pods("gateway"):
        if not pod.is_node:
            continue
        discovery = events["podDiscoveryConfig"]
        ports = [discovery["socketPort"], discovery["replaySocketPort"]]
        assert [int(pod.flags(name)[0].rpartition(":")[2]) for name in EVENT_ENDPOINTS] == ports
        assert pod.flags("kv-events-topic")[0].startswith(events["topicFilter"])
        assert pod.flags("metrics-port") == [str(plugins["metrics-data-source"]["port"])]
        assert pod.environment["MODEL_NAME"] == plugins["token-producer"]["modelName"]
        size = node_options_from(parser_of(pod.arguments[0]).parse_args(pod.arguments[1:])).block_size
        assert size == plugins[scored]["tokenProcessorConfig"]["blockSizeTokens"]
    (decode,) = [pod for pod in pods("gateway") if pod.role == "decode"]
    service, _, port = plugins["token-producer"]["vllm"]["url"].removeprefix("http://").partition(":")
    assert service.split(".")[0] in {manifest["metadata"]["name"] for manifest in of_kind("gateway", "Service")}
    assert decode.flags("http") == [port]


def test_examples_are_yaml() -> None:
    for path in (KUBERNETES.parent / "examples").iterdir():
        assert all(manifest["kind"] for manifest in yaml.safe_load_all(path.read_text()))
