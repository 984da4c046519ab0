"""Flags become NodeOptions and back."""

from __future__ import annotations

import argparse
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.up.flags import make_parser
from pdserve.config.node_options import NodeOptions, add_node_flags, node_options_from, node_words
from pdserve.errors import ConfigError
from pdserve.flags.meanings import (
    DEFAULTS,
    DEFAULTS_WITH_VALUE,
    MEANINGS,
    OF_MODEL,
    OF_ROUTERS,
    REASONS,
    RENAMED,
    SCALED,
    VALUES,
)
from pdserve.flags.parser import CommandParser
from pdserve.flags.value_types import parse_size
from prefill_node.__main__ import make_parser as make_prefill_parser


def parse(argv: list[str]) -> NodeOptions:
    parser = CommandParser()
    add_node_flags(parser)
    return node_options_from(parser.parse_args(argv))


def test_flags_of_vllm_are_understood() -> None:
    words = "--tensor-parallel-size 2 --pipeline-parallel-size 3 --max-num-batched-tokens 512 --enforce-eager"
    options = parse(["m", *words.split(), "--gpu-memory-utilization", "0.5"])
    assert options == NodeOptions(
        model="m", tp=2, pp=3, max_batch_tokens=512, cuda_graphs="off", gpu_memory_utilization=0.5
    )
    with pytest.raises(ConfigError, match="code from checkpoints never runs"):
        parse(["m", "--trust-remote-code"])


