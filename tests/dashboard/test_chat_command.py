"""``pdserve chat`` on a real terminal and in pipes, with a real router and simulated nodes."""

from __future__ import annotations

import argparse
import io
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
from fleet import MODEL_NAME, Fleet
from http_stub import http_stub
from machine import patience
from rich.console import Console
from terminal import PATIENCE, environ, terminal

from cli.chat.client import Answer, ChatClient
from cli.chat.conversation import Conversation
from cli.chat.interrupts import Interrupts
from cli.chat.screen import finished_length, markdown_screen
from cli.chat.terminal import read_message
from cli.main import main


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "cli", "chat", *argv]


def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*argv), input=stdin, capture_output=True, text=True, timeout=patience(PATIENCE), env=environ()
    )


def test_chat_on_a_terminal(fleet: Fleet) -> None:
    with terminal(command(fleet.url, "--max-tokens", "12")) as screen:
        screen.read_text("> ")
        screen.press("The river is long and the bridge is old. " * 6 + "\r")
        screen.read_text("→ d-")
        first = screen.read_text("prompt tokens cached · stopped at the limit of tokens")
        assert re.search(r"first token [\d.]+ m?s · .*tokens/s · 12 tokens · 0 of \d+", first)
        screen.read_text("> ")
        screen.press('"""one\rtwo\rthree"""\r')
        again = screen.read_text("prompt tokens cached")
        assert re.search(r" [1-9]\d* of \d+ $", again), again  # the history is the same prefix
        for typed, said in (
            ("/sytem", "did you mean system?"),
            ("/system Be brief.", "system prompt: Be brief."),
            ("/model", f"{MODEL_NAME} (in use)"),
            ("/clear", "The conversation is empty."),
            ("/retry", "there is no message to answer again"),
            ("/help", "Ctrl-C stops an answer."),
        ):
            screen.press(f"{typed}\r")
            screen.read_text(said)
        screen.press("/exit\r")
        assert screen.wait() == 0
        assert screen.settings == screen.before


def test_ctrl_c_stops_an_answer_and_then_only_clears_the_line(fleet: Fleet) -> None:
    with terminal(command(fleet.url)) as screen:
        screen.read_text("> ")
        for node in fleet.decode:
            node.wait_idle()
        screen.press("Tell me everything.\r")
        fleet.wait_until(lambda: any(node.status().running for node in fleet.decode), PATIENCE)
        screen.read_text("\n")
        screen.process.send_signal(signal.SIGINT)
        screen.read_text("stopped")
        screen.read_text("> ")
        for node in fleet.decode:
            node.wait_idle()
        interrupt = partial(screen.process.send_signal, signal.SIGINT)
        interrupt()  # again if readline had shown its prompt but did not wait yet: then it notices only the next signal
        screen.read_text("Ctrl-D or /exit ends the chat.", repeat=interrupt)
        screen.read_text("> ")  # before it, the terminal itself would take the Ctrl-D
        screen.press("\x04")
        assert screen.wait() == 0


def test_ctrl_c_never_breaks_into_drawing(fleet: Fleet) -> None:
    """The part that is drawn is finished first. Then the request ends."""
    interrupts = Interrupts()
    drawn = list[str]()

    def draw(reasoning: str, text: str) -> None:
        signal.raise_signal(signal.SIGINT)
        drawn.append(text)

    args = argparse.Namespace(url=fleet.url, api_key="")
    with ChatClient(args, interrupts) as client, interrupts.handled():
        body = Conversation(MODEL_NAME, "", {}).body("Tell me everything.")
        with pytest.raises(KeyboardInterrupt):
            client.answer(body, Answer(), draw)
        assert "".join(drawn)
        for node in fleet.decode:
            node.wait_idle()
        client.answer({**body, "max_tokens": 3}, answer := Answer(), lambda reasoning, text: None)
        assert answer.finish == "length"


def interrupted() -> str:
    signal.raise_signal(signal.SIGINT)
    return "a message"


def test_ctrl_c_between_a_message_and_its_request_is_not_lost(fleet: Fleet) -> None:
    interrupts = Interrupts()
    drawn = list[str]()
    args = argparse.Namespace(url=fleet.url, api_key="")
    with ChatClient(args, interrupts) as client, interrupts.handled():
        assert interrupts.read(lambda: "Hello") == "Hello"
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            client.answer(Conversation(MODEL_NAME, "", {}).body("Hello"), Answer(), lambda *part: drawn.extend(part))
        assert not drawn
        signal.raise_signal(signal.SIGINT)  # the answer has ended
        with pytest.raises(KeyboardInterrupt):
            interrupts.read(interrupted)
        assert client.models() == [MODEL_NAME]


def test_error_of_the_router_is_one_line_and_the_chat_goes_on(fleet: Fleet) -> None:
    with terminal(command(fleet.url, "--max-tokens", "100000000")) as screen:
        screen.read_text("> ")
        screen.press("Hello\r")
        screen.read_text("max_tokens")
        screen.read_text("> ")
        screen.press("/exit\r")
        assert screen.wait() == 0


@pytest.mark.parametrize(("argv", "stdin"), [(["-q", "Hello"], ""), ([], "Hello\n")])
def test_piped_chat_prints_the_answer_alone(fleet: Fleet, argv: list[str], stdin: str) -> None:
    ended = run(fleet.url, "--max-tokens", "8", "--temperature", "0", *argv, stdin=stdin)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
    assert "\x1b" not in ended.stdout
    assert "tokens/s" not in ended.stdout


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"{}", "requires a valid API key"),
        (200, b"<html>", "does not speak the OpenAI protocol"),
        (200, b'{"data": [{"id": "other"}]}', "serves no model 'mine'; use one of other"),
        (404, b"not here", "answered with status 404; check the URL"),
    ],
)
def test_wrong_server_gives_one_line(status: int, body: bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with http_stub(status, body) as url:
        assert main(["chat", url, "--model", "mine", "-q", "Hello"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_unreachable_router_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "127.0.0.1:9", "-q", "Hello"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "no answer from http://127.0.0.1:9" in line


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""one', "", 'two"""'], "one\n\ntwo"),
        (['"""', "  one", '"""'], "  one"),
        (['"""one"""'], "one"),
    ],
)
def test_messages_of_several_lines(lines: list[str], message: str) -> None:
    remaining = iter(lines)
    assert read_message(lambda _: next(remaining)) == message


def test_only_answered_messages_are_sent_again() -> None:
    chat = Conversation("m", "Be brief.", {"seed": 1})
    chat.add("lost", "")
    chat.add("one", "answer")
    body = chat.body("two")
    assert [message["content"] for message in body["messages"]] == ["Be brief.", "one", "answer", "two"]
    assert body["seed"] == 1
    assert chat.take_last() == "one"
    assert chat.take_last() is None


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("- a\n\n  b\n\nc", "- a\n\n  b\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
    ],
)
def test_blocks_are_finished_by_what_follows(text: str, finished: str) -> None:
    assert text[: finished_length(text)] == finished


def test_markdown_is_rendered_without_control_characters() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    parts = [("thinking", ""), ("", "# Title\n\n- **a**\n"), ("", "- b\x1b[2J\n\n```python\nx = 1\n```\n")]
    with markdown_screen(console) as draw:
        for reasoning, text in parts:
            draw(reasoning, text)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\x1b" not in shown
    assert [word for word in ("thinking", "Title", "• a", "• b�[2J", "x = 1") if word not in shown] == []
