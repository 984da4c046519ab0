"""docs/numbers.md marks figures of old commits with a dagger, and each commit that it names is in the history."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "numbers.md").read_text()
OLD = 200  # commits
NOW = re.findall(r"more than (\d+) commits before ([0-9a-f]{8})", PAGE)
COMMITS = sorted(set(re.findall(r"\b((?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,8})\b(†?)", PAGE)))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def has_history() -> bool:
    """Return whether this is a clone with all commits, and not an archive or a shallow clone."""
    return (ROOT / ".git").exists() and git("rev-parse", "--is-shallow-repository") == "false"


def test_the_legend_names_the_commit_from_which_age_is_counted() -> None:
    assert [int(number) for number, _ in NOW] == [OLD]
    assert len(COMMITS) >= 30


@pytest.mark.skipif(not has_history(), reason="needs a clone with its history")
@pytest.mark.parametrize(("commit", "mark"), COMMITS)
def test_commits_are_marked_by_their_age(commit: str, mark: str) -> None:
    (_, now) = NOW[0]
    assert (mark == "†") == (int(git("rev-list", "--count", f"{commit}..{now}")) > OLD)
