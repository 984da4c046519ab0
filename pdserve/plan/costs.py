"""What steps, prompts and handoffs take on a kind of node, as it was measured: a TOML file that says where and how.

Those in ``measured/`` come with pdserve; ``bench/engine_steps.py --costs-out FILE`` writes one for its machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from pdserve.config.model_config import ModelConfig
from pdserve.errors import ConfigError
from pdserve.kv import FullAttentionSpec

MEASURED = Path(__file__).parent / "measured"

Points = tuple[tuple[float, float], ...]


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of a model decides what it costs."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str

    @classmethod
    def of(cls, model: ModelConfig) -> Shape:
        return cls(*(getattr(model, name) for name in cls.__struct_fields__))

    @property
    def kv_bytes(self) -> int:
        """Of one token, in all layers."""
        return self.num_layers * FullAttentionSpec(self.num_kv_heads, self.head_dim, self.dtype).page_bytes(1)

    def __str__(self) -> str:
        return f"{self.num_layers} layers of {self.hidden_size}, {self.num_kv_heads} KV heads of {self.head_dim}"


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node, which is ``pp × tp`` GPUs. Points are (x, milliseconds), joined by lines."""

    model: str  # for people
    gpu: str  # as --gpu takes it
    hardware: str
    commit: str
    command: str
    shape: Shape
    estimated: tuple[str, ...] = ()  # fields below that nobody has measured, each with how it was come by
    pp: int = 1
    tp: int = 1
    prefill_ms: Points  # a prompt of so many tokens by itself, to its first token
    decode_ms: Points  # a step that decodes so many sequences of little context
    context_ns: float = 0.0  # in such a step, of each token of context of each sequence
    kv_tokens: int  # the KV cache has room for
    step_tokens: int = 8192  # of a prompt that a step computes at most
    first_token_ms: float = 0.0  # that a handoff adds to the first token
    second_token_ms: Points = ((0.0, 0.0),)  # … to the gap behind it, by prompt tokens
    kv_gb_per_s: float  # 10^9 bytes, read by one node

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
        """Seconds for a prompt of which the first ``cached`` tokens are there already.

        The others attend to these too, so they take what they add to the whole, but no less than a prompt of their own.
        """
        alone = _line_at(self.prefill_ms, tokens - cached)
        return max(alone, _line_at(self.prefill_ms, tokens) - _line_at(self.prefill_ms, cached)) / 1e3

    def decode(self, batch: float, context: float) -> float:
        """Seconds of a step in which ``batch`` sequences decode, with so many tokens each behind them on average."""
        return (
            _line_at(self.decode_ms, max(batch, self.decode_ms[0][0])) / 1e3 + batch * context * self.context_ns / 1e9
        )

    def second_token(self, prompt: float, kv_gb_per_s: float) -> float:
        """Seconds that a handoff adds to the gap behind the first token, over a network of that speed.

        What is left to be read then is what the prompt's last step has computed.
        """
        last = min(prompt, self.step_tokens) * self.shape.kv_bytes / 1e9
        slower = max(0.0, last / kv_gb_per_s - last / self.kv_gb_per_s)
        return _line_at(self.second_token_ms, prompt) / 1e3 + slower


def _check_points(name: str, points: Points) -> None:
    if not points:
        raise ConfigError(f"{name} has no points; measure one at least")
    for (x, y), (next_x, next_y) in pairwise(points):
        if next_x <= x or next_y < y:
            raise ConfigError(
                f"{name} goes from {y:g} ms at {x:g} to {next_y:g} ms at {next_x:g}; both have to grow: measure again"
            )
    if points[0][0] < 0.0 or not 0.0 <= points[-1][1] < 1e9:
        raise ConfigError(f"{name} has numbers that cannot be: {points[0]} … {points[-1]}")


def _line_at(points: Points, x: float) -> float:
    """Through the two points about ``x``; beyond the ends as between the last two, but never below 0."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_right(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


# ---------------------------------------------------------------- files


def load_costs(name: str) -> Costs:
    """Those of a file, or of one in ``measured/`` by its name. Raises ConfigError."""
    path = Path(name)
    bundled = MEASURED / f"{name}.toml"
    if not path.is_file() and bundled.is_file():
        path = bundled
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Costs)
    except OSError as exc:
        known = ", ".join(sorted(file.stem for file in MEASURED.glob("*.toml")))
        raise ConfigError(f"costs {name!r} cannot be read ({exc.strerror}); name a file, or one of {known}") from exc
    except (msgspec.DecodeError, ValueError) as exc:
        raise ConfigError(f"costs {path}: {exc}") from exc


def find_costs(shape: Shape, gpu: str, pp: int, tp: int) -> Costs:
    """What was measured for this. Raises ConfigError where nothing was: nothing is made up."""
    every = [load_costs(file.stem) for file in sorted(MEASURED.glob("*.toml"))]
    for costs in every:
        if (costs.shape, costs.gpu, costs.pp, costs.tp) == (shape, gpu, pp, tp):
            return costs
    known = "; ".join(f"{costs.model} on {costs.gpu}, pp {costs.pp}, tp {costs.tp}" for costs in every)
    raise ConfigError(
        f"nothing was measured for {shape} on {gpu} with pp {pp}, tp {tp}, only {known}. Measure it on such a machine, "
        "python bench/engine_steps.py MODEL --costs-out FILE, and give --costs FILE"
    )


def costs_as_toml(costs: Costs) -> str:
    """A file that ``load_costs`` reads."""
    fields = msgspec.to_builtins(costs)
    shape = fields.pop("shape")
    # JSON's numbers, strings and arrays are TOML's as well.
    lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in fields.items()]
    lines += ["", "[shape]", *(f"{name} = {msgspec.json.encode(value).decode()}" for name, value in shape.items())]
    return "\n".join(lines) + "\n"


def rising(points: Sequence[tuple[float, float]]) -> Points:
    """Measured points in their order, none lower than one before it: noise makes a longer prompt seem quicker."""
    most, found = 0.0, list[tuple[float, float]]()
    for x, y in sorted(points):
        most = max(most, y)
        found.append((x, round(most, 4)))
    return tuple(found)
