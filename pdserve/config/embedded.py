"""The checkpoint that comes with the repository, made by ``scripts/make-embedded-model``."""

from __future__ import annotations

from pathlib import Path

EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
