"""The options of a node as the user sets them, each with its flag.

A new flag is a field of ``NodeOptions``; pdserve/flags/declaration.py makes the rest of it. Commands with these flags:
``pdserve up``, ``prefill``, ``decode``, ``serve``, ``doctor`` and ``explain``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec

from pdserve.config.attention_backends import ATTENTION_BACKENDS
from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.discovery.sources import ADDRESS_FORMS, check_sources
from pdserve.errors import ConfigError, shown
from pdserve.flags import declaration
from pdserve.flags.declaration import Flag
from pdserve.flags.shared import GRPC_TLS
from pdserve.flags.value_types import natural, number, parse_size, positive_int, words
from pdserve.kv.layout import FP8_E4M3, MAX_BLOCK_SIZE
from pdserve.model.model_config import MODEL_IMPLS
from pdserve.model.pooling import TASKS
from pdserve.request_cost import AUTO_ITL_STEPS, TTFT_OBJECTIVE
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming

KV_CACHE_DTYPES = ("auto", FP8_E4M3, "fp8")  # vLLM's names; the last two are the same
GPU_MEMORY_UTILIZATION = 0.9  # default share of a GPU's memory; nodes of `pdserve up` on the same GPU divide it


OFF = "off"
ON = "on"
AUTO = "auto"
LOOKUP = "lookup"
MTP = "mtp"
EAGLE3 = "eagle3"
ALWAYS = "always"
SPECULATE = (OFF, AUTO, LOOKUP, MTP, f"{EAGLE3}:DIR")
SYNTHETIC_SUFFIX = "-synthetic-acceptance"  # suffix of the model name in the API: the answers mean nothing
MAX_DRAFTS = 16  # most drafts of a sequence in one step
MOST_LORAS = 64  # most slots of adapters
MOST_TARGET = 60_000.0  # ms of --itl-target and --ttft-target
SYNTHETIC_DRAFTS = 3  # per decode with --synthetic-acceptance; deployments draft chains of two or three


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use auto, cpu, cuda or cuda:N")
    return text


def _layers(text: str) -> tuple[int, ...]:
    return tuple(positive_int(count) for count in text.split(","))


def _speculate(text: str) -> str:
    if text not in SPECULATE[:-1] and not re.fullmatch(f"{EAGLE3}:.+", text):
        raise ConfigError(f"{text!r} is not one of {', '.join(SPECULATE)}")
    return text


def _itl_target(text: str) -> float | None:
    return None if text == "auto" else number(text)


def adapter_source(text: str) -> str:
    """Check an adapter of the command line, NAME=DIR or vLLM's JSON, and return it as NAME=DIR. Raises ConfigError."""
    if text.startswith("{"):
        try:
            source = msgspec.json.decode(text, type=_AdapterSource)
        except msgspec.MsgspecError as exc:
            raise ConfigError(f"{shown(text)} is no adapter ({exc}); write NAME=DIR") from exc
        return adapter_source(f"{source.name}={source.path}")
    name, _, path = text.partition("=")
    if not (name and path):
        raise ConfigError(f"{shown(text)} is no adapter; write NAME=DIR")
    return text


