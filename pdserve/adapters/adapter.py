"""An adapter as its files describe it: low-rank deltas of some linear layers of a base model."""

from __future__ import annotations

import msgspec

NO_ADAPTER = ""  # digest of requests to the base model
NO_ADAPTER_SLOT = -1  # slot of their sequences


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
