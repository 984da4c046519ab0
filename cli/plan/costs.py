"""Measured costs of steps, prompts and handoffs on a kind of node, in a TOML file with the hardware and command.

``measured/`` has the files that come with pdserve; ``bench/engine_steps.py --costs-out FILE`` writes one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from cli.virtual_fleet.cards import Card, Delays
from pdserve.config.simulated_costs import SimulatedCosts, StepTokens
from pdserve.errors import ConfigError
from pdserve.kv.layout import FP8_E4M3, FullAttentionSpec, LatentSpec
from pdserve.model.model_config import ModelConfig

MEASURED = Path(__file__).parent / "measured"
READ_SECONDS = 1e-3  # seconds of a KV read beside its bytes: NIXL's transfer of few blocks, as in SimulatedCosts.read

Points = tuple[tuple[float, float], ...]


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of a model that determine its costs."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    kv_cache_dtype: str = "auto"  # auto: the model's dtype
    num_experts: int = 0  # experts per layer; 0: dense
    top_k: int = 0  # experts per token
    expert_intermediate_size: int = 0
    has_latents: bool = False  # the KV cache has latents in place of keys and values
    full_layers: int = 0  # layers that keep all tokens, if others have a sliding window; 0: all layers do
    num_kv_layers: int = 0  # layers with a KV cache; 0: all
    full_elements: int = 0  # elements of a token's keys in all layers that keep all tokens, if layers have unlike heads
    state_bytes: int = 0  # recurrent state of all layers, per sequence

    @classmethod
    def of(cls, model: ModelConfig, kv_cache_dtype: str = "auto") -> Shape:
        """``kv_cache_dtype`` is a value of the flag, or the dtype of a KVLayout."""
        fields = {name: getattr(model, name) for name in cls.__struct_fields__ if hasattr(model, name)}
        if moe := model.moe:
            experts = {"num_experts": moe.num_experts, "top_k": moe.top_k}
            fields |= experts | {"expert_intermediate_size": moe.intermediate_size}
        with_drafts = model.num_kv_layers if model.num_draft_layers or model.kv_sources else 0
        fields |= {"has_latents": model.latent is not None, "num_kv_layers": with_drafts}
        groups = model.kv_cache_groups
        if groups.layers:
            fields["full_layers"] = sum(groups.windows[group] is None for group in groups.layers)
        if groups.heads:
            full = (groups.heads[group].size for group in groups.layers if groups.windows[group] is None)
            fields["full_elements"] = sum(full)
        if state := model.state:
            kv_layers = len(model.kv_layers)
            fields |= {"num_kv_layers": kv_layers, "state_bytes": model.num_recurrent * state.layer_bytes}
        return cls(**fields, kv_cache_dtype=FP8_E4M3 if kv_cache_dtype in (FP8_E4M3, "fp8") else "auto")

    @property
    def kv_bytes(self) -> int:
        """KV bytes per token of a long sequence: layers with a window add none."""
        dtype = self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        spec = LatentSpec if self.has_latents else FullAttentionSpec
        if self.full_elements:
            return spec(1, self.full_elements, dtype).page_bytes(1)
        layers = self.full_layers or self.num_kv_layers or self.num_layers
        return layers * spec(self.num_kv_heads, self.head_dim, dtype).page_bytes(1)

    def handoff_bytes(self, tokens: float) -> float:
        """Bytes that a node reads of a sequence with these tokens: KV, and the recurrent state."""
        return tokens * self.kv_bytes + self.state_bytes

    def __str__(self) -> str:
        cache = "" if self.kv_cache_dtype == "auto" else f", KV cache in {self.kv_cache_dtype}"
        state = f", {self.state_bytes} bytes of state per sequence" if self.state_bytes else ""
        layers = f"{self.num_layers} layers of {self.hidden_size}"
        rows = f"latents of {self.head_dim}" if self.has_latents else f"{self.num_kv_heads} KV heads of {self.head_dim}"
        return f"{layers}, {rows}{cache}{state}"


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Costs of one node with ``pp × tp`` GPUs. Points are (x, milliseconds), interpolated linearly."""

    model: str  # display name
    gpu: str  # value of --gpu
    hardware: str
    commit: str
    command: str
    shape: Shape
    estimated: tuple[str, ...] = ()  # fields below that were not measured, each with the source of its value
    pp: int = 1
    tp: int = 1
    prefill_ms: Points  # TTFT of a single prompt, by its tokens
    decode_ms: Points  # a decode step with short contexts, by its sequences
    context_ns: float = 0.0  # added to a decode step per sequence and token of context
    kv_tokens: int  # capacity of the KV cache in tokens
    step_tokens: int = 8192  # most prompt tokens per step
    first_token_ms: float = 0.0  # added to the first token by a handoff
    second_token_ms: Points = ((0.0, 0.0),)  # added to the gap after the first token, by prompt tokens
    kv_gb_per_s: float  # 10^9 bytes per second, read by one node
    under_load: SimulatedCosts | None = None  # fitted to the steps of serving nodes; None: follows from the points

    def __post_init__(self) -> None:
        for name in ("prefill_ms", "decode_ms", "second_token_ms"):
            _check_points(name, getattr(self, name))
        for name in ("context_ns", "first_token_ms"):
            if not 0.0 <= getattr(self, name) < 1e9:
                raise ConfigError(f"{name} {getattr(self, name)} must not be negative")
        for name in ("pp", "tp", "kv_tokens", "step_tokens", "kv_gb_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} {getattr(self, name)} must be above 0")

    @property
    def gpus(self) -> int:
        return self.pp * self.tp

    def prefill(self, tokens: float, cached: float = 0.0) -> float:
        """Return the seconds of a prompt alone on a node, whose first ``cached`` tokens are cached."""
        return self.prompts.base + self.prompts.seconds(tokens - cached, (tokens**2 - cached**2) / 2)

    def decode(self, batch: float, context: float) -> float:
        """Return the seconds of a decode step of ``batch`` sequences with ``context`` tokens each on average."""
        least = self.decode_ms[0][0]
        return (_line_at(self.decode_ms, max(batch, least)) * 1e6 + batch * context * self.context_ns) / 1e9

    def card(self, kv_gb_per_s: float = 0.0) -> Card:
        """Return the device of a node in a virtual fleet; ``kv_gb_per_s`` of its network, 0: as measured."""
        steps = MeasuredSteps(self, kv_gb_per_s or self.kv_gb_per_s)
        return Card(steps, idle_step=self.decode(1, 0.0), kv_tokens=self.kv_tokens)

    def delays(self) -> Delays:
        """Return the delays that make handoffs as long as they were measured.

        The first token waits for two messages. The second one waits for them as well, for the read of the prompt's last
        part, and for D's processes.
        """
        tokens, second_token = self.second_token_ms[0]
        message = self.first_token_ms / 2e3
        read = MeasuredSteps(self, self.kv_gb_per_s).of_read(int(min(tokens, self.step_tokens)))
        return Delays(message=message, confirm=max(0.0, second_token / 1e3 - 2 * message - read))

    @cached_property
    def prompts(self) -> PromptCost:
        return PromptCost.through(self.prefill_ms)