class _AdapterSource(msgspec.Struct):
    """An adapter in vLLM's form."""

    name: str
    path: str


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``resolve`` decides ``None`` and "auto"."""

    model: str  # directory or hub id
    served_model_name: Annotated[
        str | None, Flag("model name in the API", metavar="NAME", unset="the name of MODEL", group="model")
    ] = None
    device: Annotated[str, Flag("auto, cpu, cuda or cuda:N", metavar="DEVICE", parse=_device, group="model")] = "auto"
    dtype: Annotated[
        str,
        Flag(
            "auto (the checkpoint's), float32, bfloat16 or float16",
            metavar="DTYPE",
            choices=("auto", "float32", "bfloat16", "float16"),
            group="model",
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        Flag(
            "auto (as the checkpoint says), or fp8, nvfp4 or int4: quantize unquantized weights when they are loaded, "
            "on runner V2",
            metavar="FORMAT",
            group="model",
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        Flag(
            "auto (the checkpoint's weights) or dummy (random weights: config.json suffices)",
            metavar="FORMAT",
            choices=("auto", "dummy"),
            group="model",
        ),
    ] = "auto"
    load_from: Annotated[
        str,
        Flag(
            "disk; auto: from the memory of a peer, or else the disk; peer: the same, but wait for a peer. With auto "
            "and peer this node offers its weights, too",
            metavar="WHERE",
            choices=("disk", "auto", "peer"),
            group="model",
        ),
    ] = "disk"
    weight_peers: Annotated[
        tuple[str, ...],
        Flag(f"nodes to ask for weights: {ADDRESS_FORMS}", metavar="SOURCE,…", parse=check_sources, group="model"),
    ] = ()
    model_impl: Annotated[
        str,
        Flag(
            "auto (native for families that have it), native, or transformers: the library's layers, on runner V1",
            metavar="IMPL",
            choices=MODEL_IMPLS,
            group="model",
        ),
    ] = "auto"
    task: Annotated[
        str,
        Flag(
            "auto (by the checkpoint), generate, or on prefill nodes embed or classify: vectors of prompts",
            metavar="TASK",
            choices=TASKS,
            group="model",
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Flag("tokens of prompt and output", metavar="N", at_least=1, unset="the model's maximum", group="model"),
    ] = None
    attention_backend: Annotated[str, Flag(f"auto, {', '.join(ATTENTION_BACKENDS)}", metavar="NAME", group="model")] = (
        "auto"
    )
    cuda_graphs: Annotated[
        str,
        Flag(
            "capture decode steps: auto (with the V2 runner on a GPU), on or off",
            metavar="WHEN",
            choices=("auto", "on", "off"),
            shorthand=("--enforce-eager", "off"),
            group="model",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Flag("CPU threads of torch", metavar="N", at_least=1, unset="all cores; up divides them", group="model"),
    ] = None

    engine: Annotated[
        str,
        Flag(
            "device, or simulated: no model, meaningless tokens, timing by a cost model",
            metavar="KIND",
            choices=("device", "simulated"),
            group="simulated nodes",
        ),
    ] = "device"
    sim_costs: Annotated[
        tuple[str, ...],
        Flag(
            f"costs in seconds that replace {SimulatedCosts()}",
            metavar="NAME=S,…",
            parse=words,
            group="simulated nodes",
        ),
    ] = ()
    sim_speed: Annotated[float, Flag("divides all costs; inf: no delay", metavar="F", group="simulated nodes")] = 1.0
    sim_crash_token: Annotated[
        int | None,
        Flag("a step with this token ends the engine, for tests", metavar="ID", parse=natural, group="simulated nodes"),
    ] = None

    synthetic_acceptance: Annotated[
        float | None,
        Flag(
            "for benchmarks: tokens that a sequence yields per decode step, on average. Tokens of simulated nodes stay "
            "the same; those of others mean nothing, and the model's name says so",
            metavar="N",
            at_least=1,
            at_most=1 + MAX_DRAFTS,
            unset="as many as are right",
            group="speculation",
        ),
    ] = None

    speculate: Annotated[
        str,
        Flag(
            "where drafts come from that decode steps verify; the answers stay the same. lookup: tokens that followed "
            "the same text before; mtp: the model's own layer that predicts further tokens; eagle3:DIR: the EAGLE-3 "
            "head in a directory or a hub repository; auto: mtp where the checkpoint has such a layer, else lookup",
            metavar="SOURCE",
            parse=_speculate,
            group="speculation",
        ),
    ] = OFF
    num_drafts: Annotated[
        int,
        Flag(
            "drafts of a sequence in one step, at most",
            metavar="N",
            at_least=1,
            at_most=MAX_DRAFTS,
            group="speculation",
        ),
    ] = 3

    speculate_when: Annotated[
        str,
        Flag(
            "auto: as many drafts as are worth their time, by measured costs and acceptance; always: all",
            metavar="WHEN",
            choices=("auto", ALWAYS),
            group="speculation",
        ),
    ] = "auto"

    pp: Annotated[
        int, Flag("pipeline stages", metavar="N", at_least=1, alias="--pipeline-parallel-size", group="ranks")
    ] = 1
    tp: Annotated[
        int, Flag("tensor shards per stage", metavar="M", at_least=1, alias="--tensor-parallel-size", group="ranks")
    ] = 1
    ep: Annotated[
        int,
        Flag(
            "the value of --tp: each shard holds whole experts, not a slice of every expert",
            metavar="M",
            at_least=1,
            alias="--expert-parallel-size",
            group="ranks",
        ),
    ] = 1
    stage_layers: Annotated[
        tuple[int, ...] | None,
        Flag("layers of each stage", metavar="N,N,…", parse=_layers, unset="split evenly", group="ranks"),
    ] = None

    block_size: Annotated[
        int, Flag("tokens per block", metavar="N", at_least=1, at_most=MAX_BLOCK_SIZE, group="KV cache")
    ] = 16
    kernel_block_size: Annotated[
        int | None,
        Flag("tokens per kernel page", metavar="N", at_least=1, unset="the largest supported", group="KV cache"),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Flag(
            "auto (the model's), or fp8_e4m3 (alias fp8): half the memory and bytes to send, with the scales of the "
            "checkpoint or 1.0; the same on all nodes",
            metavar="DTYPE",
            choices=KV_CACHE_DTYPES,
            group="KV cache",
        ),
    ] = "auto"
    kv_cache_memory: Annotated[
        int | None,
        Flag(
            "bytes, or a number with K, M, G, KiB, MiB, GiB",
            metavar="SIZE",
            parse=parse_size,
            at_least=1,
            group="KV cache",
        ),
    ] = None
    host_kv_memory: Annotated[
        int | None,
        Flag(
            "host memory that keeps KV which the device has no room for: its prefixes are loaded in place of computed",
            metavar="SIZE",
            parse=parse_size,
            at_least=1,
            unset="none",
            group="KV cache",
        ),
    ] = None
    disk_kv: Annotated[
        str | None,
        Flag(
            "directory for KV that leaves host memory, which nodes of a host may share; needs --host-kv-memory",
            metavar="PATH",
            unset="none",
            group="KV cache",
        ),
    ] = None
    disk_kv_size: Annotated[
        int | None,
        Flag(
            "most bytes in that directory, of all nodes together; the same on all of them",
            metavar="SIZE",
            parse=parse_size,
            at_least=1,
            unset="required with --disk-kv",
            group="KV cache",
        ),
    ] = None
    state_slots: Annotated[
        int | None,
        Flag(
            "slots of recurrent state, for models that have one: a sequence needs one, a snapshot for prefix hits, too",
            metavar="N",
            at_least=2,
            unset="as many as sequences of 4,096 tokens fit",
            group="KV cache",
        ),
    ] = None
    kv_checksum: Annotated[
        str | None,
        Flag(
            "compare KV read from a peer with the prefill node's digests; the same on all nodes",
            metavar="on|off",
            choices=("on", "off"),
            unset="on",
            group="KV cache",
        ),
    ] = None
    kv_connector: Annotated[
        str,
        Flag(
            "moves KV between nodes: auto (nixl, or simulated), none, or module:Class, a class of your own; "
            "the same on all nodes",
            metavar="NAME",
            group="KV cache",
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float | None,
        Flag(
            "share of each GPU's memory for a node",
            metavar="F",
            above=0,
            at_most=1,
            unset=f"{GPU_MEMORY_UTILIZATION}; up divides it among the nodes of a GPU",
            group="KV cache",
        ),
    ] = None

    images: Annotated[
        str,
        Flag(
            "auto: take images if the checkpoint has a native vision tower and an image processor, encoded by prefill "
            "nodes and `pdserve serve`; on: this node encodes them, or does not start; off: text only, which saves "
            "the tower's memory",
            metavar="WHEN",
            choices=(AUTO, ON, OFF),
            group="images",
        ),
    ] = AUTO
    image_cache: Annotated[
        int | None,
        Flag(
            "memory of each device for embeddings of images, while prompts need them and until others need the room",
            metavar="SIZE",
            parse=parse_size,
            at_least=1,
            unset="twice the largest image's",
            group="images",
        ),
    ] = None

    lora: Annotated[
        tuple[str, ...],
        Flag(
            "LoRA adapter of the model, served under NAME; DIR is a directory or hub id in PEFT's format; repeatable",
            metavar="NAME=DIR",
            parse=adapter_source,
            repeatable=True,
            alias="--lora-modules",
            group="adapters",
        ),
    ] = ()
    max_loras: Annotated[
        int | None,
        Flag(
            "different adapters in one step: slots on the device. Alone, it lets adapters be loaded later",
            metavar="N",
            at_least=1,
            at_most=MOST_LORAS,
            unset="as many as --lora gives",
            group="adapters",
        ),
    ] = None
    max_lora_rank: Annotated[
        int,
        Flag(
            "largest rank of an adapter; each slot has room for it",
            metavar="N",
            at_least=1,
            at_most=512,
            group="adapters",
        ),
    ] = 16
    max_cpu_loras: Annotated[
        int | None,
        Flag(
            "adapters in host memory, those included whose last requests still run",
            metavar="N",
            at_least=1,
            unset="twice --max-loras, at least all of --lora",
            group="adapters",
        ),
    ] = None

    max_num_seqs: Annotated[
        int | None,
        Flag(
            "sequences that decode at the same time",
            metavar="N",
            at_least=1,
            unset="256 on a CPU; 256 to 512 on a GPU, as its KV memory holds",
            group="limits",
        ),
    ] = None
    max_batch_tokens: Annotated[
        int | None,
        Flag(
            "tokens per step",
            metavar="N",
            at_least=1,
            unset="2048 on a CPU, 8192 on a GPU; 512 and 2048 with --pp",
            alias="--max-num-batched-tokens",
            group="limits",
        ),
    ] = None
    itl_target: Annotated[
        float | None,
        Flag(
            "gap between tokens of a sequence that prompts computed on the same node keep, in ms; 0: any",
            metavar="MS",
            parse=_itl_target,
            at_least=0,
            at_most=MOST_TARGET,
            unset=f"auto, {AUTO_ITL_STEPS:g} times the measured decode step of one sequence",
            group="limits",
        ),
    ] = None
    ttft_target: Annotated[
        float,
        Flag(
            "time from request to first token for which steps may exceed --itl-target, in ms; 0: none",
            metavar="MS",
            at_least=0,
            at_most=MOST_TARGET,
            group="limits",
        ),
    ] = 1e3 * TTFT_OBJECTIVE
    max_waiting: Annotated[
        int, Flag("queued requests; further requests are refused", metavar="N", at_least=0, group="limits")
    ] = 1024
    peer_timeout: Annotated[
        float,
        Flag("seconds without a sign of life until a node or engine counts as dead", metavar="S", group="limits"),
    ] = DEFAULT_TIMING.timeout
    grpc_tls: Annotated[str | None, GRPC_TLS] = None

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp

    @property
    def memory_share(self) -> float:
        """Share of each GPU's memory that this node may use."""
        return self.gpu_memory_utilization or GPU_MEMORY_UTILIZATION

    @property
    def max_drafts(self) -> int:
        """Drafts of a decode in one step, at most."""
        if self.synthetic_acceptance is not None:
            return SYNTHETIC_DRAFTS if self.simulated else self.num_drafts
        return 0 if self.speculate == OFF else self.num_drafts

    @property
    def draft_head(self) -> str:
        """Directory or hub id of the head that makes drafts; empty if none does."""
        kind, _, head = self.speculate.partition(":")
        return head if kind == EAGLE3 else ""

    @property
    def simulated(self) -> bool:
        return self.engine == "simulated"

    @property
    def reads_weights(self) -> bool:
        return not self.simulated and self.load_format != "dummy"

    @property
    def connector(self) -> str:
        """Name of the connector back end, or its module:Class."""
        if self.kv_connector != "auto":
            return self.kv_connector
        return "simulated" if self.simulated else "nixl"

    @property
    def checks_kv(self) -> bool:
        """Whether KV from peers, host memory or disk is compared with digests."""
        return self.kv_checksum != "off" and not self.simulated

    @property
    def always_draft(self) -> bool:
        """Draft even if it costs more time than it saves."""
        return self.speculate_when == ALWAYS

    @property
    def peer_timing(self) -> PeerTiming:
        return PeerTiming(self.peer_timeout)


