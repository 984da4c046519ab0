"""Choose the drafts of a node by its configuration."""

from __future__ import annotations

from functools import partial

from engine.scheduler.drafting import DraftingFactory, no_drafting
from engine.speculation.draft_planner import DraftOptions, DraftPlanner, SyntheticDrafts
from engine.speculation.draft_source import ModelDrafts
from engine.speculation.prompt_lookup import PromptLookup
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import EAGLE3, LOOKUP, MTP
from runner.simulated import acceptance_rate

_DRAFT_SOURCES: dict[str, type[PromptLookup | ModelDrafts]] = {
    LOOKUP: PromptLookup,
    MTP: ModelDrafts,
    EAGLE3: ModelDrafts,
}


def build_drafting(config: NodeConfig) -> DraftingFactory:
    """Return what makes the drafting of a scheduler: that of a node without speculation if there are no drafts."""
    if not config.max_drafts:
        return no_drafting
    return partial(DraftPlanner, _draft_options(config))


def _draft_options(config: NodeConfig) -> DraftOptions:
    always = config.options.always_draft
    if config.costs is None and config.options.synthetic_acceptance is not None:
        rate = acceptance_rate(config.options.synthetic_acceptance, config.max_drafts)
        return DraftOptions(SyntheticDrafts, always, rate)
    return DraftOptions(_DRAFT_SOURCES.get(config.speculate), always)