class PromptCost(NamedTuple):
    """Seconds of prompts: ``base`` per step, ``token`` per token, ``pair`` per pair of a token and an earlier one."""

    base: float
    token: float
    pair: float

    @classmethod
    def through(cls, points: Points) -> PromptCost:
        """Fit measured prompts (tokens, ms) by least squares of relative errors, with as many terms as are positive."""
        tokens, ms = np.array(points).T
        terms = np.stack([tokens, np.ones_like(tokens), tokens**2 / 2])  # [3, points]
        for count in range(min(3, len(points)), 0, -1):
            fitted, *_ = np.linalg.lstsq((terms[:count] / ms).T, np.ones_like(ms), rcond=None)
            if (fitted >= 0.0).all():
                break
        token, base, pair = [*(fitted / 1e3).tolist(), 0.0, 0.0][:3]
        return cls(base, token, pair)

    def seconds(self, tokens: float, pairs: float) -> float:
        """Return the seconds that prompts add to a step without sequences that decode, beside its base."""
        return self.token * tokens + self.pair * pairs


class MeasuredSteps:
    """Seconds of steps and reads by measured costs, for the nodes of a virtual fleet.

    Beside decodes, the read of the weights hides a part of the prompts: as much as a decode step is longer than the
    base of a step of prompts. A read brings the KV of its tokens at the speed of the network, and the recurrent state.
    """

    def __init__(self, costs: Costs, kv_gb_per_s: float) -> None:
        self._costs = costs
        self._prompts = costs.prompts
        self._hidden = max(0.0, costs.decode(1, 0.0) - costs.prompts.base)
        self._bytes_per_s = 1e9 * kv_gb_per_s

    def seconds(self, step: StepTokens) -> float:
        """Return the seconds of a step; 0 for an empty one."""
        if self._costs.under_load is not None:
            return self._costs.under_load.seconds(step)
        prompts = self._prompts.seconds(step.prompt_tokens, step.prompt_context)
        if not step.decodes:
            return self._prompts.base + prompts if step.prompt_tokens else 0.0
        decode = self._costs.decode(step.decodes, step.decode_context / step.decodes)
        return decode + max(0.0, prompts - self._hidden)

    def of_read(self, num_tokens: int) -> float:
        return READ_SECONDS + self._costs.shape.handoff_bytes(num_tokens) / self._bytes_per_s