def add_node_flags(
    parser: argparse.ArgumentParser, model_default: str | None = None, without: Collection[str] = ()
) -> None:
    """Add MODEL and the flags of NodeOptions but ``without``. MODEL is required without ``model_default``."""
    model_help = "checkpoint directory or hub id" + (" (default: the embedded model)" if model_default else "")
    parser.add_argument(
        "model", metavar="MODEL", help=model_help, nargs="?" if model_default else None, default=model_default
    )
    declaration.add_flags(parser, NodeOptions, without)


def node_options_from(args: argparse.Namespace) -> NodeOptions:
    return declaration.options_from(NodeOptions, args, model=args.model)


def node_words(options: NodeOptions) -> list[str]:
    """Return the command line of ``options``: MODEL and every flag that differs from its default."""
    return [options.model, *declaration.words_of(options)]


def model_name(model: str) -> str:
    """Return the default served name: the directory's name, or the hub id."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def check_options(options: NodeOptions) -> None:
    """Raise ConfigError for options that are invalid for every checkpoint and device."""
    declaration.check_ranges(options)
    _speculate(options.speculate)
    PeerTiming(options.peer_timeout)
    if options.load_from != "disk" and not options.reads_weights:
        raise ConfigError(f"load_from {options.load_from}: this node has no weights of a checkpoint; leave it at disk")
    if options.load_from == "peer" and not options.weight_peers:
        raise ConfigError("load_from peer needs weight_peers, the nodes to ask; or choose auto")
    _check_disk_kv(options)
    if options.image_cache is not None and options.images == OFF:
        raise ConfigError(f"image_cache {options.image_cache} needs images, which are off; remove one of the two")
    tokens = 1 + options.max_drafts
    sequences = options.max_num_seqs or 1
    if options.max_batch_tokens is not None and options.max_batch_tokens < tokens * sequences:
        times, needed = (f"{tokens} times ", f"{tokens} tokens") if options.max_drafts else ("", "one token")
        raise ConfigError(
            f"max_batch_tokens {options.max_batch_tokens} is less than {times}max_num_seqs {sequences}: "
            f"each running sequence needs {needed} per step; raise the former or lower the latter"
        )
    if (acceptance := options.synthetic_acceptance) is not None:
        if options.speculate != OFF:
            raise ConfigError(f"synthetic_acceptance {acceptance:g} replaces speculate {options.speculate}; remove one")
        if acceptance > 1 + options.max_drafts:
            text = f"a step yields at most {1 + options.max_drafts} tokens of a sequence; lower it or raise num_drafts"
            raise ConfigError(f"synthetic_acceptance {acceptance:g}: {text}")
    if options.simulated:
        _check_simulated(options)
    elif options.kv_connector == "simulated":
        raise ConfigError("kv_connector simulated moves no KV; use auto, or add --engine simulated")
    elif options.sim_costs or options.sim_speed != 1.0 or options.sim_crash_token is not None:
        names = "sim_costs, sim_speed and sim_crash_token"
        raise ConfigError(f"{names} need a simulated node; add --engine simulated or remove them")


def _check_disk_kv(options: NodeOptions) -> None:
    """Raise ConfigError for KV on disk without the options that it needs."""
    path = options.disk_kv
    size = options.disk_kv_size
    host = options.host_kv_memory
    if path is None and size is not None:
        raise ConfigError(f"disk_kv_size {size} needs disk_kv, the directory; name one, or remove the size")
    if path is None:
        return
    if size is None:
        raise ConfigError(f"disk_kv {path} needs disk_kv_size, the most bytes in this directory, such as 1T")
    if not host:
        raise ConfigError(f"disk_kv {path} needs host_kv_memory, which all KV passes on its way; give it, such as 64G")
    if size <= host:
        raise ConfigError(f"disk_kv_size {size} is not more than host_kv_memory {host}; give several times as much")
    if options.kv_checksum == "off":
        raise ConfigError(f"disk_kv {path} needs kv_checksum on: files are checked by the digests of their blocks")
    if options.simulated:
        raise ConfigError(f"disk_kv {path}: a simulated node has no KV to write; remove it")


def _check_simulated(options: NodeOptions) -> None:
    """Refuse options of devices and ranks, which a simulated node does not have."""
    if options.kv_connector == "nixl":
        raise ConfigError("kv_connector nixl is not possible for a simulated node; use auto")
    for name, allowed in (
        ("device", ("auto", "cpu")),
        ("attention_backend", ("auto",)),
        ("cuda_graphs", ("auto", "off")),
        ("pp", (1,)),
        ("tp", (1,)),
        ("ep", (1,)),
        ("kv_checksum", (None, "off")),
        ("speculate", (OFF,)),
    ):
        if getattr(options, name) not in allowed:
            raise ConfigError(f"{name} {getattr(options, name)} is not possible for a simulated node; use {allowed[0]}")
