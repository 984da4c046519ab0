"""Recurrent state in bytes: what a layer keeps per sequence, and the geometry of one rank's states.

A rank has one allocation of ``num_slots`` slots. A slot holds the state of one sequence, or a snapshot of one, in all
recurrent layers of the rank:

    slot s   bytes s * slot_bytes … of the allocation
    layer l  bytes l * layer_bytes … of the slot: the delta rule's or state space, if any, then the convolution's

Each step overwrites the state, unlike KV. So only the rank that computes a sequence writes to its slot, and a peer
reads, or a prefix hit copies, a slot that no step writes to.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import msgspec

from pdserve.errors import ConfigError
from pdserve.kv.layout import DTYPE_BYTES, KVRegion

_ALIGNMENT = 256  # bytes; tensors of each layer begin at a multiple
NO_SLOT = -1
LEAST_SLOTS = 3  # one sequence, the copy of its state for a peer, and the snapshot that it starts from


def handoff_position(num_tokens: int, num_choices: int, block_size: int) -> int:
    """Return the tokens after which P copies the recurrent state for D, of ``num_tokens`` whose KV is handed off.

    One choice continues at their end. Several choices share full blocks only: each begins with the state at the last
    block boundary, which thus is a snapshot for all of them. Before the first boundary there is none to share.
    If an image is behind the boundary, callers pass one choice: all of them begin with copies of the state at the end.
    """
    boundary = num_tokens // block_size * block_size
    return boundary if num_choices > 1 and boundary else num_tokens


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one sequence in one recurrent layer.

    conv   [channels, conv_width - 1] of ``dtype``: the last inputs of its short convolution, the oldest first

    A kind of state is a subclass with a tag, and an entry of ``AnyStateSpec``. All else asks the spec: sizes, digests,
    the compatibility hash, and the messages between nodes, which hold its fields by name.
    """

    conv_width: int  # tokens that the convolution sees
    dtype: str  # dtype of the convolution's inputs; a key of DTYPE_BYTES

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of the parts of the convolution, in order; tensor shards divide each part."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """Inputs of the convolution."""
        return sum(self.conv_parts)

    @property
    def head_state_bytes(self) -> int:
        """Bytes of the matrices per head, which precede the inputs of the convolution; 0: the layer has none."""
        return 0

    @property
    def conv_bytes(self) -> int:
        return _aligned(self.channels * (self.conv_width - 1) * DTYPE_BYTES[self.dtype])

    @property
    def layer_bytes(self) -> int:
        return self.head_state_bytes + self.conv_bytes

    @property
    def compat_fields(self) -> dict[str, str]:
        """Name and value of what must be equal on both sides of a handoff; heads and channels are the model's."""
        return {"state": self.kind} | {f"state_{name}": str(v) for name, v in msgspec.structs.asdict(self).items()}

    @property
    def divisible(self) -> tuple[str, int]:
        """Name and number of the units that tensor shards divide evenly, such as ("key heads", 16)."""
        raise NotImplementedError

    @property
    def out_inputs(self) -> int:
        """Inputs of the output projection."""
        raise NotImplementedError

    def num_weights(self, hidden_size: int) -> int:
        """Count the weights of a layer's projections."""
        raise NotImplementedError

    def split(self, shards: int) -> Self:
        """Return the spec of one of ``shards`` tensor shards, which ``divisible`` is a multiple of."""
        raise NotImplementedError


