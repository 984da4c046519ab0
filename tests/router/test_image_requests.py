"""Images in requests of the three protocols, from the client's parts to the token ids and spans that a node gets."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from image_checkpoints import CELL, PROCESSOR, random_image, write_tokenizer
from machine import patience
from router_in_process import InProcessRouter, router_in_process
from router_process import MODEL
from scripted_image_node import ScriptedImageNode
from scripted_node import Conversation, ScriptedNode

from pdserve.images import ImageInput
from pdserve.rpc.protobuf import images_from_pb
from router.images.fetchers import Fetchers
from router.images.fetching import FetchRule
from router.images.loading import ImageLoader, ImageMemory
from router.responses_api.compaction import PROMPT
from router.text.chat.image_parts import ImagePart
from router.text.chat.template import RenderRequest
from router.text.tokenizer import Tokenizer

Result = TypeVar("Result")

CHAT = "/v1/chat/completions"
RENDER = "/v1/chat/completions/render"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
PAD = "<|image_pad|>"
CONTEXT = 2000
CELLS = [(4, 6), (5, 3)]  # rows and columns of IMAGES


def encoded(rows: int, columns: int, kind: str = "PNG") -> str:
    file = io.BytesIO()
    random_image(rows * CELL, columns * CELL, seed=rows).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


IMAGES = [encoded(*CELLS[0]), encoded(*CELLS[1], kind="JPEG")]
URLS = [f"data:image/png;base64,{IMAGES[0]}", f"DATA:;Base64,{IMAGES[1]}"]


def image_url(index: int, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": URLS[index], **fields}}


def input_image(index: int, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": URLS[index], **fields}


def block(index: int) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGES[index]}}


def text(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


class Asked:
    """The answers of a router, and what its node has got of the latest request."""

    def __init__(self, runner: asyncio.Runner, router: InProcessRouter, node: ScriptedNode) -> None:
        self._runner = runner
        self._router = router
        self._node = node

    @property
    def images(self) -> ImageLoader:
        return self._router.service.images

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        body = json.dumps({"model": MODEL, **fields}).encode()
        status, answer = self._runner.run(asyncio.wait_for(self._router.post(path, body), patience(60)))
        return status, json.loads(answer)

    def get(self, path: str) -> Any:
        status, answer = self._runner.run(asyncio.wait_for(self._router.get(path), patience(60)))
        assert status == 200, answer
        return json.loads(answer)

    @property
    def image_memory(self) -> ImageMemory:
        return self._router.service.images.memory

    def error(self, path: str, **fields: Any) -> str:
        status, answer = self.post(path, **fields)
        assert status == 400, answer
        assert len(json.dumps(answer)) < 2000
        return str(answer["error"]["message"])

    def generate(self, path: str, **fields: Any) -> tuple[Any, Conversation]:
        status, answer = self.post(path, **fields)
        assert status == 200, answer
        return answer, self._node.seen[""]


class SeeingNode(ScriptedImageNode):
    """Answers two tokens as soon as it has the pixels of the prompt."""

    def __init__(self, accepted: ImageInput | None) -> None:
        super().__init__(MODEL, "d0", images=accepted)
        self.description.max_model_len = CONTEXT
        self.description.vocab_size = 512
        self.scripts[""] = self._answer

    async def _answer(self, conversation: Conversation) -> None:
        digests = {span.digest for span in conversation.message.images}
        while not digests <= set(self.put):  # noqa: ASYNC110 - they may not have arrived yet
            await asyncio.sleep(0.005)
        self.put.clear()
        for index in range(max(1, conversation.message.sampling.n)):
            conversation.token(5, choice=index)
            conversation.token(6, choice=index, finish="stop")


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(tmp_path_factory.mktemp("sees"))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture(scope="module")
def accepted(tokenizer: Tokenizer) -> ImageInput:
    token_id = tokenizer.added_token_id(PAD)
    assert token_id is not None
    size = PROCESSOR["size"]
    return ImageInput(
        token_id=token_id,
        patch_size=PROCESSOR["patch_size"],
        merge_size=PROCESSOR["merge_size"],
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
        fingerprint=bytes(32),
    )


def _routers(path: Path, accepted: ImageInput | None, *more: str) -> Iterator[Asked]:
    node = SeeingNode(accepted)
    flags = ["--decode", node.address, "--tool-call-parser", "hermes", "--response-store", "memory"]
    flags += ["--trust-request-chat-template", *more]
    with asyncio.Runner() as runner:
        context = router_in_process(path, MODEL, flags)
        router = runner.run(context.__aenter__())
        yield Asked(runner, router, node)
        runner.run(context.__aexit__(None, None, None))
    node.close()


@pytest.fixture(scope="module")
def ask(tokenizer_dir: Path, accepted: ImageInput) -> Iterator[Asked]:
    """A router of a model that sees."""
    yield from _routers(tokenizer_dir, accepted)


@pytest.fixture(scope="module")
def ask_blind(tokenizer_dir: Path) -> Iterator[Asked]:
    """A router of a model that reads text only."""
    yield from _routers(tokenizer_dir, None)


def expected(tokenizer: Tokenizer, rendered: str, cells: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ids of a rendered chat, with one placeholder per token of each image."""
    assert rendered.count(PAD) == len(cells)
    texts = rendered.split(PAD)
    for rows, columns in cells:
        texts[0] += PAD * (rows * columns) + texts.pop(1)
    return tokenizer.encode(texts[0], add_special_tokens=False)


