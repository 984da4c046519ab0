"""The context of all handoffs of D: its engine, peers and settings, and the decision whether D computes a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.decode_metrics import DecodeMetrics
from decode_node.generation import NodeGeneration
from decode_node.prefill_peers import PrefillPeers
from decode_node.settings import DecodeSettings, FailurePolicy
from node.engine_client import EngineClient
from pdserve.errors import Overloaded, PdserveError, PrefillCrashed
from pdserve.model.model_config import ModelConfig
from pdserve.request_cost import worth_handoff


@dataclass(frozen=True, slots=True)
class HandoffContext:
    """The parts of D that all handoffs share."""

    engine: EngineClient
    peers: PrefillPeers
    settings: DecodeSettings
    model: ModelConfig
    metrics: DecodeMetrics

    @property
    def counters(self) -> dict[str, float]:
        return self.metrics.counters

    def worth(self, generation: NodeGeneration, uncached_tokens: int) -> bool:
        """Return whether to hand off so many tokens; if not, count a local prefill."""
        prompt_logprobs, min_tokens = generation.sampling.prompt_logprobs, self.settings.handoff_min_tokens
        worth = worth_handoff(uncached_tokens, prompt_logprobs, min_tokens)
        self.counters["pdserve_local_prefills_total"] += not worth
        return worth

    def recomputes(self, error: PdserveError, uncached_tokens: int) -> bool:
        """Count a failed or refused handoff; return whether the failure policy is to prefill its prompt on D."""
        refused = isinstance(error, Overloaded)
        self.counters["pdserve_handoff_refusals_total" if refused else "pdserve_handoff_failures_total"] += 1
        if self.settings.failure_policy is FailurePolicy.FAIL or isinstance(error, PrefillCrashed):
            return False  # the prompt that ended P's engine may end this one, too
        if not refused:
            self.counters["pdserve_handoff_recomputes_total"] += 1
            self.counters["pdserve_handoff_recomputed_tokens_total"] += uncached_tokens
        return True
