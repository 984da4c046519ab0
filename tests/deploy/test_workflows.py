"""GitHub's workflows run the scripts of the checkout, with pinned actions and few permissions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

each_workflow = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text())["jobs"]  # type: ignore[no-any-return]


@each_workflow
def test_actions_are_pinned_by_commit_with_their_version(path: Path) -> None:
    uses = re.findall(r"uses: (.*)", path.read_text())
    assert uses
    assert [action for action in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)] == []


@each_workflow
def test_workflows_may_only_read_unless_a_job_says_more(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), (
                "a value of GitHub comes as a variable, so that a shell never reads it"
            )


@each_workflow
def test_scripts_and_paths_of_workflows_exist_and_are_bash(path: Path) -> None:
    for job in jobs(path).values():
        for step in job["steps"]:
            script = step.get("run", "")
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)
            named = re.findall(r"(?<![\w/.])((?:scripts|tests|deploy)/[\w./-]+)", script)
            assert [name for name in named if not (ROOT / name).exists()] == []
    triggers = yaml.safe_load(path.read_text())[True]  # YAML 1.1 reads "on" so
    for pattern in (triggers["pull_request"] or {}).get("paths", ()):
        assert list(ROOT.glob(pattern)), pattern


def test_every_image_and_wheel_is_built() -> None:
    (image,) = jobs(ROOT / ".github" / "workflows" / "images.yml").values()
    assert image["strategy"]["matrix"]["variant"] == ["router", "cpu", "gpu"]
    wheels = jobs(ROOT / ".github" / "workflows" / "wheels.yml")
    assert "scripts/build-wheels dist" in [step.get("run") for step in wheels["build"]["steps"]]
    assert wheels["publish"]["environment"] == "pypi", "a person approves what is published"
