"""The oracle: decides once per node which model runner it gets, and says why.

V1 keeps batch state on the host and runs anything; V2 keeps it on the device and is the fast one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdserve.config.attention_backends import Platform, fits_triton
from pdserve.config.families import FAMILIES
from pdserve.errors import ConfigError

VARIABLE = "PDSERVE_USE_V2_MODEL_RUNNER"

#: Where V2 has proven itself. Others get V1 unless V2 is forced.
DEFAULT_ARCHITECTURES = tuple(name for name, family in FAMILIES.items() if family.v2_by_default)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the decision rests on. Whether there is a connector is not among it: both runners have the same KV cache.

    The fields with a default are those that ``load_model_config`` lets no model differ in today.
    """

    architecture: str
    platform: Platform
    attention_backend: str  # as chosen, never "auto"
    head_dim: int
    rope_type: str
    cuda_graphs: str  # as asked: auto, on or off
    runner_type: str = "generate"
    num_experts: int = 0  # 0: dense
    quantization: str | None = None  # its method


class Decision(msgspec.Struct, frozen=True):
    """The oracle's answer: which model runner, and why."""

    runner: str  # "V1", "V2" or "simulated"
    reasons: tuple[str, ...]


class Lack(msgspec.Struct, frozen=True):
    """A feature that a runner does not have, and when a configuration asks for it."""

    name: str
    asked: Callable[[Facts], bool]
    sentence: str  # says more; {facts.…} are filled in


V1_LACKS = (
    Lack(
        "CUDA graphs",
        lambda facts: facts.cuda_graphs == "on",
        "V1 captures none; leave --cuda-graphs at auto or off",
    ),
)

# Kinds of models; these are judged together with the architecture.
_V2_LACKS_MODELS = (
    Lack(
        "runner type",
        lambda facts: facts.runner_type != "generate",
        "V2 generates tokens; it has no runner type {facts.runner_type!r}",
    ),
    Lack(
        "mixture of experts",
        lambda facts: facts.num_experts > 0,
        "V2 runs dense models; this one has {facts.num_experts} experts",
    ),
    Lack(
        "quantization",
        lambda facts: facts.quantization is not None,
        "V2 runs unquantized weights; these are {facts.quantization}",
    ),
)

V2_LACKS = (
    *_V2_LACKS_MODELS,
    Lack(
        "dynamic rope scaling",
        lambda facts: facts.rope_type == "dynamic",
        "its frequencies depend on the length of the sequence, V2's are the same for all",
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


def can_capture(platform: Platform) -> bool:
    """Whether there are CUDA graphs at all: Triton's interpreter computes on the host, also for tensors on a GPU."""
    return platform.device == "cuda" and not platform.interpreted


def decide(facts: Facts, variable: str | None) -> Decision:
    """Which runner; ``variable`` is the value of PDSERVE_USE_V2_MODEL_RUNNER, None where unset.

    | variable   | the first that holds                                     | answer                             |
    |------------|----------------------------------------------------------|------------------------------------|
    | not 0 or 1 | (so also "")                                             | ConfigError, naming the values     |
    | 0          | CUDA graphs on                                           | ConfigError, naming what V1 lacks  |
    | 0          | anything else                                            | V1                                 |
    | 1          | Triton cannot run, or any feature below                  | ConfigError, naming each           |
    | 1          | anything else, of whatever architecture                  | V2                                 |
    | unset      | architecture not in DEFAULT_ARCHITECTURES; runner type   | V1, each named                     |
    |            | not "generate"; mixture of experts; quantized weights    |                                    |
    | unset      | Triton cannot run: no package, or neither a CUDA GPU nor | V1                                 |
    |            | TRITON_INTERPRET=1                                       |                                    |
    | unset      | dynamic rope scaling; attention backend torch; head_dim  | V1, each named                     |
    |            | below 16 or no power of two; CUDA graphs on where there  |                                    |
    |            | are none                                                 |                                    |
    | unset      | anything else                                            | V2                                 |

    Where unset leads to V1, what V1 lacks is an error as with 0.
    """
    if variable not in (None, "0", "1"):
        raise ConfigError(f"{VARIABLE}={variable!r} is not allowed; set it to 0 (V1) or 1 (V2), or unset it")
    if variable == "1":
        obstacles = (*_without_triton(facts), *_lacking(V2_LACKS, facts))
        if obstacles:
            raise ConfigError(f"{VARIABLE}=1, but V2 cannot run this: {'; '.join(obstacles)}. Change that or unset it")
        return Decision("V2", (f"{VARIABLE}=1",))
    reasons = (f"{VARIABLE}=0",) if variable == "0" else _against_v2(facts)
    if not reasons:
        where = "Triton's interpreter" if facts.platform.interpreted else "a CUDA GPU"
        return Decision("V2", (f"{facts.architecture} on {where}", "nothing is asked for that V2 lacks"))
    obstacles = _lacking(V1_LACKS, facts)
    if obstacles:
        raise ConfigError(f"V1 is chosen ({'; '.join(reasons)}), but it cannot run this: {'; '.join(obstacles)}")
    return Decision("V1", reasons)


def decide_simulated(variable: str | None) -> Decision:
    """The answer for ``--engine simulated``. Raises ConfigError where the variable forces a runner."""
    if variable is not None:
        raise ConfigError(f"{VARIABLE}={variable}, but a simulated node runs neither V1 nor V2; unset it")
    return Decision("simulated", ("--engine simulated",))


def _against_v2(facts: Facts) -> tuple[str, ...]:
    """What the first rule that speaks against V2 has to say; empty where none does."""
    model = _lacking(_V2_LACKS_MODELS, facts)
    if facts.architecture not in DEFAULT_ARCHITECTURES:
        model = (f"{facts.architecture}: V2 is the default for {', '.join(DEFAULT_ARCHITECTURES)} only", *model)
    return model or _without_triton(facts) or _lacking(V2_LACKS, facts)


def _without_triton(facts: Facts) -> tuple[str, ...]:
    problem = facts.platform.triton_problem
    return () if problem is None else (problem,)


def _lacking(lacks: tuple[Lack, ...], facts: Facts) -> tuple[str, ...]:
    return tuple(f"{lack.name}: {lack.sentence.format(facts=facts)}" for lack in lacks if lack.asked(facts))
