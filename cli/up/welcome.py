"""Prints the summary of ``pdserve up`` when all processes are ready: devices, addresses and an example request."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.up.local_fleet import Member
from pdserve.config.node_config import NodeConfig
from pdserve.logs import json_line
from pdserve.model.generation_defaults import GenerationDefaults, load_generation_defaults
from pdserve.model.pooling import EMBED
from router.options import RouterOptions


def print_welcome(url: str, config: NodeConfig, nodes: Sequence[Member], router: RouterOptions) -> None:
    """Print on stdout where the model is served: text with an example request, or a JSON line."""
    if router.log_format == "json":
        print(_json_welcome(url, config, nodes), flush=True)
    else:
        print(_welcome(url, config, nodes, router), flush=True)


def _json_welcome(url: str, config: NodeConfig, nodes: Sequence[Member]) -> str:
    fields = [
        {"name": node.name, "device": node.device, "kv_tokens": node.child.kv_tokens, "address": node.address}
        for node in nodes
        if node.child is not None
    ]
    message = f"{config.served_model_name} is served at {url}"
    return json_line("INFO", "up", message, None, {"url": url, "nodes": fields})


def _welcome(url: str, config: NodeConfig, nodes: Sequence[Member], router: RouterOptions) -> str:
    path, body = _example_body(config, router)
    text = json.dumps({"model": config.served_model_name, **body}, ensure_ascii=False)
    key = " -H 'Authorization: Bearer KEY'" if router.api_keys or router.api_key else ""
    watch = f"Dashboard: {url}/dashboard\n" if router.dashboard else ""
    if router.chat_page and path == "chat/completions":
        watch = f"Chat: {url} in a browser, or {command_name()} chat {url} in a terminal\n{watch}"
    if config.pooling is None:
        watch += sampling_line(Path(config.model_dir), router)
    if config.uncompiled_kernels:
        watch += (
            "Attention is Triton's: FlashInfer is compiled meanwhile, for 1 to 3 minutes, and the next start uses it.\n"
        )
    return (
        f"\n{config.served_model_name} is served at {url} (Ctrl-C stops it).\n{watch}\n{node_table(nodes)}\nTry:\n\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n    -d {shlex.quote(text)}\n"
    )


def command_name() -> str:
    """Return the command ``pdserve`` for the user's shell: its path if it is not on the PATH."""
    if shutil.which("pdserve"):
        return "pdserve"
    script = Path(sys.executable).with_name("pdserve")
    return shlex.quote(os.path.relpath(script)) if script.is_file() else f"{sys.executable} -m pdserve"


def sampling_line(model_dir: Path, router: RouterOptions) -> str:
    """Name the checkpoint's defaults of sampling parameters; "" without any."""
    defaults = load_generation_defaults(model_dir)
    if router.generation_config != "auto" or defaults == GenerationDefaults():
        return ""
    return f"Sampling, where a request says nothing: {defaults} (--generation-config none: OpenAI's defaults)\n"


def node_table(nodes: Sequence[Member]) -> str:
    """Return a line per node: name, devices, KV cache, address."""
    rows = []
    for node in nodes:
        assert node.child is not None
        rows.append((node.name, node.device, f"{node.child.kv_tokens:,} KV tokens", node.address))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        f"  {name:<{widths[0]}}  {device:<{widths[1]}}  {tokens:>{widths[2]}}  {address}\n"
        for name, device, tokens, address in rows
    )


def _example_body(config: NodeConfig, router: RouterOptions) -> tuple[str, dict[str, object]]:
    """Return path and body of a request, without the model."""
    if config.pooling is not None and config.pooling.task == EMBED:
        return "embeddings", {"input": ["Hello", "world"]}
    if config.pooling is not None:
        return "rerank", {"query": "capital of France", "documents": ["Paris", "a river"]}
    limits: dict[str, object] = {"max_tokens": 32, "stream": True}
    if router.chat_template or has_chat_template(Path(config.model_dir)):
        return "chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **limits}
    return "completions", {"prompt": "Hello", **limits}


def has_chat_template(model_dir: Path) -> bool:
    if (model_dir / "chat_template.jinja").is_file():
        return True
    config = model_dir / "tokenizer_config.json"
    return config.is_file() and "chat_template" in json.loads(config.read_bytes())
