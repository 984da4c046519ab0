"""Hostile checkpoints are refused with a clear error, within seconds and little memory, by every command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, node_config
from fast_set import examples, sampled
from hostile_checkpoints import NODE, ROUTER, Hostile, build, fields
from hypothesis import given
from hypothesis import strategies as st

import runner
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.device import detect_devices
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.errors import CheckpointError, PdserveError, RequestError
from router.server import load_tokenizer
from router.text.chat.template import RenderRequest
from router.text.tokenizer import Tokenizer

SECONDS = 10.0  # CPU time; 10^9 layers took 25 s
MEMORY = 1 << 20  # KiB; 10^9 layers took 7.7 GiB
LONGEST = 1200  # characters of an error, with the path of the test's directory

# A process inherits the peak memory of the one that starts it, so a small one starts each command and measures it.
MEASURE = """
import json, os, sys
pid = os.posix_spawn(sys.executable, [sys.executable, "-m", *sys.argv[2:]], os.environ)
_, status, used = os.wait4(pid, 0)
with open(sys.argv[1], "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), used.ru_maxrss, used.ru_utime + used.ru_stime], file)
"""

COMMANDS = {
    "explain": ("cli", "explain"),
    "doctor": ("cli", "doctor"),
    "node": ("prefill_node", "--port", "0"),
    "router": ("router", "--port", "0", "--decode", "127.0.0.1:1"),
}
IN_ALL_COMMANDS = ("10^9 layers", "10^6 tensors", "nested 10^6 levels", "2^62 positions", "shape that overflows")
IN_THE_ROUTER = ("nested expression", "21 nested loops", "compiles for minutes", "token id 4 * 10^9")


def read(directory: Path) -> None:
    """Read a checkpoint as a node does before it starts."""
    resolve(NodeOptions(model=str(directory)), detect_devices("cpu", 1)[0], {})


def check(error: str, case: Hostile) -> None:
    assert re.search(case.error, error, re.DOTALL), error
    assert case.file in error or "chat template" in error
    assert len(error) < LONGEST, len(error)


@pytest.mark.parametrize("name", NODE)
def test_a_hostile_config_or_weight_file_is_refused(name: str, tmp_path: Path) -> None:
    directory = build(tmp_path / "model", NODE[name])
    started = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read(directory)
    assert time.process_time() - started < SECONDS
    check(str(caught.value), NODE[name])


@pytest.mark.parametrize("name", ROUTER)
def test_a_hostile_tokenizer_or_template_is_refused(name: str, tmp_path: Path) -> None:
    directory = build(tmp_path / "model", ROUTER[name])
    started = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(str(directory))
    assert time.process_time() - started < SECONDS
    check(str(caught.value), ROUTER[name])


def run(command: str, directory: Path, case: Hostile) -> None:
    """Run a command, which must refuse the checkpoint."""
    module, *flags = COMMANDS[command]
    where = [*flags, str(directory)] if module == "cli" else [str(directory), *flags]
    device = [] if command == "router" else ["--device", "cpu"]
    measured = directory.with_name("measured.json")
    command_line = [sys.executable, "-c", MEASURE, str(measured), module, *where, *device]
    done = subprocess.run(command_line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    returncode, memory, seconds = json.loads(measured.read_text())
    assert returncode == (1 if command == "doctor" else 2), done.stdout
    assert "Traceback" not in done.stdout
    assert re.search(case.error, done.stdout, re.DOTALL), done.stdout
    assert memory < MEMORY
    assert seconds < SECONDS  # CPU time of the command and its children


@pytest.mark.parametrize(("command", "name"), sampled(("explain", "doctor", "node"), IN_ALL_COMMANDS, every=5))
def test_commands_refuse_a_hostile_config_or_weight_file(command: str, name: str, tmp_path: Path) -> None:
    run(command, build(tmp_path / "model", NODE[name]), NODE[name])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "compiles for minutes")) for name in IN_THE_ROUTER],
)
def test_routers_refuse_a_hostile_tokenizer_or_template(name: str, tmp_path: Path) -> None:
    run("router", build(tmp_path / "model", ROUTER[name]), ROUTER[name])


def test_nothing_of_a_checkpoint_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "executed"
    code = f"open({str(marker)!r}, 'w').close()"
    directory = make_checkpoint(tmp_path / "model", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((EMBEDDED_MODEL / name).read_bytes())
    (directory / "pytorch_model.bin").write_bytes(f"cbuiltins\nexec\n(V{code}\ntR.".encode())  # a pickle
    for name in ("modeling_llama", "tokenization_llama", "configuration_llama", "sitecustomize", "conftest"):
        (directory / f"{name}.py").write_text(code)
    for file, kind in (("config.json", "Model"), ("tokenizer_config.json", "Tokenizer")):
        fields(auto_map={f"Auto{kind}": "modeling_llama.X"}, trust_remote_code=True)(directory / file)
    (directory / "chat_template.jinja").write_text(f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}")
    monkeypatch.chdir(directory)
    read(directory)
    template = load_tokenizer(str(directory)).chat_template
    assert template is not None
    with pytest.raises(RequestError):
        template.render(RenderRequest([{"role": "user", "content": "x"}]))
    runner.build(node_config(directory), lambda stage, fraction: None)
    assert not marker.exists()


def refusal(load: Callable[[], object]) -> PdserveError | None:
    """Return why a checkpoint is refused, if it is. Any other exception is a failure."""
    try:
        load()
    except PdserveError as error:
        refused = error
    else:
        return None
    assert len(str(refused)) < LONGEST
    return refused


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["yarn", "llama3", "dynamic", "linear", "sliding_attention", "unquantized", "silu"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["factor", "type", "a"]), inner),
    max_leaves=5,
)
CONFIG = json.loads((EMBEDDED_MODEL / "config.json").read_text())
ROPE = ("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale")
FIELDS = (*CONFIG, "rope_parameters", "rope_scaling", "layer_types", "quantization_config", "max_window_layers")


@examples(300)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    rope=st.none() | st.dictionaries(st.sampled_from([*ROPE, "original_max_position_embeddings"]), VALUES, max_size=4),
)
def test_any_config_is_read_or_refused(changes: dict[str, Any], rope: dict[str, Any] | None) -> None:
    if rope is not None:
        changes |= {"rope_parameters": {"rope_type": "yarn"} | rope}
    with tempfile.TemporaryDirectory() as directory:
        (path := Path(directory, "config.json")).write_text(json.dumps(CONFIG | changes))
        options = NodeOptions(model=directory, load_format="dummy")
        error = refusal(lambda: resolve(options, detect_devices("cpu", 1)[0], {}))
        assert not isinstance(error, CheckpointError) or str(path) in str(error)


@examples(60)
@given(
    at=st.floats(0, 1, exclude_max=True),
    data=st.binary(min_size=1, max_size=20),
    file=st.sampled_from(["tokenizer.json", "tokenizer_config.json", "config.json"]),
)
def test_any_damage_is_read_or_refused(at: float, data: bytes, file: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        directory = build(Path(parent, "model"), Hostile(file, lambda path: None, ""))
        text = bytearray((directory / file).read_bytes())
        start = int(at * len(text))
        text[start : start + len(data)] = data
        (directory / file).write_bytes(text)
        refusal(lambda: read(directory))
        refusal(lambda: Tokenizer.load(directory))
