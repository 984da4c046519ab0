"""Locate the files of a model: a directory, or a repository on the Hugging Face hub. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.checkpoint.gguf import conversion
from pdserve.errors import CheckpointError, shown

#: The checkpoint that comes with the repository, made by ``scripts/make-embedded-model``.
EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"

# Files of a checkpoint; nothing executable.
_PATTERNS = ["*.json", "tokenizer.model", "*.jinja", "*.txt"]
_WEIGHTS = "*.safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(model: str, weights: bool = True, cached: bool = False) -> Path:
    """Return the directory of a model; download a hub id unless it is cached.

    Without ``weights`` only config and tokenizer are downloaded; if it is to be ``cached``, nothing. Raises
    CheckpointError.
    """
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return path
    if path.suffix.lower() == ".gguf":
        raise CheckpointError(f"model {shown(model)}: {conversion(path)}")
    if os.path.exists(path):
        raise CheckpointError(f"model {shown(model)} is a file; use the directory that has config.json")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"model {shown(model)} is neither an existing directory nor a hub id like 'Qwen/Qwen3-0.6B'"
        )
    return _download(model, [*_PATTERNS, _WEIGHTS] if weights else _PATTERNS, cached)


def is_hub_id(model: str) -> bool:
    """Return whether a model is none of this machine's files, so that the hub is asked for it."""
    return not os.path.exists(os.path.expanduser(model)) and _HUB_ID.fullmatch(model) is not None


def _download(model: str, patterns: list[str], cached: bool) -> Path:
    import huggingface_hub  # on demand: the import takes longer than `pdserve --help`

    with hub_errors(model):
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns, local_files_only=cached))


@contextmanager
def hub_errors(model: str) -> Iterator[None]:
    """Turn the errors of a download of ``model`` into a CheckpointError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise CheckpointError(
            f"model {shown(model)} is not a local directory, and its download from the hub failed ({reason}); "
            "check the name and the network, or use a local directory"
        ) from exc
