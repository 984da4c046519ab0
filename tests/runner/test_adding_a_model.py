"""docs/adding-a-model.md shows code that is in the files it names."""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.model.families import FAMILIES
from runner.models.registry import decoder_class

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-model.md").read_text()


def test_code_blocks_are_in_the_files_they_name() -> None:
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
    assert [path for path, _ in blocks] == [
        "pdserve/model/families.py",
        "runner/models/families/qwen2.py",
        "tests/support/checkpoints.py",
        "tests/runner/test_against_transformers.py",
    ]
    for path, code in blocks:
        assert code in (ROOT / path).read_text(), path
    assert (ROOT / "runner/models/families/qwen2.py").read_text() == blocks[1][1]


def test_named_files_and_methods_exist() -> None:
    for path in re.findall(r"`([\w/]+/[\w-]+\.py)`", PAGE):
        assert (ROOT / path).is_file(), path
    for method in re.findall(r"`(make_\w+|checkpoint_name)`", PAGE):
        assert hasattr(decoder_class("Qwen2ForCausalLM"), method), method


def test_each_family_has_a_class_named_like_its_architecture() -> None:
    for architecture in FAMILIES:
        assert decoder_class(architecture).__name__ == architecture
