"""Images of requests become the pixels that the model's own processor makes of them, whatever clients send."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hostile_images import ATTACKS, PHOTO, chunk, encoded, png_bomb
from image_checkpoints import PROCESSOR, random_image
from PIL import Image, ImageOps, PngImagePlugin

from pdserve.errors import Overloaded, RequestError
from pdserve.images import MAX_IMAGES, ImageInput, image_digest
from router.images import decoders as decoders_module
from router.images import loading
from router.images.decoders import DECODE_SECONDS, Decoders
from router.images.decoding import decode, measure
from router.images.loading import ImageLoader, LoadedImage
from router.images.source import MAX_FILE_BYTES, ImageSource
from router.metrics import RouterMetrics
from router.text.fair_slots import CLIENT

CELL = 32
ACCEPTED = ImageInput(
    token_id=9,
    patch_size=16,
    merge_size=2,
    min_pixels=4 * CELL**2,
    max_pixels=256 * CELL**2,
    fingerprint=bytes(range(32)),
)
GIB = 1 << 30
Scenario = Callable[[ImageLoader], Awaitable[None]]


def run(scenario: Scenario, memory: int = GIB, **limits: Any) -> None:
    async def body() -> None:
        loader = ImageLoader(memory, RouterMetrics(), Decoders(**limits))
        try:
            await scenario(loader)
        finally:
            await loader.close()

    asyncio.run(body())


def source(file: bytes, name: str = "messages[0].content[1]") -> ImageSource:
    return ImageSource(base64.b64encode(file).decode(), name)


async def refusal(loader: ImageLoader, data: str | bytes) -> str:
    with pytest.raises(RequestError) as raised:
        await loader.load([ImageSource(data, "messages[7].content[2]")], ACCEPTED)
    assert raised.value.param == "messages[7].content[2]"
    text = str(raised.value)
    assert text.startswith("messages[7].content[2]: "), text
    assert len(text) < 300
    return text


# ------------------------------------------------------------ pixels


def upright(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def transparent(mode: str) -> Image.Image:
    image = random_image(80, 120, 5).convert("RGBA")
    image.putalpha(random_image(80, 120, 6, "L"))
    return image.convert(mode)


def palette_with_transparency() -> bytes:
    image = random_image(80, 120, 3).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    return encoded(image, transparency=bytes(range(0, 256, 16)))


def deep_gray() -> bytes:
    values = np.random.default_rng(4).integers(0, 65536, (70, 90), np.uint16)
    return encoded(Image.fromarray(values))


def turned(orientation: int) -> bytes:
    return encoded(random_image(64, 200, 1), "JPEG", exif=upright(orientation))


def turned_behind_its_pixels() -> bytes:
    """Return a PNG whose EXIF is its last chunk but one."""
    file = encoded(random_image(64, 200, 1))
    return file[:-12] + chunk(b"eXIf", upright(6).tobytes().removeprefix(b"Exif\0\0")) + file[-12:]


def turned_by_xmp() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta><rdf tiff:Orientation="8"/></x:xmpmeta>')
    return encoded(random_image(64, 200, 1), pnginfo=info)


FILES: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: encoded(random_image(100, 150, 1)),
    "tiny": lambda: encoded(random_image(1, 1, 1)),
    "tall": lambda: encoded(random_image(900, 11, 1)),
    "large": lambda: encoded(random_image(1080, 1920, 2), "JPEG", quality=80),
    "JPEG": lambda: encoded(random_image(101, 151, 1), "JPEG"),
    "progressive JPEG": lambda: encoded(random_image(300, 151, 1), "JPEG", progressive=True),
    "gray JPEG": lambda: encoded(random_image(64, 99, 1, "L"), "JPEG"),
    "CMYK JPEG": lambda: encoded(random_image(64, 99, 1, "CMYK"), "JPEG"),
    "WebP": lambda: encoded(random_image(100, 150, 1), "WEBP"),
    "transparent WebP": lambda: encoded(transparent("RGBA"), "WEBP", lossless=True),
    "GIF": lambda: encoded(random_image(100, 150, 1, "P"), "GIF"),
    "transparent GIF": lambda: encoded(random_image(100, 150, 1, "P"), "GIF", transparency=3),
    "black and white": lambda: encoded(random_image(100, 150, 1, "1")),
    "gray": lambda: encoded(random_image(100, 150, 1, "L")),
    "gray of 16 bits": deep_gray,
    "gray and alpha": lambda: encoded(transparent("LA")),
    "RGBA": lambda: encoded(transparent("RGBA")),
    "RGB with a transparent colour": lambda: encoded(random_image(100, 150, 1), transparency=(0, 0, 0)),
    "palette": lambda: encoded(random_image(100, 150, 1, "P")),
    "palette with transparency": palette_with_transparency,
    **{f"EXIF {orientation}": partial(turned, orientation) for orientation in range(9)},
    "EXIF in PNG": lambda: encoded(random_image(64, 200, 1), exif=upright(6)),
    "EXIF behind the pixels of a PNG": turned_behind_its_pixels,
    "orientation in XMP": turned_by_xmp,
    "EXIF in WebP": lambda: encoded(random_image(64, 200, 1), "WEBP", exif=upright(8)),
    "photograph with a preview": lambda: encoded(
        random_image(64, 200, 1), "MPO", save_all=True, append_images=[random_image(16, 16, 2)]
    ),
}


@pytest.fixture(scope="module")
def processor() -> Any:
    return transformers.Qwen2VLImageProcessorPil(**{k: v for k, v in PROCESSOR.items() if not k.endswith("_type")})


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_the_library(name: str, processor: Any) -> None:
    file = FILES[name]()
    theirs = processor([ImageOps.exif_transpose(Image.open(io.BytesIO(file)))], return_tensors="np")
    mine = decode(file, ACCEPTED)
    assert measure(file, ACCEPTED) == (mine.height, mine.width)
    _, rows, columns = theirs["image_grid_thw"][0]
    assert (mine.height, mine.width) == (16 * rows, 16 * columns)
    resized = Image.frombytes("RGB", (mine.width, mine.height), mine.data)
    again = processor([resized], return_tensors="np")  # it has the right size, so only patches are made of it
    assert np.array_equal(again["pixel_values"], theirs["pixel_values"])


def test_images_come_in_order_with_their_digests() -> None:
    files = [encoded(random_image(40 + 32 * number, 100, number)) for number in range(6)]

    async def scenario(loader: ImageLoader) -> None:
        sources = [source(file) for file in files]
        sources[3] = ImageSource(files[3], "as bytes")
        encoded_text = base64.encodebytes(files[4]).decode()
        sources[4] = ImageSource(encoded_text, "in lines")
        images = await loader.load(sources, ACCEPTED)
        for file, image in zip(files, images, strict=True):
            pixels = decode(file, ACCEPTED)
            assert bytes(image.pixels) == pixels.data
            assert (image.height, image.width) == (pixels.height, pixels.width)
            assert (image.rows, image.columns) == (pixels.height // CELL, pixels.width // CELL)
            assert image.digest == image_digest(ACCEPTED.fingerprint, image.height, image.width, pixels.data)

    run(scenario)


# ------------------------------------------------------------ attacks


def test_hostile_files_are_refused_by_their_name_and_no_process_ends() -> None:
    async def scenario(loader: ImageLoader) -> None:
        for name, (make, words) in ATTACKS.items():
            assert words in await refusal(loader, base64.b64encode(make()).decode()), name
        pids = {worker.process._process.pid for worker in loader._decoders._workers._all}
        assert len(pids) == 1, "one process has refused them all"
        assert [image.rows for image in await loader.load([source(PHOTO)], ACCEPTED)] == [6]

    run(scenario)


def test_the_size_of_an_image_takes_its_header_only() -> None:
    async def scenario(loader: ImageLoader) -> None:
        files = [encoded(random_image(200, 300, 1)), PHOTO]
        sources = [source(file[: len(file) // 2]) for file in files]
        assert [(size.rows, size.columns) for size in await loader.measure(sources, ACCEPTED)] == [(6, 9), (6, 6)]
        assert loader.memory.num_bytes == 0
        for name in ("HTML", "a bomb's header", "pixel bomb", "long strip", "animated GIF"):
            make, words = ATTACKS[name]
            with pytest.raises(RequestError, match=r"size|one side|animated|no complete") as raised:
                await loader.measure([source(make(), "messages[3].content[1]")], ACCEPTED)
            assert words in str(raised.value)
            assert raised.value.param == "messages[3].content[1]"

    run(scenario)


def test_what_is_no_base64_is_refused() -> None:
    async def scenario(loader: ImageLoader) -> None:
        for text in ("é", "=", "a===", "data:image/png;base64,AAAA", "https://x.example/a.png", "A" * 5, "AA=A"):
            assert "base64" in await refusal(loader, text), text
        long = "A" * (133 << 20)
        assert f"the limit is {MAX_FILE_BYTES}" in await refusal(loader, long)
        assert f"the limit is {MAX_FILE_BYTES}" in await refusal(loader, bytes(MAX_FILE_BYTES + 1))
        assert "no complete PNG" in await refusal(loader, "A" * (MAX_FILE_BYTES // 3 * 4))

    run(scenario)


def test_a_file_that_takes_too_long_ends_only_its_process() -> None:
    slow = png_bomb(8_000, 8_000, alpha=True)

    async def scenario(loader: ImageLoader) -> None:
        loader._decoders._seconds = 0  # the kernel counts whole seconds: the process has less than one
        tasks = [asyncio.create_task(refusal(loader, base64.b64encode(slow).decode())) for _ in range(2)]
        for text in await asyncio.gather(*tasks):
            assert "takes more than 0 s of CPU time" in text
        loader._decoders._seconds = DECODE_SECONDS
        assert len(await loader.load([source(PHOTO)], ACCEPTED)) == 1

    run(scenario)


def test_a_file_that_takes_too_much_memory_is_refused() -> None:
    async def scenario(loader: ImageLoader) -> None:
        text = await refusal(loader, base64.b64encode(png_bomb(8_000, 8_000)).decode())
        assert "too much memory" in text or "cannot be decoded" in text
        assert len(await loader.load([source(PHOTO)], ACCEPTED)) == 1

    run(scenario, max_memory=300 << 20)


def test_a_killed_process_costs_its_image_only() -> None:
    async def scenario(loader: ImageLoader) -> None:
        await loader.load([source(PHOTO)], ACCEPTED)
        (decoder,) = loader._decoders._workers._all
        decoder.process._process.kill()
        await decoder.process._process.wait()
        assert "ended the process that decoded it" in await refusal(loader, source(PHOTO).data)
        assert len(await loader.load([source(PHOTO)] * 3, ACCEPTED)) == 3

    run(scenario)


def test_no_process_and_no_scratch_file_is_left() -> None:
    def scratch_files() -> int:
        return sum(
            "memfd:pdserve image" in str(path.readlink())
            for path in Path("/proc/self/fd").iterdir()
            if path.is_symlink()
        )

    async def scenario(loader: ImageLoader) -> None:
        await loader.load([source(PHOTO)] * 8, ACCEPTED)
        workers = list(loader._decoders._workers._all)
        assert scratch_files() == before + len(workers) > before
        await loader.close()
        assert all(worker.process.status is not None for worker in workers)

    gc.collect()
    before = scratch_files()
    run(scenario)
    gc.collect()
    assert scratch_files() == before


# ------------------------------------------------------------ memory and queue


def picture(number: int, rows: int = 4) -> ImageSource:
    return source(encoded(random_image(rows * CELL, 4 * CELL, number)), f"image {number}")


IMAGE_BYTES = (4 * CELL) ** 2 * 3


def test_memory_counts_images_once_and_until_they_are_dropped() -> None:
    async def scenario(loader: ImageLoader) -> None:
        images = await loader.load([picture(1), picture(2), picture(1)], ACCEPTED)
        assert images[0] is images[2]
        again = await loader.load([picture(2)], ACCEPTED)
        assert again[0] is images[1], "requests at one time share equal images"
        assert loader.memory.num_bytes == 2 * IMAGE_BYTES
        images.clear()
        assert loader.memory.num_bytes == IMAGE_BYTES
        again.clear()
        assert loader.memory.num_bytes == 0

    run(scenario)


def test_images_beyond_the_memory_are_refused_and_those_before_them_dropped() -> None:
    async def scenario(loader: ImageLoader) -> None:
        held = await loader.load([picture(1), picture(2)], ACCEPTED)
        with pytest.raises(Overloaded, match="--image-memory"):
            await loader.load([picture(3), picture(4)], ACCEPTED)
        assert loader.memory.num_bytes == 2 * IMAGE_BYTES
        held.clear()
        assert len(await loader.load([picture(3), picture(4), picture(5)], ACCEPTED)) == 3
        with pytest.raises(RequestError, match="send fewer or smaller images"):
            await loader.load([picture(number) for number in range(10, 15)], ACCEPTED)
        assert loader.memory.num_bytes == 0

    run(scenario, memory=3 * IMAGE_BYTES)


def test_a_hundred_images_are_loaded_and_one_more_is_refused() -> None:
    async def scenario(loader: ImageLoader) -> None:
        images = await loader.load([picture(number % 5) for number in range(MAX_IMAGES)], ACCEPTED)
        assert len(images) == MAX_IMAGES
        assert len(set(images)) == 5
        with pytest.raises(RequestError, match=f"has {MAX_IMAGES + 1} images, the limit is {MAX_IMAGES}"):
            await loader.load([picture(1)] * (MAX_IMAGES + 1), ACCEPTED)
        assert await loader.load([], ACCEPTED) == []

    run(scenario)


def test_a_client_with_too_many_waiting_images_gets_a_503_and_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_MAX_WAITING", 10)

    async def load(loader: ImageLoader, client: str, count: int) -> list[LoadedImage]:
        CLIENT.set(client)
        return await loader.load([picture(1)] * count, ACCEPTED)

    async def scenario(loader: ImageLoader) -> None:
        many = asyncio.create_task(load(loader, "a", 9))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="9 images of this client"):
            await asyncio.create_task(load(loader, "a", 2))
        await asyncio.create_task(load(loader, "b", 10))
        await many
        await asyncio.create_task(load(loader, "a", 10))
        assert not loader._waiting

    run(scenario)


def test_a_cancelled_request_leaves_nothing() -> None:
    async def scenario(loader: ImageLoader) -> None:
        for turns in (0, 1, 5, 50):
            task = asyncio.create_task(loader.load([source(PHOTO)] * 20, ACCEPTED))
            for _ in range(turns):
                await asyncio.sleep(0.002)
            if task.cancel():  # a fast machine loads them all within 50 turns
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                task.result().clear()
            assert not loader._waiting
        del task
        assert loader.memory.num_bytes == 0
        assert len(await loader.load([source(PHOTO)] * 20, ACCEPTED)) == 20

    run(scenario)


def test_a_bad_image_ends_the_loading_of_the_others() -> None:
    async def scenario(loader: ImageLoader) -> None:
        sources = [picture(number) for number in range(20)]
        sources[7] = ImageSource("AAAA", "image 7")
        with pytest.raises(RequestError, match="image 7: the file is no complete PNG"):
            await loader.load(sources, ACCEPTED)
        assert loader.memory.num_bytes == 0
        assert not loader._waiting

    run(scenario)


def test_metrics_count_images() -> None:
    async def scenario(loader: ImageLoader) -> None:
        images = await loader.load([picture(1)], ACCEPTED)
        await refusal(loader, "AAAA")
        exported = loader._metrics.export().decode()
        for line in (
            'pdserve_loaded_images_total{outcome="loaded"} 1.0',
            'pdserve_loaded_images_total{outcome="refused"} 1.0',
            f"pdserve_loaded_image_bytes {float(IMAGE_BYTES)}",
            "pdserve_image_decode_seconds_count 1.0",
        ):
            assert line in exported
        assert images

    run(scenario)


def test_processes_are_few_and_begin_with_the_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders_module, "usable_cpus", lambda: 64)

    async def scenario(loader: ImageLoader) -> None:
        assert not loader._decoders._workers._all
        await loader.load([picture(number) for number in range(30)], ACCEPTED)
        assert 0 < len(loader._decoders._workers._all) < decoders_module.MOST_DECODERS, "one is left for other clients"

    run(scenario)
