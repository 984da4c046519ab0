"""A prompt to generate from, and the options of its request, with all defaults resolved."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import msgspec

from pdserve.logs import request_fields
from pdserve.sampling_params import SamplingParams
from pdserve.tracing.spans import NO_SPAN, Span
from router.fleet.policy import NO_HINT, RoutingHint
from router.images.loading import LoadedImage
from router.text.prompt import Prompt
from router.text.stop_strings import Reasoned, StopStrings


class Job(msgspec.Struct, frozen=True):
    """``silent``: max_tokens is 0, so the one token that a node samples is dropped.

    ``pictures`` are the images of the prompt. A router keeps them until the request ends: another node may need them.
    """

    prompt: Prompt
    sampling: SamplingParams
    vocab_size: int
    silent: bool = False
    pictures: tuple[LoadedImage, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the longest output."""
        return self.prompt.num_tokens + self.sampling.max_tokens


class GenerationOptions(msgspec.Struct, frozen=True):
    """Options shared by all prompts of a request. ``arrived`` is of ``time.monotonic``."""

    request_id: str
    arrived: float
    timeout: float  # seconds
    migrations: int = 0  # node failures after which a prompt may still continue elsewhere
    stops: StopStrings = StopStrings()
    new_reader: Callable[[], Reasoned] | None = None  # set if stop strings match only behind the reasoning
    cache_salt: str = ""
    priority: int = 0
    client_tag: int = 0  # opaque; nodes are fair between clients
    owner: str = ""  # tenant or key that owns the stored responses
    continues_prompt: bool = True  # true for a completion; a chat message begins a new text
    visible_special_tokens: tuple[str, ...] | None = ()  # None: all
    names_nodes: bool = False  # response headers name prefill and decode node
    hint: RoutingHint = NO_HINT
    span: Span = NO_SPAN  # span of the request

    @property
    def remaining(self) -> float:
        """Seconds left of the timeout."""
        return self.timeout - self.age

    @property
    def age(self) -> float:
        """Seconds since the request arrived."""
        return monotonic() - self.arrived

    @property
    def log_fields(self) -> dict[str, object]:
        return request_fields(self.request_id, self.span.trace_id)
