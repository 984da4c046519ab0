"""One request and its settings. A request has n choices; each choice is a sequence (sequence.py)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.token_rules import TokenRules
from pdserve.grammar import Grammar
from pdserve.images import Images
from pdserve.ipc.messages import Mode
from pdserve.records import TOKEN_BYTES
from pdserve.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """The fields of Submit, and then what the modules named here write. LiveSequences has the sequences."""

    # From Submit. They do not change, except for ``mode`` when a load ends.
    rid: int
    token_ids: bytes  # the prompt, uint32
    sampling: SamplingParams
    mode: Mode
    cache_salt: str
    priority: int = 0  # lower is more urgent
    skip_tokens: int = 0
    decode_ahead: int = 0  # LEASE: tokens that may be sampled after the first, before the peer takes over
    client: int = 0
    urgent: bool = False  # on P: before the waiting requests of its client
    kv_layers: int = 0  # on P: layers with a KV cache that the peer has; 0: as here
    images: Images = ()

    # Written by Room and KVLoads.
    cached_tokens: int | None = None  # prompt tokens in the prefix cache at the first admission; None: not admitted

    # Written by ConnectedPeers.
    lacks_draft_kv: bool = False  # a peer without the layer that makes drafts has computed the prompt

    # Written by LiveSequences and KVLoads.
    paused: bool = False  # its client does not read: no step includes it
    waits_since: float = 0.0  # scheduler clock

    # Written by Scheduler at submission.
    arrived: float = 0.0  # scheduler clock: when the router, or this node, got it

    # Written by Scheduler and StepResults.
    queued: float = 0.0  # seconds of waiting for blocks and for a step that computes its prompt
    num_scored: int = 1  # prompt tokens whose log-probabilities were sent; the first token has none

    # Written by ChoiceManager.
    branches: dict[int, array[int]] = field(default_factory=dict)  # output of choices that wait for the prompt's KV
    stop_ids: frozenset[int] = frozenset()  # tokens that end a choice after ``min_tokens``

    # Written by GrammarConstraints.
    grammar: Grammar | None = None  # compiled from its sampling parameters
    rules: TokenRules | None = None  # made from its sampling parameters

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def max_length(self) -> int:
        """Tokens at which a choice ends on this node. On P only a single choice decodes ahead."""
        most = self.sampling.max_tokens
        if self.mode.for_peer:
            most = min(most, 1 + self.decode_ahead) if self.sampling.n == 1 else 1
        return self.prompt_len + most

    def end_load(self) -> None:
        """End the load: this node computes the rest."""
        self.mode = Mode.LEASE if self.mode.for_peer else Mode.LOCAL
