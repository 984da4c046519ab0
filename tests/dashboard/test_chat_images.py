"""Images on the chat page: pasted, dropped and chosen, in a real browser, with a real model that sees.

Each size and colour scheme leaves a screenshot: ``pytest --basetemp=DIR tests/dashboard -k images_fit`` says where.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import MODEL_NAME, Fleet
from image_checkpoints import make_image_checkpoint, random_image
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from test_chat_page import ask, limit, sent_bodies
from web_pages import CONTRASTS, WINDOWS, Watched, accessibility_faults


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A router with a node that encodes images."""
    model = make_image_checkpoint(tmp_path_factory.mktemp("sees") / "model", "qwen3_vl")
    with Fleet() as fleet:
        fleet.start_decode(model, ["--dtype", "float32", "--images", "on"])
        fleet.start_router(model)
        fleet.wait_ready()
        yield fleet


@pytest.fixture
def page(watched: Watched, seeing: Fleet) -> Iterator[Page]:
    """Open the page; at the end, assert no console errors and no requests to other hosts."""
    page = watched.open(seeing.url)
    expect(page.locator("#model")).to_have_value(MODEL_NAME)
    yield page
    assert watched.complaints == []
    assert all(url.startswith((f"{seeing.url}/", "data:image/")) for url in watched.requests)


def picture(width: int, height: int, kind: str = "PNG", seed: int = 0, **options: Any) -> bytes:
    file = io.BytesIO()
    random_image(height, width, seed).save(file, kind, **options)
    return file.getvalue()


def choose(page: Page, *files: tuple[str, str, bytes]) -> None:
    payload = [{"name": name, "mimeType": kind, "buffer": data} for name, kind, data in files]
    page.locator("#files").set_input_files(payload)  # type: ignore[arg-type]


def give(page: Page, event: str, target: str, data: bytes, text: str = "") -> None:
    """Have the page get a PNG file, and a text, by a paste or a drop."""
    script = """([event, target, data, text]) => {
      const transfer = new DataTransfer();
      const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
      transfer.items.add(new File([bytes], 'given.png', {type: 'image/png'}));
      if (text) transfer.setData('text/plain', text);
      const options = {bubbles: true, cancelable: true};
      const given = event === 'paste'
        ? new ClipboardEvent(event, {...options, clipboardData: transfer})
        : new DragEvent(event, {...options, dataTransfer: transfer});
      document.querySelector(target).dispatchEvent(given);
    }"""
    page.evaluate(script, [event, target, base64.b64encode(data).decode(), text])


def sent_images(body: dict[str, Any], message: int = -1) -> list[Image.Image]:
    parts = body["messages"][message]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_image_is_shown_sent_and_kept(page: Page) -> None:
    bodies = sent_bodies(page)
    limit(page, 4)
    original = picture(96, 64)
    choose(page, ("a shot.png", "image/png", original))
    thumbnail = page.locator("#attachments img")
    expect(thumbnail).to_have_attribute("alt", "a shot.png")
    ask(page, "What is this?")
    expect(thumbnail).to_have_count(0)
    shown = page.locator(".user .pictures img")
    expect(shown).to_have_attribute("alt", "a shot.png")
    expect(page.locator(".assistant .served")).to_contain_text("4 tokens")
    image, question = bodies[0]["messages"][0]["content"]
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == original
    assert question == {"type": "text", "text": "What is this?"}
    page.reload()  # the browser keeps images, too
    expect(shown).to_be_visible()
    assert shown.evaluate("image => image.naturalWidth") == 96
    assert "base64" not in page.evaluate("JSON.stringify(localStorage)")
    ask(page, "And now?")
    expect(page.locator(".assistant .served")).to_have_count(2)
    assert bodies[1]["messages"][0] == bodies[0]["messages"][0]
    expect(page.locator(".assistant .served").last).to_contain_text(re.compile(r"[1-9]\d* of \d+ prompt tokens cached"))


def test_pasted_and_dropped_images_can_be_removed(page: Page) -> None:
    bodies = sent_bodies(page)
    limit(page, 4)
    give(page, "paste", "#entry", picture(40, 40))
    expect(page.locator("#attachments li")).to_have_count(1)
    give(page, "drop", "#scroll", picture(80, 40, seed=1))
    expect(page.locator("#attachments li")).to_have_count(2)
    give(page, "paste", "#entry", picture(50, 50), text="A table as text, and as a picture")
    page.locator("#attachments").get_by_role("button", name="Remove given.png").first.click()
    expect(page.locator("#attachments li")).to_have_count(1)
    page.locator("#send").click()  # without a text
    expect(page.locator(".assistant .served")).to_contain_text("4 tokens")
    assert [image.size for image in sent_images(bodies[0])] == [(80, 40)]
    expect(page.locator("#conversations .open")).to_have_text(["Image"])


