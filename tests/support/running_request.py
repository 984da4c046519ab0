"""A request of a router's fleet, without HTTP: its tokens and its end."""

from __future__ import annotations

import asyncio
import time

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.errors import PdserveError
from pdserve.images import Images
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams
from router.fleet.fleet import Fleet
from router.generation.choice import Choice
from router.generation.generation import RequestGeneration
from router.generation.job import GenerationOptions, Job
from router.images.loading import LoadedImage
from router.metrics import RouterMetrics
from router.text.prompt import Prompt
from router.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(EMBEDDED_MODEL)


class RunningRequest:
    """A greedy request with one choice."""

    def __init__(
        self,
        prompt: list[int],
        max_tokens: int,
        fleet: Fleet,
        metrics: RouterMetrics,
        salt: str = "",
        *,
        images: Images = (),
        pictures: tuple[LoadedImage, ...] = (),
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        options = GenerationOptions("id", arrived=time.monotonic(), timeout=60.0, migrations=2, cache_salt=salt)
        self.tokens: list[int] = []
        self.error: PdserveError | None = None
        self._fleet = fleet
        self._changed = asyncio.Event()
        self._ended = False
        packed = Prompt(pack_tokens(prompt), images=images)
        jobs = [Job(packed, sampling, vocab_size=1 << 20, pictures=pictures)]
        self._generation = RequestGeneration(jobs, options, TOKENIZER, self, metrics.of("m"))

    async def start(self) -> None:
        await self._generation.start(self._fleet)

    async def wait(self, num_tokens: int | None = None) -> list[int]:
        """Return the tokens once there are ``num_tokens``, or at the end."""
        while not self._ended and (num_tokens is None or len(self.tokens) < num_tokens):
            self._changed.clear()
            await self._changed.wait()
        assert self.error is None, self.error
        return self.tokens

    async def failure(self) -> PdserveError:
        """Return the error with which the request ends."""
        while not self._ended:
            self._changed.clear()
            await self._changed.wait()
        assert self.error is not None
        return self.error

    def cancel(self) -> None:
        self._generation.cancel()

    def close(self) -> None:
        """Do what an endpoint does at the end of a request."""
        self._generation.close()

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        if output.has_token:
            self.tokens.append(output.token_id)
        self._changed.set()

    def on_weights(self, weights: str) -> None: ...

    def on_end(self, error: PdserveError | None) -> None:
        self.error = error
        self._ended = True
        self._changed.set()