def check(conversation: Conversation, tokenizer: Tokenizer, rendered: str, cells: Sequence[tuple[int, int]]) -> None:
    """Check ids and spans of a prompt."""
    ids = expected(tokenizer, rendered, cells)
    assert conversation.prompt == ids
    spans = images_from_pb(conversation.message.images)
    assert [(span.rows, span.columns) for span in spans] == list(cells)
    assert len({span.digest for span in spans}) == len(set(cells))
    pad = tokenizer.added_token_id(PAD)
    assert {at for span in spans for at in range(span.start, span.end)} == {
        at for at, token_id in enumerate(ids) if token_id == pad
    }


SHOWN = f"<|vision_start|>{PAD}<|vision_end|>"
END = "<|im_end|>\n<|im_start|>assistant\n"


def test_chat_shows_its_images_in_their_places(ask: Asked, tokenizer: Tokenizer) -> None:
    content = user(text("First: "), image_url(0, detail="low"), text("Then: "), image_url(1), text("Which?"))
    answer, got = ask.generate(CHAT, messages=[content])
    check(got, tokenizer, f"<|im_start|>user\nFirst: {SHOWN}Then: {SHOWN}Which?{END}", CELLS)
    assert answer["usage"]["prompt_tokens"] == len(got.prompt)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 4 * 6 + 5 * 3}
    assert answer["usage"]["total_tokens"] == len(got.prompt) + 2


def test_choices_share_the_images_of_a_chat(ask: Asked, tokenizer: Tokenizer) -> None:
    answer, got = ask.generate(CHAT, messages=[user(image_url(1), text("?"))], n=3)
    check(got, tokenizer, f"<|im_start|>user\n{SHOWN}?{END}", CELLS[1:])
    assert len(answer["choices"]) == 3


def test_text_chat_of_a_model_that_sees_has_no_image_tokens(ask: Asked, tokenizer: Tokenizer) -> None:
    answer, got = ask.generate(CHAT, messages=[user(text("a"), text("b"))])
    check(got, tokenizer, f"<|im_start|>user\na\nb{END}", [])
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_results_of_tools_show_images_in_chats(ask: Asked, tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        user(text("Look")),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [text("Here"), image_url(0)]},
    ]
    _, got = ask.generate(CHAT, messages=messages)
    called = '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    rendered = (
        f"<|im_start|>user\nLook<|im_end|>\n<|im_start|>assistant\n{called}<|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\nHere{SHOWN}\n</tool_response>{END}"
    )
    check(got, tokenizer, rendered, CELLS[:1])