@pytest.mark.parametrize(
    ("theirs", "ours", "line"),
    [
        ("--model some/model", "some/model", "MODEL here, the first word after the command"),
        ("m --dtype half", "m --dtype float16", "--dtype half is float16 here"),
        ("m --dtype=float", "m --dtype float32", "--dtype float is float32 here"),
        ("m --max-model-len 4k", "m --max-model-len 4000", "--max-model-len 4k is 4000 here"),
        ("m --max-model-len=4K", "m --max-model-len 4096", "--max-model-len 4K is 4096 here"),
        ("m --max-model-len auto", "m", "--max-model-len auto is the default here"),
        ("m --max-num-batched-tokens 1.5k", "m --max-batch-tokens 1500", "1.5k is 1500 here"),
        ("m --attention-backend FLASHINFER", "m --attention-backend flashinfer", "FLASHINFER is flashinfer here"),
        ("m -q awq --tp 2", "m --quantization awq --tp 2", "-q is --quantization here"),
        ("m --quantization awq_marlin", "m --quantization awq", "--quantization awq_marlin is awq here"),
        ('m --limit-mm-per-prompt {"image":0}', "m", "--limit-mm-per-prompt has no effect: models read text only"),
        ("m -O3", "m", "-O3 has no effect: nothing is compiled but kernels"),
        ("m -O 3 --tp 2", "m --tp 2", "-O has no effect: nothing is compiled but kernels"),
        ("m --guided-decoding-backend xgrammar", "m", "--guided-decoding-backend has no effect: llguidance"),
        ("m --disable-frontend-multiprocessing", "m", "has no effect: a node's frontend and engine are two processes"),
        ("m --root-path /v2 --tp 2", "m --tp 2", "--root-path has no effect: pages and redirects are relative"),
    ],
)
def test_flags_and_values_of_vllm_are_ours_with_a_line(
    theirs: str, ours: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(theirs.split()) == parse(ours.split())
    (shown,) = capsys.readouterr().err.splitlines()
    assert line in shown


def test_wrong_values_and_wrong_flags_are_named_at_once() -> None:
    words = ["m", "--dtype", "int8", "--bogus", "--max-num-seqs", "x", "--revision", "main"]
    with pytest.raises(ConfigError) as raised:
        make_prefill_parser().parse_args(words)
    assert str(raised.value).count("Also, ") == 3
    for part in ("'int8'", "--bogus", "'x' is not a whole number", "--revision"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        ("--mem_fraction_static=0.8", "use --gpu-memory-utilization$"),
        ("--disable-cuda-graph", "use --cuda-graphs off$"),
        ("-dp", "use `pdserve up --decode N`"),
        ("-O0", "use --cuda-graphs off$"),
        ("-O.mode", "-O.mode is not supported: nothing is compiled but kernels"),
        ("--compilation-config.mode", "not supported: nothing is compiled but kernels"),
        ("--revision", "hf download ID --revision NAME"),
        ("--hf-overrides", "config.json"),
        ("--override-generation-config", "requests set these fields"),
        ("--kv-transfer-config", "not supported: --kv-connector names the back end"),
        ("--gpu-memory", "did you mean --gpu-memory-utilization"),
        ("--tensor-paralel-size", "did you mean --tensor-parallel-size"),
        ("--tool-call-parser", "a flag of `pdserve router` and `pdserve up`, not of pdserve prefill"),
        ("--ssl-keyfile", "--ssl-keyfile is --tls-key, a flag of `pdserve router`"),
        ("--foo", "unknown flag --foo; see pdserve prefill --help"),
    ],
)
def test_unknown_flags_are_explained_by_meaning(flag: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make_prefill_parser().parse_args(["m", flag, "2"])


def test_meanings_are_flags_that_exist_and_hide_none() -> None:
    flags = set(make_parser()._option_string_actions)
    meant = {meaning.split()[0] for meaning in MEANINGS.values() if meaning.startswith("--")}
    assert meant | OF_ROUTERS <= flags
    assert not flags & {*MEANINGS, *REASONS, *DEFAULTS, *DEFAULTS_WITH_VALUE, *RENAMED, *OF_MODEL}
    assert {*RENAMED.values(), *VALUES, *SCALED} <= flags


def test_help_shows_the_defaults() -> None:
    text = re.sub(r"\s+", " ", make_parser().format_help())
    assert "--device DEVICE auto, cpu, cuda or cuda:N (default auto)" in text
    assert re.search(r"--tool-call-parser NAME one of auto, none, [\w, ]+ \(default auto\)", text)
    assert "default None" not in text
    assert text.count("(default: --pp)") == 2, "a help text that names its default keeps it"


def test_flag_defaults_equal_option_defaults() -> None:
    assert parse(["a/model"]) == NodeOptions(model="a/model")


@given(
    st.builds(
        NodeOptions,
        model=st.sampled_from(["a", "org/name", "/dir with blank"]),
        served_model_name=st.none() | st.just("name"),
        device=st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
        dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
        load_format=st.sampled_from(["auto", "dummy"]),
        max_model_len=st.none() | st.integers(1, 10**6),
        block_size=st.integers(1, 512),
        kernel_block_size=st.none() | st.integers(1, 512),
        kv_cache_memory=st.none() | st.integers(1, 2**50),
        kv_checksum=st.sampled_from([None, "on", "off"]),
        gpu_memory_utilization=st.floats(0.01, 1.0),
        peer_timeout=st.floats(1.0, 600.0),
        attention_backend=st.sampled_from(["auto", "torch", "triton", "flashinfer"]),
        cuda_graphs=st.sampled_from(["auto", "on", "off"]),
        max_num_seqs=st.integers(1, 4096),
        max_batch_tokens=st.none() | st.integers(1, 10**6),
        itl_target=st.none() | st.floats(0.0, 60_000.0),
        ttft_target=st.floats(0.0, 60_000.0),
        max_waiting=st.integers(1, 10**6),
        threads=st.none() | st.integers(1, 256),
    )
)
def test_options_survive_the_command_line(options: NodeOptions) -> None:
    assert parse(node_words(options)) == options


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1K", 1000), ("2GiB", 2 << 30), ("1.5 gib", 3 << 29), ("10MB", 10**7), ("1Ti", 1 << 40)],
)
def test_sizes_with_units_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1X", "1e9", "0x10", "1 0", "nan"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)
