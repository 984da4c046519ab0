"""The lists of docs/features.md are the tables of the code; README names each command."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from cli.commands import COMMANDS
from connector import BACK_ENDS
from pdserve.config.attention_backends import ATTENTION_BACKENDS
from pdserve.config.node_options import KV_CACHE_DTYPES, SPECULATE
from pdserve.config.runner_oracle import DEFAULT_ARCHITECTURES
from pdserve.kv.transports import REQUIRABLE
from pdserve.model.families import FAMILIES
from pdserve.model.quantization.weight_formats import stored_formats
from router.completions_api.chat_dialect import ChatDialect
from router.completions_api.completions_dialect import CompletionsDialect
from router.fleet.policy import POLICIES
from router.messages_api.dialect import MessagesDialect
from router.pooling.dialects import EmbeddingsDialect, RerankDialect, ScoreDialect
from router.responses_api.dialect import CompactDialect, ResponsesDialect
from router.text.chat.parsers import REASONING_PARSERS, TOOL_PARSERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "features.md").read_text()
LISTS = {
    title.replace("`", ""): names
    for title, names in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE[PAGE.index("## Lists") :], re.MULTILINE)[1:]
}
DIALECTS = (
    CompletionsDialect,
    ChatDialect,
    ResponsesDialect,
    CompactDialect,
    MessagesDialect,
    EmbeddingsDialect,
    ScoreDialect,
    RerankDialect,
)
TABLES: dict[str, Iterable[str]] = {
    "native families, V2 by default": DEFAULT_ARCHITECTURES,
    "native families, V1 by default": set(FAMILIES) - set(DEFAULT_ARCHITECTURES),
    "… with experts": [name for name, family in FAMILIES.items() if family.moe],
    "… with recurrent layers": [name for name, family in FAMILIES.items() if family.recurrent],
    "… with latent attention": [name for name, family in FAMILIES.items() if family.has_latents],
    "formats of quantized checkpoints": stored_formats(),
    "--kv-cache-dtype": KV_CACHE_DTYPES,
    "--speculate": SPECULATE,
    "attention back ends": ATTENTION_BACKENDS,
    "--kv-connector": BACK_ENDS,
    "--require-transport": REQUIRABLE,
    "--policy": POLICIES,
    "--tool-call-parser": TOOL_PARSERS,
    "--reasoning-parser": REASONING_PARSERS,
    "endpoints that compute": [path for dialect in DIALECTS for path in dialect.paths],
    "commands": COMMANDS,
    "Kubernetes overlays": [path.name for path in (ROOT / "deploy" / "k8s" / "overlays").iterdir() if path.is_dir()],
}


def test_each_list_has_its_table() -> None:
    assert list(LISTS) == list(TABLES)


@pytest.mark.parametrize("title", TABLES)
def test_a_list_names_what_its_table_has(title: str) -> None:
    names = re.findall(r"`([^`]+)`", LISTS[title])
    assert sorted(names) == sorted(TABLES[title])


def test_models_page_has_a_row_for_each_native_family() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []


def test_readme_explains_each_command() -> None:
    table = re.findall(r"^\| (`.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = set(re.findall(r"[\w-]+", " ".join(table)))
    assert [name for name in COMMANDS if name not in words] == []