@pytest.mark.parametrize("images", [[], [0]])
def test_placeholder_in_the_text_of_a_client_stays_text(ask: Asked, tokenizer: Tokenizer, images: list[int]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": f"Draws {PAD}."}}]
    content = user(text(f"What is {PAD}{PAD}?"), *map(image_url, images))
    _, got = ask.generate(CHAT, messages=[content], tools=tools)
    spans = images_from_pb(got.message.images)
    assert len(spans) == len(images)
    pad = tokenizer.added_token_id(PAD)
    assert got.prompt.count(pad or 0) == sum(span.num_tokens for span in spans)
    assert f"What is {PAD}{PAD}?" in tokenizer.decode(got.prompt)
    assert f"Draws {PAD}." in tokenizer.decode(got.prompt)


def test_responses_show_images_of_users_and_outputs(ask: Asked, tokenizer: Tokenizer) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    items = [
        user(text("See", "input_text"), input_image(0, detail="high")),
        call,
        {"type": "function_call_output", "call_id": "1", "output": [input_image(1), text("there", "input_text")]},
    ]
    answer, got = ask.generate(RESPONSES, input=items, instructions="Be brief.")
    called = '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    rendered = (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSee{SHOWN}<|im_end|>\n"
        f"<|im_start|>assistant\n{called}<|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\n{SHOWN}there\n</tool_response>{END}"
    )
    check(got, tokenizer, rendered, CELLS)
    assert answer["usage"]["input_tokens"] == len(got.prompt)
    assert "warnings" not in answer


def test_messages_show_images_of_users_and_results(ask: Asked, tokenizer: Tokenizer) -> None:
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    fields: dict[str, Any] = {
        "messages": [
            user(block(0), text("See")),
            {"role": "assistant", "content": [call]},
            user({"type": "tool_result", "tool_use_id": "1", "content": [text("Here"), block(1)]}, text("Well?")),
        ]
    }
    answer, got = ask.generate(MESSAGES, max_tokens=9, **fields)
    called = '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    rendered = (
        f"<|im_start|>user\n{SHOWN}See<|im_end|>\n<|im_start|>assistant\n{called}<|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\nHere{SHOWN}\n</tool_response><|im_end|>\n<|im_start|>user\nWell?{END}"
    )
    check(got, tokenizer, rendered, CELLS)
    assert answer["usage"]["input_tokens"] == len(got.prompt)
    assert ask.post(COUNT, **fields)[1] == {"input_tokens": len(got.prompt)}


def test_tokenize_and_render_count_the_tokens_of_images(ask: Asked, tokenizer: Tokenizer) -> None:
    messages = [user(text("What? "), image_url(0), image_url(1))]
    _, got = ask.generate(CHAT, messages=messages)
    status, counted = ask.post("/tokenize", messages=messages)
    assert (status, counted["tokens"]) == (200, got.prompt)
    status, rendered = ask.post(RENDER, messages=messages)
    assert (status, rendered["token_ids"]) == (200, got.prompt)
    spans = images_from_pb(got.message.images)
    assert rendered["features"] == {
        "mm_hashes": {"image": [span.digest.hex() for span in spans]},
        "mm_placeholders": {"image": [{"offset": span.start, "length": span.num_tokens} for span in spans]},
    }