def _check_points(name: str, points: Points) -> None:
    if not points:
        raise ConfigError(f"{name} has no points; measure at least one")
    for (x, y), (next_x, next_y) in pairwise(points):
        if next_x <= x or next_y < y:
            raise ConfigError(
                f"{name} goes from {y:g} ms at {x:g} to {next_y:g} ms at {next_x:g}; both must increase: measure again"
            )
    if points[0][0] < 0.0 or not 0.0 <= points[-1][1] < 1e9:
        raise ConfigError(f"{name} has impossible values: {points[0]} … {points[-1]}")


def _line_at(points: Points, x: float) -> float:
    """Interpolate linearly, and extrapolate beyond both ends; never below 0."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_right(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    x0, y0 = points[right - 1]
    x1, y1 = points[right]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


# ---------------------------------------------------------------- files


def load_costs(name: str) -> Costs:
    """Read a costs file, given by path or by its name in ``measured/``. Raises ConfigError."""
    path = Path(name)
    bundled = MEASURED / f"{name}.toml"
    if not path.is_file() and bundled.is_file():
        path = bundled
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Costs)
    except OSError as exc:
        measured = ", ".join(sorted(file.stem for file in MEASURED.glob("*.toml")))
        raise ConfigError(f"costs {name!r} cannot be read ({exc.strerror}); use a file or one of {measured}") from exc
    except (msgspec.DecodeError, ValueError) as exc:
        raise ConfigError(f"costs {path}: {exc}") from exc


def find_costs(shape: Shape, gpu: str, pp: int, tp: int) -> Costs:
    """Return the measured costs of this shape and hardware. Raises ConfigError if there are none."""
    every = [load_costs(file.stem) for file in sorted(MEASURED.glob("*.toml"))]
    for costs in every:
        if (costs.shape, costs.gpu, costs.pp, costs.tp) == (shape, gpu, pp, tp):
            return costs
    measured = "; ".join(f"{costs.model} on {costs.gpu}, pp {costs.pp}, tp {costs.tp}" for costs in every)
    raise ConfigError(
        f"no measured costs for {shape} on {gpu} with pp {pp}, tp {tp}, only {measured}; measure them with "
        "`python bench/engine_steps.py MODEL --costs-out FILE` and use --costs FILE"
    )


def costs_as_toml(costs: Costs) -> str:
    fields = msgspec.to_builtins(costs)
    tables = {name: fields.pop(name) for name in ("shape", "under_load")}
    # JSON numbers, strings and arrays are valid TOML.
    lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in fields.items()]
    for table, entries in tables.items():
        if entries is not None:
            lines += ["", f"[{table}]"]
            lines += [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in entries.items()]
    return "\n".join(lines) + "\n"


def rising(points: Sequence[tuple[float, float]]) -> Points:
    """Sort points and raise each to at least the one before it, since noise can make longer prompts faster."""
    most = 0.0
    raised = list[tuple[float, float]]()
    for x, y in sorted(points):
        most = max(most, y)
        raised.append((x, round(most, 4)))
    return tuple(raised)
