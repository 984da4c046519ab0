"""Speed of a vision tower by size of image, first tokens of prompts with images, and gaps of streams beside one.

    python bench/image_encoding.py MODEL [--load-format dummy] [--sizes 512x512,3840x2160] [any flag of a node]

A row per size: milliseconds of one image in the tower alone, as a whole and in ``--pieces``, the best of ``--repeat``;
``share`` is the rate of the tower's products and attention over the rate of a large product on the same card;
``peak_mib`` is the memory beside weights. Then the whole engine, without router and gRPC: seconds until the first token
of a prompt with 1, 4 and 16 images (``--counts``) of 1920 × 1080 pixels, each a new one, and of the same prompt again,
whose embeddings or KV are cached. Last, the longest gap of ``--streams`` streams while an image of the largest size is
encoded, beside the gap without it and the target in force.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from engine_steps import numbers

from node.engine_client.client import EngineClient
from node.engine_client.launched_engine import launch_engine
from node.engine_client.request_events import Event
from pdserve.config.device import detect_devices
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import add_node_flags, node_options_from
from pdserve.config.resolution.images import SCREEN
from pdserve.config.resolve import resolve
from pdserve.errors import PdserveError
from pdserve.images import ImageInput, ImageMode, ImageSpan, image_digest
from pdserve.ipc.messages import DropPixels, Mode, PutPixels, RankPlacement, Refused, Submit
from pdserve.logprobs import TokenLogprobs
from pdserve.model.image_processor import smart_size
from pdserve.records import FinishReason
from pdserve.sampling_params import SamplingParams
from runner.loading.tower_weights import build_tower, fill_tower
from runner.models.vision.towers import AnyVisionTower
from runner.placement import TensorPlacement

TEXT = 32  # tokens around images
MANY = 100_000  # output tokens of a stream; it is cancelled before
PRODUCT = 8192  # rows and columns of the product that gives the card's rate


class Picture:
    """An image of random pixels in the engine."""

    def __init__(self, accepted: ImageInput, height: int, width: int, seed: int) -> None:
        self.height, self.width = smart_size(accepted, height, width)
        generator = np.random.default_rng(seed)
        self.pixels = generator.integers(0, 256, (self.height, self.width, 3), dtype=np.uint8).tobytes()
        self.digest = image_digest(accepted.fingerprint, self.height, self.width, self.pixels)
        self.rows, self.columns = accepted.grid(self.height, self.width)


class Outputs:
    """When the tokens of a request came; its first and its last one may be awaited."""

    def __init__(self) -> None:
        self.times = list[float]()
        self.begun = asyncio.Event()
        self.done = asyncio.Event()

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        self.times.append(time.perf_counter())
        self.begun.set()
        if finish is not None:
            self.done.set()

    def on_event(self, event: Event) -> None:
        if isinstance(event, Refused):
            raise RuntimeError(event.message)

    def longest_gap(self, since: float) -> float:
        """Return the longest time between two tokens of which the second came after ``since``."""
        return max((after - before for before, after in pairwise(self.times) if after > since), default=0.0)


# ---------------------------------------------------------------- the tower


def seconds_of(run: Callable[[], object], repeat: int, device: torch.device) -> float:
    """Return the best of ``repeat`` runs, behind one that is not measured."""
    best = float("inf")
    for number in range(1 + repeat):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        best = min(best, seconds) if number else best
    return best


def run_tower(tower: AnyVisionTower, pixels: torch.Tensor, pieces: int) -> None:
    """Encode an image in ``pieces``."""
    height, width, _ = pixels.shape
    depth = tower.config.depth
    x = tower.begin(pixels)
    for number in range(pieces):
        first = depth * number // pieces
        x = tower.run(x, height, width, first, depth * (number + 1) // pieces, lambda layer, rows: None)
    tower.end(x)


def measure_tower(config: NodeConfig, args: argparse.Namespace) -> None:
    device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, config.dtype)
    tower = build_tower(config, TensorPlacement(device, dtype, dtype))
    assert tower is not None
    assert config.image_input is not None
    fill_tower(tower)
    vision = tower.config
    size = PRODUCT if device.type == "cuda" else 512
    factor = torch.ones(size, size, dtype=dtype, device=device)
    rate = 2 * size**3 / seconds_of(partial(torch.matmul, factor, factor), args.repeat, device)
    print(json.dumps({"product_tflop_per_s": round(rate / 1e12, 3)}), flush=True)
    del factor
    for height, width in args.sizes:
        picture = Picture(config.image_input, height, width, 0)
        pixels = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).view(picture.height, picture.width, 3)
        pixels = pixels.to(device)
        tokens = picture.rows * picture.columns
        before = 0
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        whole = seconds_of(partial(run_tower, tower, pixels, 1), args.repeat, device)
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
        divided = seconds_of(partial(run_tower, tower, pixels, args.pieces), args.repeat, device)
        flops = tokens * vision.token_flops(tokens * vision.merge_size**2)
        row = {
            "pixels": f"{picture.width}x{picture.height}",
            "tokens": tokens,
            "ms": round(whole * 1e3, 2),
            f"ms_in_{args.pieces}": round(divided * 1e3, 2),
            "share": round(flops / whole / rate, 3),
            "peak_mib": round(peak / 2**20),
            "work": config.image_token_cost.work(tokens),
        }
        print(json.dumps(row), flush=True)


# ---------------------------------------------------------------- the engine


class Bench:
    def __init__(self, engine: EngineClient, config: NodeConfig) -> None:
        assert config.image_input is not None
        self._engine = engine
        self._config = config
        self._accepted = config.image_input
        self._random = random.Random(0)
        self._seed = 0

    def picture(self, height: int, width: int) -> Picture:
        """Return an image that the engine has never seen."""
        self._seed += 1
        return Picture(self._accepted, height, width, self._seed)

    def prompt(self, pictures: list[Picture]) -> tuple[array[int], tuple[ImageSpan, ...]]:
        ids = array("I")
        spans = list[ImageSpan]()
        for picture in pictures:
            ids.extend(self._text())
            spans.append(ImageSpan(len(ids), picture.rows, picture.columns, picture.digest))
            ids.extend([self._accepted.token_id] * (picture.rows * picture.columns))
        ids.extend(self._text())
        return ids, tuple(spans)

    def put(self, pictures: list[Picture]) -> None:
        for picture in pictures:
            self._engine.send(PutPixels(picture.digest, picture.pixels, last=True))

    def drop(self, pictures: list[Picture]) -> None:
        for picture in pictures:
            self._engine.send(DropPixels(picture.digest))

    def submit(self, ids: array[int], spans: tuple[ImageSpan, ...], max_tokens: int) -> Outputs:
        outputs = Outputs()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = self._engine.open(outputs)
        self._engine.send(Submit(request, ids.tobytes(), sampling, Mode.LOCAL, images=spans))
        return outputs

    async def first_token(self, ids: array[int], spans: tuple[ImageSpan, ...]) -> float:
        start = time.perf_counter()
        outputs = self.submit(ids, spans, 1)
        await outputs.done.wait()
        return outputs.times[0] - start

    async def images(self, count: int) -> None:
        """Print the seconds until the first token of a prompt with ``count`` images of a screen, and of it again."""
        pictures = [self.picture(*SCREEN) for _ in range(count)]
        ids, spans = self.prompt(pictures)
        if len(ids) >= self._config.max_model_len:
            print(json.dumps({"images": count, "tokens": len(ids), "skipped": "--max-model-len"}), flush=True)
            return
        self.put(pictures)
        first = await self.first_token(ids, spans)
        again = await self.first_token(ids, spans)
        text = await self.first_token(array("I", self._random.choices(range(self._accepted.token_id), k=len(ids))), ())
        self.drop(pictures)
        row = {"images": count, "tokens": len(ids), "ttft_s": round(first, 4), "again_s": round(again, 4)}
        print(json.dumps(row | {"text_of_as_many_tokens_s": round(text, 4)}), flush=True)

    async def gaps(self, streams: int, size: tuple[int, int], seconds: float) -> None:
        """Print the longest gap of streams while an image is encoded."""
        picture = self.picture(*size)
        ids, spans = self.prompt([picture])
        room = self._config.max_model_len - TEXT - 1
        running = [self.submit(array("I", self._text()), (), min(MANY, room)) for _ in range(streams)]
        await asyncio.gather(*(outputs.begun.wait() for outputs in running))
        await asyncio.sleep(seconds)
        begun = time.perf_counter()
        await asyncio.sleep(seconds)
        plain = max(outputs.longest_gap(begun) for outputs in running)
        self.put([picture])
        begun = time.perf_counter()
        ttft = await self.first_token(ids, spans)
        longest = max(outputs.longest_gap(begun) for outputs in running)
        self.drop([picture])
        row = {
            "streams": streams,
            "pixels": f"{picture.width}x{picture.height}",
            "gap_ms": round(plain * 1e3, 2),
            "gap_beside_ms": round(longest * 1e3, 2),
            "target_ms": round(self._engine.status.itl_target * 1e3, 2),
            "ttft_s": round(ttft, 4),
            "ended": sum(outputs.done.is_set() for outputs in running),
        }
        print(json.dumps(row), flush=True)

    def _text(self) -> list[int]:
        return self._random.choices(range(min(1000, self._accepted.token_id)), k=TEXT)


async def measure_engine(config: NodeConfig, args: argparse.Namespace) -> None:
    devices = detect_devices(args.device, args.pp * args.tp)
    engine = EngineClient(config, "", RankPlacement(devices), launch_engine(len(devices)), cache_changes=False)
    await engine.start(config)
    try:
        bench = Bench(engine, config)
        for count in args.counts:
            await bench.images(count)
        if args.streams:
            await bench.gaps(args.streams, max(args.sizes), args.seconds)
    finally:
        await engine.shutdown()


def sizes(text: str) -> list[tuple[int, int]]:
    """Parse "1920x1080,512x512" as heights and widths."""
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(height), int(width)) for width, height in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_node_flags(parser)
    parser.add_argument("--sizes", type=sizes, default=sizes("512x512,1920x1080,3840x2160"))
    parser.add_argument("--counts", type=numbers, default=[1, 4, 16], help="images of a prompt")
    parser.add_argument("--pieces", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8, help="0: leave the gaps out")
    parser.add_argument("--seconds", type=float, default=2.0, help="before an image is sent beside streams")
    args = parser.parse_args()
    try:
        config = resolve(node_options_from(args), detect_devices(args.device, args.pp * args.tp)[0])
        if config.images is not ImageMode.TOWER:
            parser.error(f"{config.model_dir} encodes no images: {config.image_problem or '--images'}")
        measure_tower(config, args)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        asyncio.run(measure_engine(config, args))
    except PdserveError as exc:
        print(f"image_encoding.py: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