FAULTS: dict[str, tuple[Any, str]] = {
    "http": ({"url": "https://example.com/a.png"}, "an http URL; no image is fetched here"),
    "another scheme": ({"url": "file:///etc/passwd"}, "has a URL without the scheme data; send the image itself"),
    "no base64": ({"url": "data:image/png,%89PNG"}, "without base64"),
    "no data": ({"url": "data:image/png;base64,"}, "without data"),
    "no URL": ({}, "has no URL"),
    "detail": ({"url": URLS[0], "detail": "most"}, "has detail 'most'; use one of auto, low, high"),
    "letters": ({"url": "data:image/png;base64,§§§§"}, "no base64"),
    "no image": ({"url": "data:image/png;base64,AAAA"}, "PNG, JPEG, WebP or GIF image"),
    "size": ({"url": "data:image/png;base64," + "A" * 28_000_000}, "the limit is 20971520"),
    "URL": ({"url": "data:image/png;base64," + "A" * 30_000_000}, "the limit is 29360128"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_image_that_cannot_be_used_is_named(ask: Asked, name: str) -> None:
    image, said = FAULTS[name]
    part = {"type": "image_url", "image_url": image}
    error = ask.error(CHAT, messages=[user(text("a")), {"role": "assistant", "content": "b"}, user(text("c"), part)])
    assert error.startswith("messages[2].content[1]")
    assert said in error


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "video_url", "video_url": {"url": "x"}}, "messages[0].content[1] has type 'video_url'"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[1] has type 'input_audio'"),
        ({"type": "file", "file": {}}, "messages[0].content[1] has type 'file'"),
        ({"type": "image"}, "send images as parts of type 'image_url'"),
    ],
)
def test_other_parts_are_named(ask: Asked, part: Any, said: str) -> None:
    assert said in ask.error(CHAT, messages=[user(image_url(0), part)])


def test_files_and_urls_are_named_in_responses_and_messages(ask: Asked) -> None:
    file = {"type": "input_image", "file_id": "f1"}
    assert ask.error(RESPONSES, input=[user(file)]).startswith("input[0].content[0] names a file")
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    assert ask.error(MESSAGES, max_tokens=1, messages=[user(image)]).startswith("messages[0].content[0] has an http")
    image = {"type": "image", "source": {"type": "file", "file_id": "f1"}}
    assert "has a source of type 'file'" in ask.error(MESSAGES, max_tokens=1, messages=[user(image)])


def test_images_by_url_are_seen_where_they_are_allowed(
    tokenizer_dir: Path, accepted: ImageInput, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = [base64.b64decode(image) for image in IMAGES]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        file = answered[int(head.split()[1][1:])]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(file) + file)
        await writer.drain()
        writer.close()

    for ask in _routers(tokenizer_dir, accepted, "--allow-image-urls"):
        server = ask.run(asyncio.start_server(answer, "127.0.0.1", 0))
        port = server.sockets[0].getsockname()[1]
        urls = [f"http://127.0.0.1:{port}/{index}" for index in range(2)]
        image = {"type": "image_url", "image_url": {"url": urls[0]}}
        assert f"messages[0].content[1]: its URL has port {port}" in ask.error(CHAT, messages=[user(text("a"), image)])
        inside = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
        assert "not on the public internet" in ask.error(CHAT, messages=[user(inside)])
        rule = FetchRule(("127.0.0.1/32",), (port,))
        monkeypatch.setattr(ask.images, "_fetchers", Fetchers(rule))
        rendered = f"<|im_start|>user\n{SHOWN}{SHOWN}?{END}"
        parts = [{"type": "input_image", "image_url": url} for url in urls]
        check(ask.generate(RESPONSES, input=[user(*parts, text("?", "input_text"))])[1], tokenizer, rendered, CELLS)
        blocks = [{"type": "image", "source": {"type": "url", "url": url}} for url in urls]
        messages = [user(*blocks, text("?"))]
        answer_, got = ask.generate(MESSAGES, max_tokens=9, messages=messages)
        check(got, tokenizer, rendered, CELLS)
        assert ask.post(COUNT, messages=messages)[1] == {"input_tokens": answer_["usage"]["input_tokens"]}
        server.close()


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_images_of_other_roles_are_named(ask: Asked, role: str) -> None:
    message = {"role": role, "content": [image_url(0)]}
    assert "messages[0].content[0] is an image in a message of another role" in ask.error(
        CHAT, messages=[message, user(text("a"))]
    )
    item = {"role": role, "content": [input_image(0)]}
    assert "input[0].content[0] is an image in a message" in ask.error(
        RESPONSES, input=[item, user(text("a", "input_text"))]
    )


