"""Commands on pages have flags that exist; the README is short, and its links lead somewhere."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from decode_node.decode_role import add_flags as add_decode_flags
from elastic_node.elastic_role import add_flags as add_elastic_flags
from launcher.doctor import make_parser as make_doctor_parser
from launcher.up_flags import make_parser as make_up_parser
from node.command import role_parser
from prefill_node.prefill_role import add_flags as add_prefill_flags
from router.options import parse_options

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCREEN = 45  # lines


def parse_role(add_flags: Callable[[argparse.ArgumentParser], object], words: list[str]) -> None:
    parser = role_parser("pdserve", "")
    add_flags(parser)
    parser.parse_args(words)


PARSERS: dict[str, Callable[[list[str]], object]] = {
    "up": lambda words: make_up_parser().parse_args(words),
    "prefill": lambda words: parse_role(add_prefill_flags, words),
    "decode": lambda words: parse_role(add_decode_flags, words),
    "serve": lambda words: parse_role(add_elastic_flags, words),
    "router": parse_options,
    "doctor": lambda words: make_doctor_parser().parse_args(words),
}


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of each command in a code block that a parser above is for."""
    text = page.read_text().replace("\\\n", " ")
    text = re.sub(r"^( *)scripts/serve", r"\1pdserve up", text, flags=re.MULTILINE)
    found = re.findall(
        rf"^(?:    |)(?:\$ )?(?:\.venv/bin/)?pdserve +((?:{'|'.join(PARSERS)})\b.*)$", text, re.MULTILINE
    )
    return [shlex.split(re.split(r" +#| +[&>|]", line)[0]) for line in found if "`" not in line]


COMMANDS = [pytest.param(words, id=f"{page.stem}: {' '.join(words)}") for page in PAGES for words in commands_of(page)]


def test_pages_have_commands() -> None:
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize("words", COMMANDS)
def test_programs_parse_the_commands_of_pages(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ellipsis stands for a value, or for further flags."""
    (tmp_path / "serve.yaml").touch()
    monkeypatch.chdir(tmp_path)
    command, *flags = words
    pairs = itertools.pairwise(["", *flags])
    PARSERS[command](["host:1" if word == "…" else word for before, word in pairs if word != "…" or before[:2] == "--"])


def test_readme_has_one_screen_before_more() -> None:
    assert len(README[: README.index("\n## ")].splitlines()) <= SCREEN
    assert re.findall(r"^## (.+)$", README, re.MULTILINE)[0] == "More"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text())
    assert links
    assert sorted(link for link in links if not (ROOT / link).exists()) == []
