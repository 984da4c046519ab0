"""An adapter as its files describe it: low-rank deltas of some linear layers of a base model."""

from __future__ import annotations

import re

import msgspec

NO_ADAPTER = ""  # digest of requests to the base model
NO_ADAPTER_SLOT = -1  # slot of their sequences
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether a text from outside may be the digest of an adapter."""
    return _DIGEST.fullmatch(text) is not None


class AdapterLimits(msgspec.Struct, frozen=True):
    """The adapters that a node has room for."""

    max_loras: int  # slots on the device: different adapters in one step
    max_lora_rank: int  # largest rank of a module
    max_cpu_loras: int  # adapters in host memory; at least ``max_loras``


class AdapterModule(msgspec.Struct, frozen=True):
    """The delta of one linear layer: y = W x + scaling · B (A x)."""

    rank: int
    scaling: float  # alpha / rank, or alpha / √rank (rsLoRA)
    a: str  # name of the tensor A [rank, in_features] in the adapter's file
    b: str  # name of the tensor B [out_features, rank]


class Adapter(msgspec.Struct, frozen=True):
    """A checked adapter. Two adapters with equal digests change the base model equally."""

    digest: str  # 64 hexadecimal digits: SHA-256 of the normalized configuration and the sorted tensors
    directory: str  # with adapter_config.json and adapter_model.safetensors
    modules: dict[str, AdapterModule]  # by the layer's name in the base: "model.layers.0.self_attn.q_proj"

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(module.rank for module in self.modules.values())


class AdapterSlot(msgspec.Struct, frozen=True):
    """From its step on, a slot on the device holds an adapter that every rank has in host memory."""

    slot: int
    digest: str


class AdapterLoaded(msgspec.Struct, frozen=True, array_like=True):
    """The end of a load to host memory, on one rank or on all of them."""

    digest: str
    error: str = ""  # empty: the adapter is in host memory


class NamedAdapter(msgspec.Struct, frozen=True):
    """An adapter that a node serves under a name of its own."""

    name: str  # empty: only requests that began before the name's last reload use it
    digest: str
    rank: int
    root: str  # directory or hub id, as given
