"""The command line: fast help, and one line with a remedy per error."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from machine import patience
from pooling_checkpoints import make_embedder

from cli.main import main
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.host.process import run_command


def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *argv],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env={**os.environ, **env},
    )


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Return the exit status and the single stderr line of a failing command."""
    status = main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdserve: error: ")
    assert err.count("\n") == 1
    return status, err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, cli.main\n"
        "try: cli.main.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'triton', 'grpc', 'numpy', 'fastapi', 'rich', 'tokenizers', 'huggingface_hub'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stdout


def test_explain_json_of_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "--device", "cpu", "--kv-cache-memory", "96MiB", "--block-size", "32"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["architecture"] == "Qwen3ForCausalLM"
    assert fields["runner"] in ("V1", "V2")
    assert fields["reasons"]
    # 6 layers × (K, V) × 2 heads × 64 × 2 bytes
    assert fields["bytes_per_token"] == 6 * 2 * 2 * 64 * 2
    assert fields["num_blocks"] == 96 * 2**20 // (32 * fields["bytes_per_token"])
    page = fields["kv_layout"]["kernel_block_size"]
    assert 32 % page == 0
    assert fields["kv_layout"] == {
        "kind": "full_attention",
        "shape": [fields["num_blocks"] * (32 // page), 2, 6, 2, page, 64],
        "strides": [2 * 6 * 2 * page * 64, 6 * 2 * page * 64, 2 * page * 64, page * 64, 64, 1],
        "dtype": "bfloat16",
        "block_size": 32,
        "kernel_block_size": page,
    }


def test_explain_shows_what_each_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model: 6 layers, 2 KV heads of 64."""
    flags = ["explain", "--device", "cpu", "--pp", "2", "--tp", "2", "--stage-layers", "4,2"]
    assert main([*flags, "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [(rank["stage"], rank["shard"], rank["layers"], rank["kv_heads"]) for rank in ranks] == [
        (0, 0, [0, 3], [0, 0]),
        (0, 1, [0, 3], [1, 1]),
        (1, 0, [4, 5], [0, 0]),
        (1, 1, [4, 5], [1, 1]),
    ]
    assert [rank["kv_shape"][1:3] for rank in ranks] == [[1, 4], [1, 4], [1, 2], [1, 2]]
    assert len({rank["kv_shape"][0] for rank in ranks}) == 1
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "rank 3" in out


def test_explain_text_lists_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(EMBEDDED_MODEL), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in out
    assert "chosen: dtype=bfloat16" in out


@pytest.mark.slow
def test_explain_warns_of_memory_that_this_machine_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--kv-cache-memory", "100T"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("warning: a node would not start here: ")
    assert "lower --kv-cache-memory" in last
    assert main(["explain", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


@pytest.mark.slow
def test_flags_of_other_servers_that_mean_the_same_are_accepted_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = ["--enable-prefix-caching", "--enable_chunked_prefill", "-tp", "1", "--kv-cache-memory-bytes=64M"]
    assert main(["explain", "--json", "--device", "cpu", "--tp", "1", "--kv-cache-memory", "64M"]) == 0
    ours = capsys.readouterr().out
    assert main(["explain", "--json", "--device", "cpu", *theirs]) == 0
    shown = capsys.readouterr()
    assert shown.out == ours
    lines = shown.err.splitlines()
    assert [line.split()[2] for line in lines] == [
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
        "-tp",
        "--kv-cache-memory-bytes",
    ]


def test_closed_ports_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert f"nothing listens on {address}" in error_of(capsys, "weights", "show", address)[1]
    assert f"no answer from http://{address}" in error_of(capsys, "probe", f"http://{address}")[1]


@pytest.mark.slow
def test_misspelled_variables_are_named_by_tools(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_BLOCKSIZE", "32")
    assert main(["explain", "--device", "cpu"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean PDSERVE_BLOCK_SIZE?" in line


@pytest.mark.slow
def test_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m cli explain --device cpu | true"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=patience(60))
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["explain", "--kv-cache-memry", "1G"], ["--kv-cache-memry", "--kv-cache-memory"]),
        (["up", "--decod=2"], ["--decod", "--decode"]),
        (["explain", "--block-size", "100", "--kernel-block-size", "30"], ["30", "100"]),
        (["explain", "--block-size", "0"], ["0", "at least 1"]),
        (["explain", "--device", "tpu"], ["tpu", "cuda"]),
        (["explain", "--dtype", "int8"], ["int8", "bfloat16"]),
        (["explain", "--load-format", "gguf"], ["gguf", "dummy"]),
        (["explain", "--cuda-graphs", "maybe"], ["maybe", "off"]),
        (["explain", "--device", "cpu", "--cuda-graphs", "on"], ["CUDA graphs", "--cuda-graphs"]),
        (["explain", "--device", "cpu", "--attention-backend", "flashinfer"], ["flashinfer", "CUDA GPU"]),
        (["explain", "--kv-cache-memory", "lots"], ["lots", "GiB"]),
        (["explain", "--device", "cpu", "--kv-cache-memory", "1K"], ["room", "25165824", "8192 tokens"]),
        (["explain", "--max-model-len", "9999999"], ["9999999", "8192"]),
        (["explain", "/no/such/model"], ["/no/such/model", "directory"]),
        (["explain", "x.gguf"], ["GGUF is not read", "save_pretrained"]),
        (["probe", "http://127.0.0.1:9", "loaded"], ["routers have no service 'loaded'"]),
        (["probe", "127.0.0.1"], ["HOST:PORT"]),
        (["weights", "show", "http://127.0.0.1:9"], ["HOST:PORT"]),
        (["plan", "--costs", "h200-llama-8b", "--gpu", "b200", "--rate", "1"], ["--gpu b200", "measured with h200"]),
        (["up", "--port", "99999"], ["99999", "65535"]),
        (["up", "--device", "cpu", "--decode-tp", "3"], ["tp 3", "heads"]),
        (["up", "--device", "cpu", "--prefill-pp", "7"], ["pp 7", "6"]),
        (["up", "--elastic", "--decode-tp", "2"], ["--elastic", "--decode-tp", "--nodes"]),
        (["up", "--served-model-name", "a", "some/model"], ["MODEL", "before this flag"]),
        (["up", "--nodes", "3", "--prefill", "2"], ["--nodes", "--prefill"]),
        (["up", "--tls-cert", "cert.pem"], ["--tls-cert", "--tls-key"]),
        (["up", "--api-keys", "/no/such/keys"], ["/no/such/keys"]),
        (["up", "--chat-template", "/no/such.jinja"], ["/no/such.jinja"]),
        (["up", "--tool-call-parser", "bogus"], ["bogus", "hermes"]),
        (["up", "--max-inflight", "0"], ["--max-inflight", "at least 1"]),
        (["up", "--host", "no.such.host.invalid"], ["no.such.host.invalid", "--host"]),
        (["bogus"], ["bogus", "explain"]),
        (["explian"], ["explian", "did you mean explain?"]),
        (["up", "--decod", "2", "--trust-remote-code", "--bogus=1"], ["--decode?", "never runs", "--bogus"]),
    ],
)
def test_invalid_flags_give_one_line_with_a_remedy(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    status, line = error_of(capsys, *argv)
    assert status == 2
    for word in words:
        assert word in line


@pytest.mark.parametrize("value", ["", "true", "2"])
def test_invalid_runner_variable_gives_one_line_with_allowed_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PDSERVE_USE_V2_MODEL_RUNNER", value)
    status, line = error_of(capsys, "explain")
    assert status == 2
    assert f"PDSERVE_USE_V2_MODEL_RUNNER={value!r}" in line
    assert "0 (V1) or 1 (V2)" in line


def test_broken_checkpoint_gives_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "config.json" in error_of(capsys, "explain", str(tmp_path))[1]
    shutil.copy(EMBEDDED_MODEL / "config.json", tmp_path)
    assert "download the weights, or give --load-format dummy" in error_of(capsys, "explain", str(tmp_path))[1]
    (tmp_path / "pytorch_model.bin").touch()
    assert "convert 'pytorch_model.bin' to safetensors" in error_of(capsys, "explain", str(tmp_path))[1]
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    status, line = error_of(capsys, "explain", str(tmp_path))
    assert status == 2
    assert "lacks 'vocab_size'" in line
    status, line = error_of(capsys, "explain", str(tmp_path), "--model-impl", "native")
    assert status == 2
    assert "GPT2LMHeadModel" in line
    assert "LlamaForCausalLM" in line


def test_up_refuses_a_used_port_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        status, line = error_of(capsys, "up", "--port", str(port), "/no/such/model")
    assert status == 2
    assert str(port) in line
    assert "in use" in line


@pytest.mark.parametrize("role", ["prefill", "decode", "router", "up"])
def test_programs_print_help_and_refuse_unknown_flags(role: str) -> None:
    assert ("--status-fd" in run(role, "--help").stdout) is (role != "up")
    done = run(role, str(EMBEDDED_MODEL), "--no-such-flag")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr


def test_node_of_both_roles_refuses_an_embedding_model(tmp_path: Path) -> None:
    done = run("serve", str(make_embedder(tmp_path / "m")), "--device", "cpu")
    assert done.returncode == 2
    assert "a node of role both generates" in done.stderr
    assert "pdserve prefill" in done.stderr


def test_traceback_is_printed_only_on_request() -> None:
    done = run("explain", "/no/such/model", PDSERVE_TRACEBACK="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "Traceback" not in run("explain", "/no/such/model", PDSERVE_TRACEBACK="0").stderr


def test_big_endian_machine_is_refused_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    assert run_command(lambda: 0) == 2
    assert capsys.readouterr().err.splitlines() == [
        "pdserve: error: this machine is big-endian; pdserve runs on little-endian machines only"
    ]