def test_too_many_images_are_refused_by_number(ask: Asked) -> None:
    assert "more than 100 images, the limit of a prompt" in ask.error(CHAT, messages=[user(*[image_url(0)] * 101)])


def test_error_of_a_prompt_that_is_too_long_names_its_images(ask: Asked) -> None:
    error = ask.error(CHAT, messages=[user(*[image_url(0)] * 90)])
    assert f"({90 * 24} of 90 images)" in error
    assert "smaller images" in error


def test_prompt_with_images_is_not_truncated(ask: Asked) -> None:
    messages = [user(image_url(0), text("word " * 30))]
    error = ask.error(CHAT, messages=messages, truncate_prompt_tokens=40)
    assert "prompts with images are not cut" in error
    ask.generate(CHAT, messages=messages, truncate_prompt_tokens=400)


def test_chat_that_ends_with_an_image_is_refused(ask: Asked) -> None:
    template = "a{% for part in messages[0].content %}<|image_pad|>{% endfor %}"
    assert "ends with an image" in ask.error(CHAT, messages=[user(image_url(0))], chat_template=template)
    assert "shows 2" in ask.error(CHAT, messages=[user(image_url(0), text("b"))], chat_template=template + "c")
    ask.generate(CHAT, messages=[user(image_url(0))], chat_template=template + "c")


CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}


def test_continued_responses_see_the_images_of_all_turns_before(ask: Asked, tokenizer: Tokenizer) -> None:
    first, _ = ask.generate(RESPONSES, input=[user(input_image(0), text("See?", "input_text")), CALL])
    url = {"type": "image_url", "image_url": {"url": URLS[1], "detail": "low"}}
    output = {"type": "function_call_output", "call_id": "1", "output": [url]}
    second, got = ask.generate(RESPONSES, input=[output], previous_response_id=first["id"])
    assert [(span.rows, span.columns) for span in images_from_pb(got.message.images)] == CELLS
    answer, again = ask.generate(RESPONSES, input="And now?", previous_response_id=second["id"])
    assert again.prompt[: len(got.prompt)] == got.prompt
    assert again.message.images == got.message.images
    assert "warnings" not in answer


def test_stored_items_show_their_images(ask: Asked) -> None:
    first, _ = ask.generate(RESPONSES, input=[user(input_image(0, detail="high"))])
    listed = ask.get(f"{RESPONSES}/{first['id']}/input_items")
    assert listed["data"][0]["content"] == [{"type": "input_image", "image_url": URLS[0], "detail": "high"}]
    item = listed["data"][0]["id"]
    _, got = ask.generate(RESPONSES, input=[{"type": "item_reference", "id": item}, user(input_image(1))])
    assert [(span.rows, span.columns) for span in images_from_pb(got.message.images)] == CELLS


def test_stored_image_without_data_is_a_placeholder(ask: Asked, tokenizer: Tokenizer) -> None:
    """Earlier versions stored none."""
    lost = user({"type": "input_image"}, text("See?", "input_text"))
    answer, got = ask.generate(RESPONSES, input=[lost, user(text("And now?", "input_text"))])
    assert "[an image, which is not stored]\nSee?" in tokenizer.decode(got.prompt)
    assert "1 images are placeholders" in answer["warnings"][0]
    assert not got.message.images


def test_images_that_will_be_stored_count_as_image_memory(ask: Asked) -> None:
    memory = ask.image_memory
    gc.collect()
    before = memory.num_bytes
    budget = memory.budget
    pixels = CELLS[0][0] * CELLS[0][1] * CELL**2 * 3
    memory.budget = before + pixels + len(URLS[0]) - 1
    try:
        asked = [user(input_image(0))]
        ask.generate(RESPONSES, input=asked, store=False)
        status, answer = ask.post(RESPONSES, input=asked)
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        memory.budget = len(URLS[0]) - 1
        assert "send fewer or smaller images, or store: false" in ask.error(RESPONSES, input=asked)
    finally:
        memory.budget = budget
    ask.generate(RESPONSES, input=asked)
    gc.collect()
    assert memory.num_bytes == before


