"""The oracle: decides once per node which model runner it gets, and why.

``RUNNERS`` is the table of runners, in order of preference. A new runner is a row here and one in ``runner.FACTORIES``.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdserve.config.attention_backends import Platform, fits_triton
from pdserve.errors import ConfigError
from pdserve.model.families import FAMILIES
from pdserve.model.model_config import NATIVE

VARIABLE = "PDSERVE_USE_V2_MODEL_RUNNER"

#: V2 is exact for these architectures, and docs/numbers.md has figures of it. Others get V1 unless V2 is forced.
DEFAULT_ARCHITECTURES = tuple(name for name, family in FAMILIES.items() if family.v2_figures)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the decision. A connector is not part of it: all runners have the same KV cache.

    ``load_model_config`` accepts only models with the default in the fields that have one.
    """

    architecture: str
    model_impl: str = NATIVE
    platform: Platform
    attention_backend: str  # as chosen, never "auto"
    head_dim: int
    rope_type: str
    cuda_graphs: str  # as configured: auto, on or off
    runner_type: str = "generate"
    quantization_problem: str = ""  # why V2 cannot keep the weights quantized
    quantization_doubt: str = ""  # why V2 may be slower than V1 with quantized weights, if it can keep them


class Decision(msgspec.Struct, frozen=True):
    """The oracle's answer: the name of a model runner, and why."""

    runner: str  # a name in RUNNERS, or "simulated"
    reasons: tuple[str, ...]
    forced: bool = False  # by PDSERVE_USE_V2_MODEL_RUNNER
    fallback: bool = False  # the model's default is another runner, which this machine or a flag rules out

    @property
    def forced_runner(self) -> str:
        """The forced runner; empty where the oracle has chosen."""
        return self.runner if self.forced else ""


class Lack(msgspec.Struct, frozen=True):
    """Something that a runner cannot do, and the configurations that need it."""

    name: str
    needed: Callable[[Facts], bool]
    sentence: str  # says why; {facts.…} are filled in
    default_only: bool = False  # no obstacle if the runner is forced

    def explain(self, facts: Facts) -> str:
        return f"{self.name}: {self.sentence.format(facts=facts)}"


class RunnerRecord(msgspec.Struct, frozen=True):
    """A row of the table."""

    name: str
    forced_by: str | None  # the value of the variable that forces this runner
    captures_graphs: bool  # whether it uses CUDA graphs where the platform has them
    lacks: tuple[tuple[Lack, ...], ...]  # in groups: an explanation names the first group that applies

    def obstacles(self, facts: Facts) -> tuple[str, ...]:
        """Explain everything that keeps a forced runner from this configuration."""
        lacks = [lack for group in self.lacks for lack in group if not lack.default_only]
        return tuple(lack.explain(facts) for lack in lacks if lack.needed(facts))

    def rejections(self, facts: Facts) -> tuple[str, ...]:
        """Explain why the runner is not chosen by default; empty if it can be. Say how to force it where that works."""
        groups = (tuple(lack.explain(facts) for lack in group if lack.needed(facts)) for group in self.lacks)
        reasons = next((group for group in groups if group), ())
        if not reasons or self.forced_by is None or self.obstacles(facts):
            return reasons
        return *reasons, f"{VARIABLE}={self.forced_by} chooses {self.name}"


def can_capture(platform: Platform) -> bool:
    """Return whether CUDA graphs exist here. Triton's interpreter computes on the host, also for tensors on a GPU."""
    return platform.device == "cuda" and not platform.interpreted


_V2_MODELS = (
    Lack(
        "architecture",
        lambda facts: facts.architecture not in DEFAULT_ARCHITECTURES,
        f"V2 is the default for {', '.join(DEFAULT_ARCHITECTURES)} only; docs/numbers.md has no figures of "
        "{facts.architecture} on V2 yet",
        default_only=True,
    ),
    Lack(
        "model implementation",
        lambda facts: facts.model_impl != NATIVE,
        "V2 runs native layers; {facts.architecture} runs through transformers",
    ),
    Lack(
        "runner type",
        lambda facts: facts.runner_type != "generate",
        "V2 generates tokens; it has no runner type {facts.runner_type!r}",
    ),
    Lack(
        "quantization",
        lambda facts: bool(facts.quantization_problem),
        "{facts.quantization_problem}",
    ),
    Lack(
        "quantization",
        lambda facts: bool(facts.quantization_doubt) and not facts.quantization_problem,
        "{facts.quantization_doubt}",
        default_only=True,
    ),
)
_V2_PLATFORM = (
    Lack("Triton kernels", lambda facts: facts.platform.triton_problem is not None, "{facts.platform.triton_problem}"),
)
_V2_FEATURES = (
    Lack(
        "dynamic rope scaling",
        lambda facts: facts.rope_type == "dynamic",
        "its frequencies depend on the length of the sequence; V2 uses the same for all",
    ),
    Lack(
        "attention backend torch",
        lambda facts: facts.attention_backend == "torch",
        "it plans each step on the host; V2 needs triton or flashinfer",
    ),
    Lack(
        "head size",
        lambda facts: not fits_triton(facts.head_dim),
        "V2's kernels need a power of two of at least 16; head_dim is {facts.head_dim}",
    ),
    Lack(
        "CUDA graphs without a GPU",
        lambda facts: facts.cuda_graphs == "on" and not can_capture(facts.platform),
        "V2 captures them on a CUDA GPU, and not of interpreted kernels; leave --cuda-graphs at auto",
    ),
)
_V1_FEATURES = (
    Lack(
        "CUDA graphs", lambda facts: facts.cuda_graphs == "on", "V1 captures none; leave --cuda-graphs at auto or off"
    ),
)

