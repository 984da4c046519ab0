"""``pdserve bench`` with a real router and simulated nodes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from urllib.request import urlopen

import pytest
from fleet import Fleet
from PIL import Image

from cli.bench.images import ImageSize, parse_image_size, random_image_url
from cli.main import main

LOAD = ["--num-prompts", "6", "--random-input-len", "40", "--random-output-len", "4", "--random-prefix-len", "64"]


@pytest.mark.parametrize("flags", [["--max-concurrency", "2"], ["--request-rate", "50"]])
def test_figures_table_and_plot(
    flags: list[str], fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "bench.json"
    plot = tmp_path / "bench.svg"
    assert main(["bench", fleet.url, *LOAD, *flags, "--json", str(figures), "--plot", str(plot)]) == 0
    measured = json.loads(figures.read_text())
    assert (measured["requests"], measured["failed"], measured["ended_early"]) == (6, 0, 0)
    assert measured["prompt_tokens"] == 6 * 104
    assert 64 <= measured["cached_tokens"] <= 6 * 64
    assert all(measured[name]["max"] >= measured[name]["p50"] > 0 for name in ("ttft_ms", "e2e_ms"))
    assert measured["itl_ms"]["max"] >= measured["itl_ms"]["p50"] >= 0, "on a busy machine, tokens may arrive together"
    said, progress = capsys.readouterr()
    assert "pdserve bench: 6 of 6 requests after" in progress, "stderr is no terminal"
    assert [part for part in ("TTFT", "ITL", "E2E", "6 of 6", "of 624 prompt tokens", "█") if part not in said] == []
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize("size", ["1x1", "17x9", "640x480x3"])
def test_random_images_are_png_files_of_their_size(size: str) -> None:
    width, height, number = parsed = parse_image_size(size)
    rng = random.Random(0)
    urls = {random_image_url(rng, parsed) for _ in range(number)}
    assert len(urls) == number
    for url in urls:
        with urlopen(url) as file, Image.open(file) as image:
            image.load()
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", (width, height))


@pytest.mark.parametrize("size", ["", "12", "0x4", "4x20000", "4x4x101", "4x4x4x4", "axb"])
def test_sizes_of_images_are_checked(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http://127.0.0.1:1", "--image", size]) != 0
    assert "use a size in pixels such as 1920x1080" in capsys.readouterr().err


def test_images_go_to_chats(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        (["--endpoint", "/v1/completions"], "--image sends chats; leave out --endpoint"),
        (["--image", "4x4x100"], "asks for 101 images in a request, the limit is 100"),
    ):
        assert main(["bench", "http://127.0.0.1:1", "--image", "4x4", *flags]) != 0
        assert said in capsys.readouterr().err


def test_size_names_itself() -> None:
    assert [str(size) for size in (ImageSize(40, 30), ImageSize(40, 30, 2))] == ["40 × 30", "2 × 40 × 30"]