def test_background_response_sees_its_images(ask: Asked, tokenizer: Tokenizer) -> None:
    items = [user(input_image(1), text("Later?", "input_text"))]
    answer, got = ask.generate(RESPONSES, input=items, background=True)
    assert answer["status"] in ("queued", "in_progress")
    check(got, tokenizer, f"<|im_start|>user\n{SHOWN}Later?{END}", CELLS[1:])


def test_compaction_sees_the_images_of_the_conversation(ask: Asked, tokenizer: Tokenizer) -> None:
    items = [user(input_image(0)), {"role": "assistant", "content": "b"}]
    _, got = ask.generate("/v1/responses/compact", input=items)
    rendered = (
        f"<|im_start|>user\n{SHOWN}<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\n{PROMPT}{END}"
    )
    check(got, tokenizer, rendered, CELLS[:1])


def test_model_that_reads_text_only_refuses_images_of_the_newest_turn(ask_blind: Asked) -> None:
    said = "is an image; the model reads text only"
    assert f"messages[0].content[0] {said}" in ask_blind.error(CHAT, messages=[user(image_url(0))])
    assert f"input[0].content[0] {said}" in ask_blind.error(RESPONSES, input=[user(input_image(0))])
    assert f"messages[0].content[0] {said}" in ask_blind.error(MESSAGES, max_tokens=1, messages=[user(block(0))])


def test_model_that_reads_text_only_gets_placeholders_of_earlier_images(ask_blind: Asked, tokenizer: Tokenizer) -> None:
    items = [user(input_image(0)), {"role": "assistant", "content": "b"}, user(text("c", "input_text"))]
    answer, got = ask_blind.generate(RESPONSES, input=items)
    assert "[an image, which this model cannot see]" in tokenizer.decode(got.prompt)
    assert answer["warnings"] == ["the model reads text only: 1 images are placeholders"]
    turns = [user(block(0)), {"role": "assistant", "content": "b"}, user(text("c"))]
    answer, got = ask_blind.generate(MESSAGES, max_tokens=1, messages=turns)
    assert "[image: this model reads text only]" in tokenizer.decode(got.prompt)
    assert answer["warnings"] == ["the model reads text only: 1 images are placeholders"]
    assert ask_blind.post(COUNT, messages=[user(block(0))])[0] == 200


def test_history_with_a_refused_image_takes_the_next_message(ask_blind: Asked, tokenizer: Tokenizer) -> None:
    """Codex keeps a refused message, and sends it with each later one."""
    refused = user(text("What is it?", "input_text"), input_image(0))
    assert "input[0].content[1] is an image" in ask_blind.error(RESPONSES, input=[refused])
    answer, got = ask_blind.generate(RESPONSES, input=[refused, user(text("Go on.", "input_text"))])
    seen = "What is it?\n[an image, which this model cannot see]\nGo on."
    assert seen in tokenizer.decode(got.prompt)
    assert answer["warnings"] == ["the model reads text only: 1 images are placeholders"]


def test_data_of_images_is_not_shown() -> None:
    assert IMAGES[0] not in repr(ImagePart("a", IMAGES[0]))


def test_models_name_what_they_take(ask: Asked, ask_blind: Asked) -> None:
    for asked, modalities in ((ask, ["text", "image"]), (ask_blind, ["text"])):
        (card,) = asked.get("/v1/models")["data"]
        assert card["architecture"] == {"input_modalities": modalities, "output_modalities": ["text"]}


def test_template_gets_no_data(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    assert template is not None
    message = user({"type": "image", "number": 1}, text("a"), {"type": "image", "number": 0})
    with pytest.raises(Exception, match="not in the order of their calls"):
        template.render(RenderRequest([message]))
