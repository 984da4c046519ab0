"""Requests to a virtual fleet, and their outcomes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

_OWN = 1 << 31  # token ids of the part of a prompt that no other one has, from this one on


class Run(NamedTuple):
    """Consecutive prompt tokens with equal ids. Prompts with equal leading runs share these tokens."""

    content: int  # the token id, below 2³¹
    tokens: int


@dataclass(eq=False, slots=True)
class Job:
    """A request and its outcome. Times are in seconds."""

    at: float
    prompt: int  # tokens
    output: int  # tokens
    shared: tuple[Run, ...] = ()  # the beginning of the prompt; no other prompt has the rest
    awaited: bool = True  # the simulation goes on until it has ended
    number: int = 0  # unique
    router: int = 0
    node: str = ""  # name of the node where the job decodes
    rid: int = 0  # on ``node``
    tokens: int = 0  # sampled so far
    first: float = 0.0  # time of the first token
    last: float = 0.0  # time of the latest token
    gaps: list[float] = field(default_factory=list)  # between tokens
    end: float = 0.0
    moved_at: float = -1e9

    @property
    def ttft(self) -> float:
        return self.first - self.at

    @property
    def per_token(self) -> float:
        return (self.end - self.first) / max(1, self.output - 1)

    @property
    def second_gap(self) -> float:
        """From the first to the second token."""
        return self.gaps[0] if self.gaps else 0.0

    @property
    def longest_gap(self) -> float:
        return max(self.gaps, default=0.0)

    def prompt_ids(self) -> bytes:
        """Return the token ids of the prompt, as uint32."""
        runs = (*self.shared, Run(_OWN + self.number, self.prompt - sum(run.tokens for run in self.shared)))
        return b"".join(array("I", (run.content,)).tobytes() * run.tokens for run in runs)

    def add_token(self, now: float) -> None:
        self.tokens += 1
        if self.tokens == 1:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now
