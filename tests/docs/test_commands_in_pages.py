"""Commands on pages have flags that exist; the README is short, and its links lead somewhere."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from cli.commands import COMMANDS, parser_of
from router.options import parse_options

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCREEN = 45  # lines


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of each command in a code block of a command of pdserve."""
    text = page.read_text().replace("\\\n", " ")
    text = re.sub(r"^( *)scripts/serve", r"\1pdserve up", text, flags=re.MULTILINE)
    lines = re.findall(
        rf"^(?:    |)(?:\$ )?(?:\.venv/bin/)?pdserve +((?:{'|'.join(COMMANDS)})\b.*)$", text, re.MULTILINE
    )
    return [shlex.split(re.split(r" +#| +[&>|]", line)[0]) for line in lines if "`" not in line]


PARAMS = [pytest.param(words, id=f"{page.stem}: {' '.join(words)}") for page in PAGES for words in commands_of(page)]


def test_pages_have_commands() -> None:
    assert len(PARAMS) >= 20


@pytest.mark.parametrize("words", PARAMS)
def test_programs_parse_the_commands_of_pages(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ellipsis stands for a value, or for further flags."""
    (tmp_path / "serve.yaml").touch()
    monkeypatch.chdir(tmp_path)
    command, *flags = words
    pairs = itertools.pairwise(["", *flags])
    given = ["host:1" if word == "…" else word for before, word in pairs if word != "…" or before[:2] == "--"]
    parse_options(given) if command == "router" else parser_of(command).parse_args(given)


def test_readme_has_one_screen_before_more() -> None:
    assert len(README[: README.index("\n## ")].splitlines()) <= SCREEN
    assert re.findall(r"^## (.+)$", README, re.MULTILINE)[0] == "More"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text())
    assert links
    assert sorted(link for link in links if not (ROOT / link).exists()) == []
