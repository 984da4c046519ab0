"""``pdserve doctor``: check whether a node with these flags, and a router for its model, would start on this machine.

It takes the flags of a node, loads no weights, opens no port for others and leaves nothing behind but a cache of weight
digests, which --prefill needs, and the small files of a hub id. It prints a line per check: ok; note if the result is
right only until other hosts take part; warn if a node would start; fail if it would not start, or not do what its flags
say. The last line is the verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path

import grpc
import msgspec

from cli.doctor import checks
from cli.doctor.findings import Finding, Level, fail, ok, run_check, warn
from node.frontend_flags import FrontendOptions
from pdserve import __version__
from pdserve.config.compatibility import PROTOCOL_VERSION, compat_hash, describe_protocol
from pdserve.config.config_with_weights import with_weight_digests
from pdserve.config.device import node_devices
from pdserve.config.memory_fit import check_memory
from pdserve.config.multi_host import add_host_flags, local_ranks_from
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions, add_node_flags, node_options_from
from pdserve.config.resolution.images import describe_images
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.config.tensor_check import checked_tensors
from pdserve.discovery.sources import source_addresses
from pdserve.errors import PdserveError
from pdserve.flags.declaration import add_flags, options_from
from pdserve.flags.parser import command_parser
from pdserve.host.process import run_command
from pdserve.kv.transports import REQUIRABLE
from pdserve.model.eos_tokens import unnamed_end_token
from pdserve.model.generation_defaults import load_generation_defaults
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc import channel as rpc
from pdserve.rpc.errors import rpc_reason
from pdserve.rpc.tls import PeerTls

_ANSWER_SECONDS = 5.0
_LIST_SECONDS = 10.0
_NIXL_SECONDS = 60.0  # two agents connect within a few seconds, if at all
_NIXL_THREAD = "nixl check"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 unless a check failed."""
    parser = make_parser()
    return run_command(lambda: _run(parser.parse_args(argv), parser))


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("pdserve doctor", "Check whether a node with these flags would start on this machine.")
    add_node_flags(parser)
    add_flags(parser, FrontendOptions)
    add_host_flags(parser)
    group = parser.add_argument_group("handoff")
    group.add_argument(
        "--prefill", action="append", default=[], metavar="SOURCE", help="prefill nodes that must answer; repeatable"
    )
    group.add_argument(
        "--require-transport", choices=REQUIRABLE, default="", metavar="KIND", help="fail unless UCX has this transport"
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    return parser


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    options = node_options_from(args)
    frontend = options_from(FrontendOptions, args)
    local = local_ranks_from(args, options.num_ranks)
    findings = []
    for finding in _findings(options, frontend, len(local.ranks), args.prefill, args.require_transport, parser):
        findings.append(finding)
        if not args.json:
            print(finding, flush=True)
    print(json.dumps(msgspec.to_builtins(findings), indent=2) if args.json else verdict(findings), flush=True)
    status = 1 if any(finding.level is Level.FAIL for finding in findings) else 0
    if any(thread.name == _NIXL_THREAD for thread in threading.enumerate()):
        os._exit(status)  # the NIXL thread and the destructors of its libraries may never end
    return status


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line of the output."""
    failed = [finding.check for finding in findings if finding.level is Level.FAIL]
    if failed:
        return f"\nverdict: it would not start, {', '.join(failed)} failed"
    warned = [finding.check for finding in findings if finding.level is Level.WARN]
    return "\nverdict: it would start" + (f"; see the warnings of {', '.join(warned)}" if warned else "")


def _findings(
    options: NodeOptions,
    frontend: FrontendOptions,
    ranks: int,
    prefill: Sequence[str],
    required: str,
    parser: argparse.ArgumentParser,
) -> Iterator[Finding]:
    """Yield findings, cheap checks first."""
    yield run_check("clock", checks.check_clock, options.grpc_tls is not None)
    yield run_check("tls", checks.check_tls, options.grpc_tls, frontend.host)
    yield run_check("port", checks.check_port, frontend.host, frontend.port)
    device = run_check("device", checks.check_device, options, ranks)
    yield device
    if device.level is Level.FAIL:
        return
    devices = node_devices(options, ranks)
    on_gpu = devices[0].kind == "cuda"
    config: NodeConfig | None = None
    local = checks.is_local(options)
    # Without weights, only the small files are downloaded and checked.
    without_weights = options if local else msgspec.structs.replace(options, load_format="dummy", load_from="disk")
    try:
        # Without the variable: a forced runner that cannot run is no fault of the checkpoint.
        environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
        config = resolve(without_weights, devices[0], environ)
        if local and prefill:
            config = with_weight_digests(config)
        yield run_check("checkpoint", checks.check_checkpoint, options, config, local)
    except PdserveError as exc:
        yield Finding("checkpoint", Level.FAIL, str(exc))
    yield run_check("variables", checks.check_variables, parser)
    if not options.simulated:
        yield run_check("bytecode", checks.check_bytecode)
    if config is not None:
        yield run_check("runner", checks.check_runner, lambda: resolve(without_weights, devices[0]))
        yield from _model_findings(options, config, devices)
    yield run_check("shm", checks.check_shared_memory, ranks, on_gpu)
    if not options.simulated:
        yield run_check("memlock", checks.check_locked_memory, options, required, on_gpu)
    back_end = options.connector
    if back_end == "nixl":
        yield run_check("ucx ports", checks.check_ucx_ports, ranks, frontend.host)
        yield from _check_nixl(required, on_gpu)
    elif ":" in back_end:
        yield run_check("kv connector", _check_connector, back_end)
    for source in prefill:
        yield from _peer_findings(source, options, config if local else None)


def _model_findings(options: NodeOptions, config: NodeConfig, devices: Sequence[DeviceInfo]) -> Iterator[Finding]:
    if devices[0].kind == "cuda":
        yield run_check("attention", checks.check_attention, config)
    yield run_check("tokenizer", _check_tokenizer, config)
    if images := describe_images(config):
        yield run_check("images", ok, images)
    if not options.simulated:
        yield run_check("tensors", lambda: ok(str(checked_tensors(config))))
        yield run_check("memory", _check_memory, config, devices)


def _peer_findings(source: str, options: NodeOptions, config: NodeConfig | None) -> Iterator[Finding]:
    """Yield a finding for a source of --prefill, and for each node that it lists."""
    addresses: list[str] = []
    yield run_check("peers", _check_source, source, addresses)
    for address in addresses:
        yield run_check("peer", _check_peer, address, options, config)


def _check_tokenizer(config: NodeConfig) -> Finding:
    """Check the files that a router reads of a checkpoint, and the tokens that end answers."""
    from router.server import load_tokenizer

    tokenizer = load_tokenizer(config.model_dir)
    model = config.model
    directory = Path(config.model_dir)
    load_generation_defaults(directory)
    template = "with a chat template" if tokenizer.chat_template else "without a chat template: completions only"
    ends = ", ".join(f"{tokenizer.token(token_id)} ({token_id})" for token_id in model.eos_token_ids)
    text = f"{template}; answers end with {ends or 'no token'}"
    if not ends:
        return warn(text, "add eos_token_id to generation_config.json")
    if (unnamed := unnamed_end_token(directory, model.vocab_size)) is not None:
        remedy = "add it to eos_token_id of generation_config.json, or correct eos_token of tokenizer_config.json"
        return warn(f"{text}; only the tokenizer names {unnamed}", remedy)
    return ok(text)


def _check_memory(config: NodeConfig, devices: Sequence[DeviceInfo]) -> Finding:
    return ok("; ".join(check_memory(config.for_rank(rank, device)) for rank, device in enumerate(devices)))


def _check_connector(back_end: str) -> Finding:
    from connector import load

    load(back_end)
    return ok(f"{back_end} can be imported")


def _check_nixl(required: str, on_gpu: bool) -> Iterator[Finding]:
    from connector.backends.nixl.nixl_check import Tried, try_agents

    connected: Future[Tried] = Future()

    def connect() -> None:
        try:
            connected.set_result(try_agents(required, "cuda" if on_gpu else "cpu"))
        except Exception as exc:
            connected.set_exception(exc)

    thread = threading.Thread(target=connect, name=_NIXL_THREAD, daemon=True)
    thread.start()
    try:
        tried = connected.result(_NIXL_SECONDS)
    except TimeoutError:
        remedy = "check that this container has the network card and an interface on its network"
        yield Finding("nixl", Level.FAIL, f"two agents have not connected within {_NIXL_SECONDS:g} s", remedy)
        return
    except PdserveError as exc:
        yield Finding("nixl", Level.FAIL, str(exc))
        return
    finally:
        if connected.done():
            thread.join()
    yield run_check("nixl", checks.check_agents, tried.warnings)
    yield run_check("transport", checks.check_requirement, required, tried.transport, tried.lanes)


def _check_source(source: str, addresses: list[str]) -> Finding:
    """Append the prefill nodes that a source lists to ``addresses``."""

    async def first() -> frozenset[str]:
        async with asyncio.timeout(_LIST_SECONDS), aclosing(source_addresses(source)) as listed:
            return await anext(listed)

    try:
        addresses += sorted(asyncio.run(first()))
    except TimeoutError:
        remedy = "check the warnings above, and the format of sources in docs/fleet.md"
        return fail(f"{source} lists nothing within {_LIST_SECONDS:g} s", remedy)
    if not addresses:
        return warn(f"{source} lists no prefill node", "start one; until then, decode nodes prefill prompts themselves")
    return ok(f"{source} lists {', '.join(addresses)}")


def _check_peer(address: str, options: NodeOptions, config: NodeConfig | None) -> Finding:
    """Check that a prefill node answers, and that a node with this configuration could read from it."""
    tls = None if options.grpc_tls is None else PeerTls(options.grpc_tls)
    try:
        peer = asyncio.run(_describe(address, tls))
    except grpc.aio.AioRpcError as exc:
        remedy = "start it, and check firewalls, network policies and --grpc-tls on both sides"
        return fail(f"{address} does not answer: {rpc_reason(exc)}", remedy)
    if peer.role != "prefill":
        return fail(f"{address} is a {peer.role} node", "give --prefill the address of a prefill node")
    if peer.protocol != PROTOCOL_VERSION:
        return fail(f"{address} runs pdserve {peer.version}, this is {__version__}", describe_protocol(peer.protocol))
    if config is not None and peer.compat_hash not in ("", compat_hash(config.compat_fields)):
        return fail(
            f"{address} cannot exchange KV with this configuration", "give both nodes the same checkpoint and flags"
        )
    if peer.state != "ready":
        return warn(f"{address} is {peer.state}", "wait until it is ready")
    return ok(f"{address} is ready")


async def _describe(address: str, tls: PeerTls | None) -> pb.NodeDescription:
    async with rpc.open_channel(address, tls=tls) as channel:
        return await pb_grpc.NodeStub(channel).Describe(pb.DescribeRequest(), timeout=_ANSWER_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
