"""Token ids as transformers has them, from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from pdserve.errors import CheckpointError
from router.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\ttab",
    "naïve 日本語 🙂👩‍👩‍👧 \u0000 \ufffd",
    "<|im_start|>user\nhi<|im_end|>",
    "x<tool call>y ünïcode⁂",
    "\r\nwindows\r\n",
    "</s> <s> <unk>",
]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "byte_level": ("byte_level", {"bos_token": "<|begin|>", "eos_token": "<|end|>"}),
    "no_bos": ("byte_fallback", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}),
    "bos_eos": ("byte_level", {"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": True}),
    "both": (
        "byte_fallback",
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    ),
    "template": ("byte_fallback", {"bos_token": "<s>", "eos_token": "</s>"}),
    "token_objects": (
        "byte_level",
        {"bos_token": {"content": "<|begin|>", "__type": "AddedToken"}, "add_bos_token": True, "eos_token": None},
    ),
    "config_only_tokens": (
        "byte_level",
        {"eos_token": "<|eot|>", "extra_special_tokens": ["<|extra|>"], "bos_token": "<|begin|>"},
    ),
    "metaspace": ("metaspace", {"eos_token": "</s>"}),
}


@pytest.fixture(scope="module", params=CONFIGS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    kind, config = CONFIGS[request.param]
    directory = small_tokenizers.write(
        tmp_path_factory.mktemp(request.param), getattr(small_tokenizers, kind)(), **config
    )
    return Tokenizer.load(directory), transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", [*TEXTS, "<|eot|> and <|extra|>"])
def test_encoding_equals_transformers(both: tuple[Tokenizer, Any], text: str, special: bool) -> None:
    ours, theirs = both
    assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)


@given(text=st.text(max_size=40))
def test_encoding_of_any_text_equals_transformers(both: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = both
    assert ours.encode(text) == theirs.encode(text)


def test_decoding_equals_transformers(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    for text in TEXTS:
        ids = theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_joined_token_bytes_are_the_text(both: tuple[Tokenizer, Any]) -> None:
    ours, _ = both
    text = "naïve 日本語 🙂"
    if "日" in ours.decode(ours.encode(text)):
        assert b"".join(map(ours.token_bytes, ours.encode(text, add_special_tokens=False))).decode().strip() == text


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.post_processor = processors.ByteLevel()
    tokenizer = Tokenizer.load(small_tokenizers.write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("much more than four tokens")) == "much more than four tokens"


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_error_names_the_broken_file(tmp_path: Path, broken: str) -> None:
    small_tokenizers.write(tmp_path, small_tokenizers.byte_level())
    (tmp_path / broken).write_text("{")
    with pytest.raises(CheckpointError, match=broken):
        Tokenizer.load(tmp_path)


def test_error_names_the_checkpoint_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
