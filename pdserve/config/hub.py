"""Locate the files of a model: a directory, or a repository on the Hugging Face hub. Torch-free."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

import msgspec

from pdserve.errors import CheckpointError

#: The checkpoint that comes with the repository, made by ``scripts/make-embedded-model``.
EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"

# Files of a checkpoint; nothing executable.
_PATTERNS = ["*.json", "tokenizer.model", "*.jinja", "*.txt"]
_WEIGHTS = "*.safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # bytes, a limit of the safetensors format
_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 4


def resolve_model(model: str, weights: bool = True) -> Path:
    """Return the directory of a model; download a hub id unless it is cached.

    Without ``weights`` only config and tokenizer are downloaded. Raises CheckpointError.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"model {model!r} is a file; use the directory that has config.json")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"model {model!r} is neither an existing directory nor a hub id like 'Qwen/Qwen3-0.6B'")
    return _download(model, [*_PATTERNS, _WEIGHTS] if weights else _PATTERNS)


def _download(model: str, patterns: list[str]) -> Path:
    import huggingface_hub  # on demand: the import takes longer than `pdserve --help`
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise CheckpointError(
            f"model {model!r} is not a local directory, and its download from the hub failed ({reason}); "
            "check the name and the network, or use a local directory"
        ) from exc


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those in its index, or else all. Raises CheckpointError."""
    index = model_dir / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(model_dir.glob(_WEIGHTS))
        if not files:
            raise CheckpointError(f"{model_dir} has no *.safetensors; convert the checkpoint to safetensors")
        return files
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=dict[str, msgspec.Raw])["weight_map"]
        names = sorted(set(msgspec.json.decode(weight_map, type=dict[str, str]).values()))
    except (OSError, KeyError, msgspec.DecodeError) as exc:
        raise CheckpointError(f"{index} cannot be read ({exc}); download the checkpoint again") from exc
    files = [model_dir / name for name in names]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{index} names {file.name}, which is missing; download the checkpoint again")
    return files


def weights_fingerprint(model_dir: Path) -> str:
    """Return 16 hex digits that identify the weights without reading them completely.

    Hashes size, header and four 64 KiB samples of each file, since fine-tuning changes all tensors.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in weight_files(model_dir):
        try:
            _hash_file(path, digest)
        except OSError as exc:
            raise CheckpointError(f"{path} cannot be read ({exc}); check the file and its permissions") from exc
    return digest.hexdigest()


def _hash_file(path: Path, digest: hashlib.blake2b) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_HEADER_LENGTH.size)
        length = _HEADER_LENGTH.unpack(prefix)[0] if len(prefix) == _HEADER_LENGTH.size else size
        if length > min(size - len(prefix), _MAX_HEADER):
            raise CheckpointError(
                f"{path} is not a safetensors file or is truncated at {size} bytes; download it again"
            )
        digest.update(_HEADER_LENGTH.pack(size) + file.read(length))
        begin, end = len(prefix) + length, max(len(prefix) + length, size - _SAMPLE_BYTES)
        for index in range(_SAMPLES_PER_FILE):
            file.seek(begin + (end - begin) * index // (_SAMPLES_PER_FILE - 1))
            digest.update(file.read(_SAMPLE_BYTES))
