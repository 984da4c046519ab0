"""Flags from ``--config FILE`` and from the environment: precedence, lists, switches, errors and their sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from cli.up.flags import make_parser as up_parser
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.errors import ConfigError
from prefill_node.__main__ import make_parser as prefill_parser
from router.options import make_parser, parse_options


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        (tmp_path / "serve.yaml").write_text(text)
        return str(tmp_path / "serve.yaml")

    return write


def test_command_line_overrides_environment_overrides_file(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config("port: 1\nmax_queue: 2\nmax-inflight: 3\nmodel: from/file\n")
    monkeypatch.setenv("PDSERVE_PORT", "4")
    monkeypatch.setenv("PDSERVE_MAX_QUEUE", "5")
    options = parse_options(["--config", file, "--port", "6"])
    assert (options.port, options.max_queue, options.max_inflight) == (6, 5, 3)
    assert options.models == (("from/file", "from/file"),)
    assert options.max_connections is None


def test_environment_names_the_file(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CONFIG", config("max-queue: 2"))
    assert parse_options(["m"]).max_queue == 2


def test_model_of_the_command_line_replaces_models_of_the_file(config: Any) -> None:
    file = config("model: [a=org/a, b=org/b]\nport: 1")
    both = (("a", "org/a"), ("b", "org/b"))
    assert parse_options(["--config", file]).models == both
    assert parse_options(["--config", file, "--model", "c=org/c"]).models == (("c", "org/c"),)
    options = parse_options(["--config", file, "--served-model-name", "z", "--", "m"])
    assert (options.models, options.port) == ((("z", "m"),), 1)


def test_lists_and_switches(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config("prefill: [p1:1, p2:1]\nlog-requests: yes\nno-dashboard: false\nserved-model-name: [a, b]\n")
    monkeypatch.setenv("PDSERVE_DECODE", "d1:1,d2:1")
    options = parse_options(["--config", file, "m", "--prefill", "p3:1"])
    assert options.prefill == ("p3:1",), "the command line replaces a list"
    assert options.decode == ("d1:1", "d2:1")
    assert options.log_requests
    assert options.dashboard
    assert (options.models, options.aliases) == ((("a", "m"),), ("b",))


def test_words_of_yaml_keep_their_spelling(config: Any) -> None:
    """YAML 1.1 would read ``on`` as true and 1e3 as a number."""
    file = config("kv-checksum: on\nstage-layers: [2, 4]\nenforce-eager: true\ntensor-parallel-size: 2")
    args = prefill_parser().parse_args(["--config", file, "m"])
    assert (args.kv_checksum, args.stage_layers, args.cuda_graphs, args.tp) == ("on", (2, 4), "off", 2)
    assert prefill_parser().parse_args(["--config", file, "m", "--cuda-graphs", "on"]).cuda_graphs == "on"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("port: 1\nmax-quue: 2", "serve.yaml line 2: unknown flag --max-quue; did you mean --max-queue?"),
        ("trust-remote-code: true", "--trust-remote-code is not supported: code from checkpoints never runs"),
        ("port: x", "argument --port: 'x' is not a port; use 0 … 65535 .*; given by .*serve.yaml line 1"),
        ("policy: fair", "invalid choice: 'fair' .*serve.yaml line 1"),
        ("log-requests: 2", "log-requests is '2'; it is a switch: write true or false"),
        ("port: {a: 1}", "line 1: port needs a value or a list of values"),
        ("port:", "line 1: port needs a value or a list of values"),
        ("port: 1\nport: 2", "line 2: port and port set the same; remove one of them"),
        ("config: x", "config is for the command line only"),
        ("lifeline-fd: 3", "lifeline-fd is for the command line only"),
        ("- port", "has no keys; write one flag per line"),
        ("port: [", "serve.yaml is not YAML: while parsing"),
        (
            "host: x\nport: " + "[" * 3000 + "]" * 3000,
            "serve.yaml line 2 is nested too deep; a flag has a value or a list",
        ),
        ("{a: " * 3000 + "1" + "}" * 3000, "serve.yaml line 1 is nested too deep"),
        ("".join(f"{' ' * n}a:\n" for n in range(400)), "serve.yaml line 4 is nested too deep"),
    ],
)
def test_errors_name_line_and_remedy(text: str, error: str, config: Any) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_options(["--config", config(text), "m"])


def test_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_MAX_QUEUE", "many")
    with pytest.raises(ConfigError, match=r"'many' is not a whole number of at least 0 .*given by PDSERVE_MAX_QUEUE"):
        parse_options(["m"])


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file or directory"):
        parse_options(["--config", str(tmp_path / "none.yaml"), "m"])


def test_variables_of_a_kubernetes_service_are_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_PORT", "tcp://10.0.0.7:80")
    monkeypatch.setenv("PDSERVE_SERVICE_PORT", "80")
    assert parse_options(["m"]).port == 8000


def test_children_of_up_take_flags_from_up_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_PORT", "7")
    assert prefill_parser().parse_args(["m", "--lifeline-fd", "3"]).port == 0
    assert make_parser().parse_args(["m"]).port == up_parser().parse_args(["m"]).port == 7


@pytest.mark.parametrize("parser", [make_parser, up_parser])
def test_api_key_is_a_secret_of_the_environment(parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``up`` gives it to its router there; a file of keys on the command line replaces it."""
    monkeypatch.setenv("PDSERVE_API_KEY", "sk-1")
    assert parser().parse_args(["m"]).api_key == "sk-1"
    assert make_parser().parse_args(["m", "--lifeline-fd", "3"]).api_key == "sk-1"
    args = parser().parse_args(["m", "--api-keys", "keys.toml"])
    assert (args.api_keys, args.api_key) == ("keys.toml", None)
    with pytest.raises(ConfigError, match="not allowed with"):
        parser().parse_args(["m", "--api-keys", "keys.toml", "--api-key", "sk-2"])
    with pytest.raises(ConfigError, match="a key has one or more visible ASCII characters"):
        parser().parse_args(["m", "--api-key", "a b"])


def test_explain_shows_where_values_come_from(
    config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(f"model: {EMBEDDED_MODEL}\nmax-num-seqs: 64")
    monkeypatch.setenv("PDSERVE_MAX_WAITING", "32")
    assert main(["explain", "--device", "cpu", "--config", file, "--json"]) == 0
    flags = json.loads(capsys.readouterr().out)["flags"]
    assert flags["max-num-seqs"] == {"value": 64, "source": f"{file} line 2"}
    assert flags["max-waiting"] == {"value": 32, "source": "PDSERVE_MAX_WAITING"}
    assert flags["device"] == {"value": "cpu", "source": "the command line"}
    assert flags["model"]["source"] == f"{file} line 1"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("pdserve rou", "router"),
        ("pdserve up --pol", "--policy"),
        ("pdserve up --policy r", "round-robin"),
        ("pdserve explain --max-num", "--max-num-seqs"),
    ],
)
def test_bash_completes(line: str, offered: str) -> None:
    script = f". /dev/stdin; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _shtab_pdserve 2>/dev/null; "
    script += 'echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], input=_completion("bash"), capture_output=True, text=True)
    assert offered in done.stdout.split(), done.stderr


def _completion(shell: str) -> str:
    command = [sys.executable, "-m", "cli", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout
