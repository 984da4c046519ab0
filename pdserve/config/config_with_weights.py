"""A node's configuration with the digests of its weights, which change when it reloads or patches them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pdserve.checkpoint.simulated_weights import simulated_digest
from pdserve.checkpoint.weight_digests import checkpoint_digests, fold_digests, known_digests
from pdserve.config.compatibility import WEIGHTS_OF
from pdserve.config.node_config import NodeConfig
from pdserve.errors import ConfigError
from pdserve.weights.change import FileStates, HostDigests


def with_weight_digests(config: NodeConfig, stop: threading.Event | None = None) -> NodeConfig:
    """Return the configuration with a digest per tensor group in ``compat_fields``, and the files that have them.

    Reads all weights, unless their digests are cached, or the weights are random or simulated. ``draft_digest`` is the
    draft head's. Raises CheckpointError, Stopped.
    """
    digests = host_digests(config, range(config.parallel.num_ranks), stop)
    return with_host_digests(config, [digests])


def host_digests(config: NodeConfig, ranks: range, stop: threading.Event | None = None) -> HostDigests:
    """Return the digests of the tensor groups that these ranks load, from the checkpoint on this host.

    Raises CheckpointError, Stopped.
    """
    model_dir = Path(config.model_dir)
    match config.compat_fields["weights"]:
        case "simulated":
            simulated = simulated_digest(model_dir)
            return HostDigests(ranks.start, {"simulated": simulated.digest.hex()}, simulated.files)
        case "dummy":
            return HostDigests(ranks.start, draft=_draft_digest(config, stop))
    stages = {config.parallel.position(rank).stage for rank in ranks}
    digests = checkpoint_digests(model_dir, stop, lambda layer: config.parallel.stage_of(layer) in stages)
    draft = _draft_digest(config, stop)
    return HostDigests(ranks.start, fold_digests(digests.tensors), digests.files, draft)


def with_host_digests(config: NodeConfig, hosts: Sequence[HostDigests]) -> NodeConfig:
    """Return the configuration with the digests of all hosts, and the files of the first, which is the leader's.

    Raises ConfigError if two hosts have different weights.
    """
    groups: dict[str, str] = {}
    for host in hosts:
        for group in groups.keys() & host.groups.keys():
            if groups[group] != host.groups[group]:
                raise ConfigError(
                    f"{WEIGHTS_OF}{group}: {host.groups[group]} on the host of rank {host.first_rank}, {groups[group]} "
                    "on another host of this node; give all hosts the same checkpoint"
                )
        if host.draft != hosts[0].draft:
            raise ConfigError(
                f"head that makes drafts: {host.draft} on the host of rank {host.first_rank}, {hosts[0].draft} at the "
                "leader; give all hosts the same head"
            )
        groups |= host.groups
    config = msgspec.structs.replace(config, draft_digest=hosts[0].draft)
    return _with_groups(config, groups, hosts[0].files)


def _draft_digest(config: NodeConfig, stop: threading.Event | None = None) -> str:
    """Return the draft head's digest; empty without a draft head."""
    head = config.model.draft_head
    if head is None:
        return ""
    digest = hashlib.sha256(msgspec.json.encode(head, order="sorted"))
    if not config.random_weights:
        digest.update(msgspec.json.encode(checkpoint_digests(Path(config.draft_dir), stop).tensors, order="sorted"))
    return digest.hexdigest()[:16]


def with_known_digests(config: NodeConfig) -> NodeConfig | None:
    """Return the result of ``with_weight_digests`` if it would read no weights, else None. Raises CheckpointError."""
    cached = known_digests(Path(config.model_dir))
    if cached is None:
        return None
    digests = HostDigests(0, fold_digests(cached.tensors), cached.files, _draft_digest(config))
    return with_host_digests(config, [digests])


def with_reload(config: NodeConfig, model_dir: str) -> NodeConfig:
    """Return the configuration with the weights of another checkpoint of the same model. Raises CheckpointError."""
    return with_weight_digests(with_checkpoint(config, model_dir))


def with_checkpoint(config: NodeConfig, model_dir: str) -> NodeConfig:
    """Return the configuration of an engine that loads another checkpoint of the same model. It has no digests yet."""
    config = without_digests(config)
    if config.compat_fields["weights"] == "dummy":
        fields = config.compat_fields | {"weights": "checkpoint"}
        config = msgspec.structs.replace(config, random_weights=False, compat_fields=fields)
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
