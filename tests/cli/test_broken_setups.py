"""``pdserve doctor`` fails exactly where ``pdserve up`` would: broken checkpoints, flags, memory and ports.

``explain`` refuses what a node refuses, but for memory and ports.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.doctor import command as doctor
from cli.explain import main as explain_main
from cli.up.command import main as up_main
from pdserve.checkpoint.hub import EMBEDDED_MODEL

Break = Callable[[Path], None]
NOTHING: Break = lambda directory: None  # noqa: E731
WEIGHTS = "model.safetensors"


def change_json(file: str, **fields: Any) -> Break:
    def change(directory: Path) -> None:
        path = directory / file
        path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))

    return change


def write(file: str, text: str) -> Break:
    def change(directory: Path) -> None:
        (directory / file).write_text(text)

    return change


def remove(file: str) -> Break:
    return lambda directory: (directory / file).unlink()


def cut_weights(directory: Path) -> None:
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


def change_header(old: bytes, new: bytes) -> Break:
    """Replace bytes of the safetensors header by as many others."""

    def change(directory: Path) -> None:
        data = (directory / WEIGHTS).read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        assert len(old) == len(new)
        assert old in data[:end]
        (directory / WEIGHTS).write_bytes(data[:end].replace(old, new, 1) + data[end:])

    return change


def lose_shard(directory: Path) -> None:
    files = {"model.embed_tokens.weight": WEIGHTS, "model.norm.weight": "model-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


TEMPLATE = "chat_template.jinja"
UNKNOWN_NORMALIZER = change_json("tokenizer.json", normalizer={"type": "x"})
starts = pytest.mark.slow  # nodes must start before the fault shows

CASES = [
    pytest.param(cut_weights, [], "checkpoint", "truncated", id="cut safetensors"),
    pytest.param(lose_shard, [], "checkpoint", "model-00002", id="missing shard"),
    pytest.param(remove(WEIGHTS), [], "checkpoint", "no *.safetensors", id="no weights"),
    pytest.param(remove("config.json"), [], "checkpoint", "config.json", id="no config"),
    pytest.param(write("config.json", "{"), [], "checkpoint", "config.json", id="broken config"),
    pytest.param(write("tokenizer.json", "{}"), [], "checkpoint", "tokenizer.json", id="no end token"),
    pytest.param(change_header(b"BF16", b"I999"), [], "checkpoint", "I999", id="unknown dtype"),
    pytest.param(
        change_json("config.json", quantization_config={"quant_method": "x"}), [], "checkpoint", "x", id="format"
    ),
    pytest.param(NOTHING, ["--kv-cache-memory", "1K"], "checkpoint", "--kv-cache-memory", id="small memory"),
    pytest.param(NOTHING, ["--max-model-len", "99999"], "checkpoint", "99999", id="too long"),
    pytest.param(NOTHING, ["--tp", "3"], "checkpoint", "tp 3", id="indivisible"),
    pytest.param(NOTHING, ["--device", "cuda:63"], "device", "cuda:63", id="no such GPU"),
    pytest.param(NOTHING, ["--port", "TAKEN"], "port", "in use", id="busy port"),
    pytest.param(change_header(b"3.mlp.up_proj", b"3.mlp.xx_proj"), [], "tensors", "layers.3", marks=starts, id="name"),
    pytest.param(change_header(b'"BF16"', b'"I16" '), [], "tensors", "dtype I16", marks=starts, id="wrong dtype"),
    pytest.param(change_json("config.json", intermediate_size=100), [], "tensors", "shape", marks=starts, id="shape"),
    pytest.param(NOTHING, ["--kv-cache-memory", "100T"], "memory", "free on cpu", marks=starts, id="large memory"),
    pytest.param(remove("tokenizer.json"), [], "tokenizer", "tokenizer.json", marks=starts, id="no tokenizer"),
    pytest.param(UNKNOWN_NORMALIZER, [], "tokenizer", "tokenizer.json", marks=starts, id="broken tokenizer"),
    pytest.param(write(TEMPLATE, "{% if"), [], "tokenizer", "template", marks=starts, id="broken template"),
    pytest.param(write("generation_config.json", "["), [], "checkpoint", "generation_config.json", id="defaults"),
]


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.mark.parametrize(("spoil", "flags", "check", "words"), CASES)
def test_explain_doctor_and_up_refuse_the_same(
    spoil: Break,
    flags: list[str],
    check: str,
    words: str,
    tmp_path: Path,
    taken_port: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_check_nixl", lambda *args: ())  # slow, and none of the cases concerns it
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, model)
    spoil(model)
    flags = [taken_port if word == "TAKEN" else word for word in flags]
    node = [str(model), "--device", "cpu", "--threads", "1", "--kv-cache-memory", "64MiB"]
    if check in ("checkpoint", "tensors"):
        assert explain_main([*node, *flags]) == 2
        assert words in capfd.readouterr().err
    command = [*node, "--port", "0", *flags]
    assert doctor.main(command) == 1
    *findings, verdict = capfd.readouterr().out.strip().splitlines()
    assert verdict == f"verdict: it would not start, {check} failed"
    assert any(re.match(f"fail +{check} .*{re.escape(words)}", line) for line in findings), findings
    assert up_main(command) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("pdserve: error: ")
    assert words in error
