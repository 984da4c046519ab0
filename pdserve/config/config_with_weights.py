"""A node's configuration with the digests of its weights, which change when it reloads or patches them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pdserve.checkpoint.simulated_weights import simulated_digest
from pdserve.checkpoint.weight_digests import checkpoint_digests, fold_digests, known_digests
from pdserve.config.compatibility import WEIGHTS_OF
from pdserve.config.node_config import NodeConfig
from pdserve.weights.change import FileStates


def with_weight_digests(config: NodeConfig, stop: threading.Event | None = None) -> NodeConfig:
    """Return the configuration with a digest per tensor group in ``compat_fields``, and the files that have them.

    Reads all weights, unless they are cached or not those of the checkpoint. ``draft_digest`` is that of the head that
    makes drafts. Raises CheckpointError, Stopped.
    """
    config = _with_draft_digest(config, stop)
    model_dir = Path(config.model_dir)
    match config.compat_fields["weights"]:
        case "simulated":
            simulated = simulated_digest(model_dir)
            return _with_groups(config, {"simulated": simulated.digest.hex()}, simulated.files)
        case "dummy":
            return config
    digests = checkpoint_digests(model_dir, stop)
    return _with_groups(config, fold_digests(digests.tensors), digests.files)


def _with_draft_digest(config: NodeConfig, stop: threading.Event | None) -> NodeConfig:
    head = config.model.draft_head
    if head is None:
        return config
    digest = hashlib.sha256(msgspec.json.encode(head, order="sorted"))
    if config.load_format != "dummy":
        digest.update(msgspec.json.encode(checkpoint_digests(Path(config.draft_dir), stop).tensors, order="sorted"))
    return msgspec.structs.replace(config, draft_digest=digest.hexdigest()[:16])


def with_known_digests(config: NodeConfig) -> NodeConfig | None:
    """Return what ``with_weight_digests`` does if that reads no weights, else None. Raises CheckpointError."""
    known = known_digests(Path(config.model_dir))
    return None if known is None else _with_groups(config, fold_digests(known.tensors), known.files)


def with_reload(config: NodeConfig, model_dir: str) -> NodeConfig:
    """Return the configuration with the weights of another checkpoint of the same model. Raises CheckpointError."""
    return with_weight_digests(with_checkpoint(config, model_dir))


def with_checkpoint(config: NodeConfig, model_dir: str) -> NodeConfig:
    """Return the configuration of an engine that loads another checkpoint of the same model. It has no digests yet."""
    config = without_digests(config)
    if config.compat_fields["weights"] == "dummy":
        fields = config.compat_fields | {"weights": "checkpoint"}
        config = msgspec.structs.replace(config, load_format="auto", compat_fields=fields)
    return msgspec.structs.replace(config, model_dir=model_dir)


def without_digests(config: NodeConfig) -> NodeConfig:
    """Return the configuration of an engine that loads the weights anew, without patches."""
    fields = {name: value for name, value in config.compat_fields.items() if not name.startswith(WEIGHTS_OF)}
    return msgspec.structs.replace(config, compat_fields=fields, weight_files={})


def with_patch(config: NodeConfig, digest: str) -> NodeConfig:
    """Return the configuration after a patch with this hex digest. Its weights depend on all patches in order."""
    patches = f"{WEIGHTS_OF}patches"
    chain = hashlib.sha256(f"{config.compat_fields.get(patches, '')} {digest}".encode()).hexdigest()
    return msgspec.structs.replace(config, compat_fields=config.compat_fields | {patches: chain[:32]})


def _with_groups(config: NodeConfig, groups: Mapping[str, str], files: FileStates) -> NodeConfig:
    fields = {f"{WEIGHTS_OF}{group}": digest for group, digest in groups.items()}
    return msgspec.structs.replace(config, compat_fields=config.compat_fields | fields, weight_files=files)
