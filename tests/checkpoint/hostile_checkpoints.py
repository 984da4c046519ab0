"""Hostile checkpoints: each is the embedded model with one file changed, and the error that must refuse it."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.checkpoint.hub import EMBEDDED_MODEL


class Hostile(NamedTuple):
    file: str
    change: Callable[[Path], object]  # damages the file at the path
    error: str  # a regular expression


def build(directory: Path, case: Hostile) -> Path:
    shutil.copytree(EMBEDDED_MODEL, directory, ignore=shutil.ignore_patterns(".pdserve*"))
    path = directory / case.file
    path.parent.mkdir(exist_ok=True)
    case.change(path)
    return directory


def fields(**changes: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def content(data: bytes | str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data.encode() if isinstance(data, str) else data)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def replace_sparse(path: Path, start: bytes, size: int) -> None:
    path.write_bytes(start)
    os.truncate(path, size)


def sparse(size: int) -> Callable[[Path], object]:
    return lambda path: replace_sparse(path, b"", size)


def header(tensors: dict[str, Any] | bytes, size: int = 0) -> Callable[[Path], object]:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return content(struct.pack("<Q", len(text)) + text + bytes(size))


def many_tensors(number: int) -> Callable[[Path], object]:
    """Return a change that writes this many tensors without shapes; it makes them when it is called."""
    return lambda path: header({f"t{i}": {"dtype": "F32"} for i in range(number)})(path)


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def rope(**params: Any) -> Callable[[Path], object]:
    return fields(rope_parameters={"rope_theta": 1e4, **params})


def without_tokens(path: Path) -> None:
    fields(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[])(path)
    path.with_name(TOKENIZER_CONFIG).unlink()


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DIGITS = int("9" * 400)

#: Refused by every command that reads the model's configuration or weights.
NODE: dict[str, Hostile] = {
    "10^9 layers": Hostile(CONFIG, fields(num_hidden_layers=10**9), "num_hidden_layers = 1000000000; .* 1 to 1024"),
    "2^62 positions": Hostile(CONFIG, fields(max_position_embeddings=2**62), "max_position_embeddings = .* 134217728"),
    "2^62 tokens": Hostile(CONFIG, fields(vocab_size=2**62), "vocab_size = .* to 2097152"),
    "2^40 channels": Hostile(CONFIG, fields(hidden_size=2**40), "hidden_size = .* to 131072"),
    "2^40 in MLPs": Hostile(CONFIG, fields(intermediate_size=2**40), "intermediate_size = .* to 1048576"),
    "2^40 heads": Hostile(CONFIG, fields(num_attention_heads=2**40), "num_attention_heads = .* to 4096"),
    "2^40 KV heads": Hostile(CONFIG, fields(num_key_value_heads=2**40), "num_key_value_heads = .* to 4096"),
    "2^40 per head": Hostile(CONFIG, fields(head_dim=2**40), "head_dim = .* to 4096"),
    "400 digits": Hostile(CONFIG, fields(vocab_size=DIGITS), "vocab_size = 9{100}…; .* 2097152"),
    "400 digits of theta": Hostile(CONFIG, rope(rope_theta=DIGITS), "rope_theta = 9+…; .* number from 2 to 1e"),
    "400 digits of quantization": Hostile(
        CONFIG, fields(quantization_config={"quant_method": "fp8", "x": DIGITS}), "beyond 64 bits"
    ),
    "theta 1": Hostile(CONFIG, rope(rope_type="yarn", rope_theta=1.0), "rope_theta = 1.0; .* from 2"),
    "factor 0": Hostile(CONFIG, rope(rope_type="linear", factor=0), "factor = 0; it must be a number from 0.001"),
    "trained length 0": Hostile(
        CONFIG, rope(rope_type="yarn", original_max_position_embeddings=0), "original_max_position_embeddings = 0"
    ),
    "equal frequency factors": Hostile(
        CONFIG, rope(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=4), "not above low_freq_factor"
    ),
    "window 2^62": Hostile(
        CONFIG, fields(use_sliding_window=True, sliding_window=2**62), "sliding_window = .* to 134217728"
    ),
    "window of text": Hostile(
        CONFIG, fields(use_sliding_window=True, sliding_window=8, max_window_layers="x"), "max_window_layers = 'x'"
    ),
    "10^5 layer types": Hostile(
        CONFIG,
        fields(use_sliding_window=True, sliding_window=8, layer_types=["full_attention"] * 10**5),
        "100000 layer_types for 6 layers",
    ),
    "layer types are a number": Hostile(CONFIG, fields(use_sliding_window=True, layer_types=6), "has 6 layer_types"),
    "10^5 end tokens": Hostile(
        "generation_config.json", fields(eos_token_id=[1] * 10**5), "100000 end-of-sequence tokens, the limit"
    ),
    "end token 2^62": Hostile("generation_config.json", fields(eos_token_id=2**62), "generation_config.* below 4096"),
    "flag of text": Hostile(CONFIG, fields(attention_bias="no"), "attention_bias = 'no'; it must be true or false"),
    "epsilon 10^300": Hostile(CONFIG, fields(rms_norm_eps=1e300), r"rms_norm_eps = 1e\+300"),
    "architecture is a list": Hostile(
        CONFIG, fields(architectures=[["x"]]), r"architectures = \[\['x'\]\]; it must be a list of classes"
    ),
    "long architecture": Hostile(
        CONFIG, fields(architectures=["x" * 10**6]), r"architectures = \['x{95,99}…; it must be a list of classes"
    ),
    "dtype is an object": Hostile(CONFIG, fields(torch_dtype={"a": 1}), "dtype {'a': 1}; supported are"),
    "quantization is a list": Hostile(CONFIG, fields(quantization_config=["unquantized"]), "quantized checkpoint"),
    "nested 1,000 levels": Hostile(CONFIG, content('{"a":' + nested(1000) + "}"), "nested more than 64 levels"),
    "nested 10^6 levels": Hostile(CONFIG, content('{"a":' + nested(10**6) + "}"), "nested more than 64 levels"),
    "config of 10 GB": Hostile(CONFIG, sparse(10**10), "10000000000 bytes, the limit is 4194304"),
    "config is a pipe": Hostile(CONFIG, pipe, "is not a regular file"),
    "10^6 tensors": Hostile(WEIGHTS, many_tensors(10**6), "1000000 tensors, the limit is 262144"),
    "header of 2^63 bytes": Hostile(WEIGHTS, content(b"\0" * 7 + b"\x80" + bytes(100)), "is truncated at 108 bytes"),
    "header of 1 GB": Hostile(
        WEIGHTS,
        lambda path: replace_sparse(path, struct.pack("<Q", 10**9), 2 * 10**9),
        "header of 1000000000 bytes, the limit is 33554432",
    ),
    "nested header": Hostile(WEIGHTS, header(nested(10**6).encode()), "broken safetensors header"),
    "overlapping tensors": Hostile(
        WEIGHTS, header({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, 12), "tensor 'b' begins at byte"
    ),
    "gap between tensors": Hostile(
        WEIGHTS, header({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, 12), "tensor 'b' begins at byte"
    ),
    "shape that overflows": Hostile(
        WEIGHTS, header({"a": tensor([2**40, 2**40], 0, 0)}), "tensor 'a' has 0 bytes for shape .* of F32"
    ),
    "negative shape": Hostile(WEIGHTS, header({"a": tensor([-1, -1], 0, 4)}, 4), "dimensions of at least 0"),
    "unknown dtype": Hostile(WEIGHTS, header({"a": tensor([1], 0, 4, "F31")}, 4), "dtype 'F31'; known are F64"),
    "tensor beyond the end": Hostile(WEIGHTS, header({"a": tensor([2**38], 0, 2**40)}), "ends at byte .* truncated"),
    "bytes behind the end": Hostile(WEIGHTS, header({"a": tensor([1], 0, 4)}, 100), "96 bytes behind its last tensor"),
    "weights are a pipe": Hostile(WEIGHTS, pipe, "is not a regular file"),
    "index of another directory": Hostile(
        INDEX, content(json.dumps({"weight_map": {"a": "../../etc/passwd"}})), "which is not a file beside it"
    ),
    "index of numbers": Hostile(INDEX, content('{"weight_map": {"a": 1}}'), "Expected `str`, got `int`"),
    "nested index": Hostile(INDEX, content('{"weight_map": ' + nested(10**6) + "}"), "cannot be read"),
}

SETS_AND_BRANCHES = "".join(f"{{%set a{i}=1%}}" for i in range(20_000)) + "{%if 1%}{%endif%}" * 20_000
TEMPLATE = "chat_template.jinja"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

#: Refused by the router, which reads the tokenizer and the chat template.
ROUTER: dict[str, Hostile] = {
    "nested expression": Hostile(TEMPLATE, content("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"), "nested too deeply"),
    "nested blocks": Hostile(TEMPLATE, content("{% if x %}" * 9000 + "{% endif %}" * 9000), "nested too deeply"),
    "chain of filters": Hostile(TEMPLATE, content("{{ x" + "|trim" * 20_000 + " }}"), "nested too deeply"),
    "21 nested loops": Hostile(
        TEMPLATE, content("{% for a in x %}" * 21 + "{% endfor %}" * 21), "too many statically nested blocks"
    ),
    "250,000 digits": Hostile(TEMPLATE, content("{{ " + "9" * 250_000 + " }}"), "limit .* for integer string"),
    "argument given twice": Hostile(TEMPLATE, content("{{ f(a=1, a=2) }}"), "keyword argument repeated"),
    "break outside loops": Hostile(TEMPLATE, content("{% break %}"), "'break' outside loop"),
    "compiles for minutes": Hostile(TEMPLATE, content(SETS_AND_BRANCHES), "more than 5 s to compile"),
    "template of 10 GB": Hostile(TEMPLATE, sparse(10**10), "10000000000 bytes, the limit is 1048576"),
    "template is not text": Hostile(TEMPLATE, content(b"\xff\xfe"), "is not UTF-8"),
    "template is a pipe": Hostile(TEMPLATE, pipe, "is not a regular file"),
    "long template in the config": Hostile(
        TOKENIZER_CONFIG, fields(chat_template="x" * (1 << 21)), "2097152 characters, the limit is 1048576"
    ),
    "templates without names": Hostile(TOKENIZER_CONFIG, fields(chat_template=[{}]), "missing required field `name`"),
    "template is a number": Hostile(TOKENIZER_CONFIG, fields(chat_template=5), "Expected `str .*, got `int`"),
    "token id of text": Hostile(
        TOKENIZER_CONFIG, fields(added_tokens_decoder={"x": {"content": "x"}}), "Expected `int`"
    ),
    "token without content": Hostile(TOKENIZER_CONFIG, fields(added_tokens_decoder={"1": {}}), "field `content`"),
    "special tokens are a number": Hostile(TOKENIZER_CONFIG, fields(additional_special_tokens=5), "got `int`"),
    "nested tokenizer config": Hostile(TOKENIZER_CONFIG, content('{"a":' + nested(10**6) + "}"), "nested more than"),
    "tokenizer config of 10 GB": Hostile(TOKENIZER_CONFIG, sparse(10**10), "bytes, the limit is 16777216"),
    "tokenizer of 10 GB": Hostile(TOKENIZER, sparse(10**10), "bytes, the limit is 134217728"),
    "tokenizer is a pipe": Hostile(TOKENIZER, pipe, "is not a regular file"),
    "nested tokenizer": Hostile(TOKENIZER, content('{"a":' + nested(10**6) + "}"), "cannot be read"),
    "tokenizer that panics": Hostile(
        TOKENIZER, fields(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "cannot be read"
    ),
    "token id 4 * 10^9": Hostile(
        TOKENIZER,
        fields(model={"type": "BPE", "vocab": {"a": 0, "b": 4 * 10**9}, "merges": []}, added_tokens=[]),
        "ids up to 4000000000; .* limit of ids is 4194304",
    ),
    "no tokens": Hostile(
        TOKENIZER,
        without_tokens,
        "needs at least one",
    ),
}