def test_large_images_and_other_formats_are_made_fit(page: Page) -> None:
    bodies = sent_bodies(page)
    limit(page, 4)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    choose(
        page,
        ("wide.png", "image/png", picture(4000, 1000)),
        ("photo.jpg", "image/jpeg", picture(3000, 60, "JPEG", exif=exif)),
        ("moving.gif", "image/gif", picture(64, 64, "GIF", save_all=True, append_images=[Image.new("RGB", (64, 64))])),
        ("words.txt", "text/plain", b"no image"),
    )
    notice = page.locator("#notice")
    expect(notice).to_contain_text("wide.png is sent as 2,048 × 512 instead of 4,000 × 1,000 pixels.")
    expect(notice).to_contain_text("photo.jpg is sent as 41 × 2,048 instead of 60 × 3,000 pixels.")
    expect(notice).to_contain_text("words.txt is not an image that this browser can read.")
    ask(page, "See?")
    expect(page.locator(".assistant .served")).to_contain_text("4 tokens")
    assert [(image.size, image.format) for image in sent_images(bodies[0])] == [
        ((2048, 512), "PNG"),
        ((41, 2048), "JPEG"),
        ((64, 64), "PNG"),
    ]
    choose(page, *[(f"{number}.png", "image/png", picture(40, 40, seed=number)) for number in range(12)])
    expect(notice).to_have_text("A message takes up to 10 images.")
    expect(page.locator("#attachments li")).to_have_count(10)


def test_edited_message_keeps_its_image_and_a_deleted_one_goes(page: Page) -> None:
    bodies = sent_bodies(page)
    limit(page, 4)
    choose(page, ("a.png", "image/png", picture(40, 40)))
    ask(page, "First")
    expect(page.locator(".assistant .served")).to_contain_text("4 tokens")
    page.locator(".user").get_by_role("button", name="Edit").click()
    page.get_by_label("Change the message").fill("Second")
    page.keyboard.press("Enter")
    expect(page.locator(".user > .text")).to_have_text("Second")
    expect(page.locator(".assistant .served")).to_contain_text("4 tokens")
    assert len(sent_images(bodies[1])) == 1
    stored = """() => new Promise((resolve) => {
      indexedDB.open('pdserve-chat').onsuccess = ({target: {result}}) => {
        result.transaction('images').objectStore('images').count().onsuccess = ({target}) => {
          result.close();
          resolve(target.result);
        };
      };
    })"""
    assert page.evaluate(stored) == 1
    page.get_by_role("button", name="Delete: Second").click()
    page.wait_for_function(f"({stored})().then((number) => number === 0)")


def test_model_that_reads_text_only_takes_no_image(watched: Watched, fleet: Fleet) -> None:
    page = watched.open(fleet.url)
    expect(page.locator("#model")).to_have_value(MODEL_NAME)
    expect(page.locator("#attach")).to_be_hidden()
    give(page, "paste", "#entry", picture(40, 40))
    expect(page.locator("#notice")).to_have_text(f"{MODEL_NAME} reads text only; it takes no images.")
    expect(page.locator("#attachments")).to_be_hidden()
    assert watched.complaints == []


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_images_fit_small_and_large_windows(
    width: int, scheme: Any, browser: Browser, seeing: Fleet, tmp_path: Path
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(seeing.url)
    expect(page.locator("#attach")).to_be_visible()
    limit(page, 12)
    choose(page, ("wide.png", "image/png", picture(1600, 300)), ("tall.png", "image/png", picture(200, 900)))
    expect(page.locator("#attachments li")).to_have_count(2)
    ask(page, "Which of these two pictures is taller?")
    expect(page.locator(".assistant .served")).to_contain_text("12 tokens")
    choose(page, *[(f"{number}.png", "image/png", picture(2500, 90, seed=number)) for number in range(4)])
    expect(page.locator("#attachments li")).to_have_count(4)
    page.locator("#entry").fill("And these four?")
    page.screenshot(path=tmp_path / f"images-{width}-{scheme}.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") <= 900
    assert page.evaluate(
        "document.querySelector('#scroll').scrollWidth <= document.querySelector('#scroll').clientWidth"
    )
    assert page.evaluate(CONTRASTS) == []
    assert accessibility_faults(page) == []
    context.close()