RUNNERS = (
    RunnerRecord("V2", forced_by="1", captures_graphs=True, lacks=(_V2_MODELS, _V2_PLATFORM, _V2_FEATURES)),
    RunnerRecord("V1", forced_by="0", captures_graphs=False, lacks=(_V1_FEATURES,)),
)


def decide(facts: Facts, variable: str | None) -> Decision:
    """Return the first runner of the table that can run this, or the forced one.

    ``variable`` is the value of PDSERVE_USE_V2_MODEL_RUNNER, None if unset.

    | variable         | answer                                                                      |
    |------------------|-----------------------------------------------------------------------------|
    | 0 (V1) or 1 (V2) | that runner, for any architecture; ConfigError naming each obstacle         |
    | any other value  | ConfigError naming the allowed ones; "" is such a value                     |
    | unset            | the first runner that nothing rejects; ConfigError naming all rejections    |
    """
    if variable is not None:
        return _forced(facts, variable)
    rejections: dict[str, tuple[str, ...]] = {}
    for record in RUNNERS:
        own = record.rejections(facts)
        if not own:
            reasons = tuple(reason for others in rejections.values() for reason in others)
            unfit = any(lack.needed(facts) for lack in _V2_MODELS)
            fallback = bool(reasons) and not unfit
            return Decision(record.name, reasons or _preferred(record, facts), fallback=fallback)
        rejections[record.name] = own
    explained = "; ".join(f"{name} ({'; '.join(own)})" for name, own in rejections.items())
    raise ConfigError(f"no model runner can run this: {explained}")


def decide_simulated(variable: str | None) -> Decision:
    """Return the answer for ``--engine simulated``. Raises ConfigError if the variable forces a runner."""
    if variable is not None:
        raise ConfigError(f"{VARIABLE}={variable}, but a simulated node runs neither V1 nor V2; unset it")
    return Decision("simulated", ("--engine simulated",))


def uses_graphs(decision: Decision, platform: Platform) -> bool:
    capturing = {record.name for record in RUNNERS if record.captures_graphs}
    return decision.runner in capturing and can_capture(platform)


def _forced(facts: Facts, variable: str) -> Decision:
    by_value = {record.forced_by: record for record in reversed(RUNNERS) if record.forced_by is not None}
    if variable not in by_value:
        allowed = " or ".join(f"{value} ({record.name})" for value, record in by_value.items())
        raise ConfigError(f"{VARIABLE}={variable!r} is not allowed; set it to {allowed}, or unset it")
    record = by_value[variable]
    obstacles = record.obstacles(facts)
    if obstacles:
        raise ConfigError(
            f"{VARIABLE}={variable}, but {record.name} cannot run this: {'; '.join(obstacles)}. Change that or unset it"
        )
    return Decision(record.name, (f"{VARIABLE}={variable}",), forced=True)


def _preferred(record: RunnerRecord, facts: Facts) -> tuple[str, ...]:
    platform = facts.platform
    if platform.interpreted:
        reason = f"{facts.architecture} in Triton's interpreter, exact on {record.name}; it is for tests, and slow"
    else:
        family = FAMILIES[facts.architecture]
        measured = f": its layers are those of {family.v2_figures_of}" if family.v2_figures_of else ""
        reason = (
            f"{facts.architecture} on {'a CUDA GPU' if platform.device == 'cuda' else 'a CPU'}{measured}, "
            f"exact{' and faster' * family.v2_is_faster} on {record.name} (docs/numbers.md#{family.v2_figures})"
        )
    return reason, f"the configuration needs nothing that {record.name} lacks"
