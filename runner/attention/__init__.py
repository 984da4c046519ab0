"""Attention over the paged KV cache: the interface of back ends.

A layer calls ``prepare_and_store`` and then ``attend``. A model that norms and rotates heads by itself calls ``store``
and then ``attend``. Layers with latents call the methods of a ``LatentBackend`` instead. Back ends are built with the
``AttentionSpec`` of each layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from runner.attention.recurrent import Recurrent
from runner.batch import AttentionBatch, HeadNorms, LatentNorm, RotaryCosSin


class AttentionBackend(ABC):
    """Runs ``plan`` once per step, then its other methods for each layer.

    ``layer`` counts the layers that attend, from 0 on this rank. Only ``plan`` does work on the host that depends on
    the batch.
    """

    recurrent: Recurrent | None = None  # the states of recurrent layers; None: the model has none

    def plan(self, batch: AttentionBatch, graph: int = 0) -> None:
        """Prepare the calls of one step, and the calls of ``recurrent`` unless ``batch`` has no slots of states.

        With ``graph``, the following calls are captured into a CUDA graph, or a captured one is replayed, maybe with
        other lengths. ``graph`` is the most tokens that a sequence may have in a replay; 0: there is no graph. What
        kernels read must keep the address of the last such call with as many rows and tokens. Call it before the
        capture and in it, and if ``replans`` before each replay.
        """
        if self.recurrent is not None and batch.state_slots is not None:
            self.recurrent.plan(batch, graph > 0)
        self._plan(batch, graph)

    def replans(self, graph: int) -> bool:
        """Whether each replay of a graph with up to ``graph`` tokens per sequence needs a plan of its own."""
        return False

    @abstractmethod
    def _plan(self, batch: AttentionBatch, graph: int) -> None:
        """Do the part of ``plan`` that is for layers that attend."""

    @abstractmethod
    def prepare_and_store(self, layer: int, qkv: Tensor, rotary: RotaryCosSin, norms: HeadNorms | None) -> Tensor:
        """Norm and rotate the projected heads, store keys and values, and return the queries.

        qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] → q [tokens, num_heads, head_dim]. Back ends may fuse
        all of it into one kernel.
        """

    @abstractmethod
    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store rotated keys, and values, both [tokens, num_kv_heads, head_dim], in the cache."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return the attention output [tokens, num_heads * head_dim] of queries q [tokens, num_heads, head_dim].

        The step's keys and values must be stored already. ``sinks`` [num_heads] are given where the layer's spec has
        them.
        """


class LatentBackend(AttentionBackend):
    """Attention to latents (MLA): a token has one row for all heads; keys are rows, values their first part.

    ``attend_latents`` takes queries in the space of latents. A back end may instead attend to the keys and values of
    heads, which it expands from the rows: for the queries of long chunks this takes less time.
    """

    #: The first token of this step for ``attend_expanded``, to which all tokens behind belong; None: there is none.
    first_expanded: int | None = None

    @abstractmethod
    def store_latents(self, layer: int, rows: Tensor, q: Tensor, rotary: RotaryCosSin, norm: LatentNorm) -> None:
        """Norm the latents in ``rows`` [tokens, row_size], rotate what follows, and store the rows in the cache.

        Rotate q [tokens, num_heads, qk_rope_head_dim] in place. Both may lie at any stride of tokens and heads.
        """

    @abstractmethod
    def attend_latents(self, layer: int, q: Tensor, q_rope: Tensor) -> Tensor:
        """Return the mean latents [tokens, num_heads, kv_lora_rank] that the first tokens of the step attend to.

        q [tokens, num_heads, kv_lora_rank] and the rotated q_rope [tokens, num_heads, qk_rope_head_dim], at any stride
        of tokens and heads, belong to the tokens before ``first_expanded``.
        """

    def attend_expanded(self, layer: int, q: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write the attention output of the tokens from ``first_expanded`` on to ``out`` [tokens, heads, v_head_dim].

        q [tokens, num_heads, qk_head_dim]. ``weight`` [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank] are
        the layer's projections of latents to the first part of keys, and to values, head after head.
        """
        raise NotImplementedError(f"{type(self).__name__} attends to latents")