class HeadStateSpec(StateSpec, frozen=True):
    """A matrix per value head beside the convolution's inputs.

    delta  [value_heads, value_dim, key_dim] float32
    """

    key_heads: int  # the model's; in a layout, the rank's
    value_heads: int
    key_dim: int  # elements of a head
    value_dim: int

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.out_inputs

    @property
    def head_state_bytes(self) -> int:
        return _aligned(4 * self.value_heads * self.value_dim * self.key_dim)

    @property
    def out_inputs(self) -> int:
        """Inputs of the output projection: the values of all heads."""
        return self.value_heads * self.value_dim

    def split(self, shards: int) -> Self:
        """Return the spec of one of ``shards`` tensor shards, which divide the key heads."""
        assert self.key_heads % shards == 0
        return msgspec.structs.replace(self, key_heads=self.key_heads // shards, value_heads=self.value_heads // shards)


class GatedDeltaSpec(HeadStateSpec, frozen=True, tag="gated_delta"):
    """State of one gated delta net (arXiv:2412.06464) with a short convolution before it, per sequence."""

    @property
    def divisible(self) -> tuple[str, int]:
        return "key heads of recurrent layers", self.key_heads

    def num_weights(self, hidden_size: int) -> int:
        gates = self.out_inputs
        betas_and_decays = 2 * self.value_heads
        return hidden_size * (self.channels + gates + betas_and_decays + self.out_inputs)


class Mamba2Spec(HeadStateSpec, frozen=True, tag="mamba2"):
    """State of one Mamba2 mixer (arXiv:2405.21060) with a short convolution before it, per sequence.

    Names are those of linear attention, which the paper shows it to be: C are queries, B keys, inputs x values. A group
    that shares B and C is a key head, and ``key_dim`` is the size of the state of each value.
    """

    @property
    def divisible(self) -> tuple[str, int]:
        return "groups of Mamba2 layers", self.key_heads

    def num_weights(self, hidden_size: int) -> int:
        gates = self.out_inputs
        steps = self.value_heads
        return hidden_size * (self.channels + gates + steps + self.out_inputs)


class ShortConvSpec(StateSpec, frozen=True, tag="short_conv"):
    """State of one gated short convolution (LFM2) per sequence: its last inputs."""

    channels: int  # the model's; in a layout, the rank's

    @property
    def conv_parts(self) -> tuple[int, ...]:
        return (self.channels,)

    @property
    def divisible(self) -> tuple[str, int]:
        return "channels of short convolutions", self.channels

    @property
    def out_inputs(self) -> int:
        return self.channels

    def num_weights(self, hidden_size: int) -> int:
        """Count the weights of a layer's projections: two gates and inputs, and the output."""
        return 4 * hidden_size * self.channels

    def split(self, shards: int) -> Self:
        """Return the spec of one of ``shards`` tensor shards, which divide the channels."""
        assert self.channels % shards == 0
        return msgspec.structs.replace(self, channels=self.channels // shards)


AnyStateSpec = GatedDeltaSpec | Mamba2Spec | ShortConvSpec  # msgspec decodes each by its tag


class StateLayout(msgspec.Struct, frozen=True):
    """Geometry of one rank's states."""

    num_slots: int
    num_layers: int  # recurrent layers of the rank
    spec: AnyStateSpec

    @property
    def slot_bytes(self) -> int:
        return self.num_layers * self.spec.layer_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


class StateShare(msgspec.Struct, frozen=True):
    """The part of the model's recurrent state that a rank holds: consecutive recurrent layers, and some heads."""

    first_layer: int  # index among the recurrent layers
    num_layers: int
    total_layers: int  # recurrent layers of the model
    shard: int  # index; each of the ``num_shards`` shards holds a part of the heads
    num_shards: int

    def __post_init__(self) -> None:
        first = self.first_layer
        count = self.num_layers
        total = self.total_layers
        if not 0 <= first <= first + count <= total or not 0 <= self.shard < self.num_shards:
            raise ConfigError(
                f"{count} recurrent layers from {first} on in shard {self.shard} of {self.num_shards} are no part of a "
                f"model with {total}"
            )


class RankStates(msgspec.Struct, frozen=True):
    """The address and layout of one rank's recurrent states, and their share of the model's state."""

    region: KVRegion
    layout: StateLayout
    share: StateShare


class StateSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """Store the recurrent state amid a chunk of a prompt: after ``num_tokens`` tokens of the chunk, not all."""

    seq: int
    num_tokens: int
    slot: int  # destination; a sequence has at most one snapshot per step


class StateOrders(NamedTuple):
    """Recurrent states that a step stores amid prompts, and copies after it."""

    snapshots: tuple[StateSnapshot, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()  # (from, to) slots, copied after the step


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
