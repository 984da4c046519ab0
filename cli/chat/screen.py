"""An answer on a terminal while it streams: finished Markdown blocks stay, the last one is redrawn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

from cli.chat.client import Draw

_REDRAW_SECONDS = 1 / 15
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def clean(text: str) -> str:
    """Replace control characters: a model's text must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def finished_length(text: str) -> int:
    """Return the number of characters in complete top-level Markdown blocks, which later text cannot change.

    A block is complete when a blank line and then a line without indentation follow it, outside of fenced code.
    """
    fence = ""
    blank = False
    at = 0
    finished = 0
    for line in text.splitlines(keepends=True):
        if not line.strip():
            blank = not fence
        else:
            if blank and not line[0].isspace():
                finished = at
            blank = False
            if mark := _FENCE.match(line):
                if not fence:
                    fence = mark[1]
                elif mark[1].startswith(fence) and line.strip() == mark[1]:
                    fence = ""
        at += len(line)
    return finished


@contextmanager
def plain_screen(console: Console) -> Iterator[Draw]:
    """Yield a function that prints text as it arrives, unchanged unless it goes to a terminal; no reasoning."""

    def draw(reasoning: str, text: str) -> None:
        console.file.write(clean(text) if console.is_terminal else text)
        console.file.flush()

    yield draw
    console.file.write("\n")


@contextmanager
def markdown_screen(console: Console) -> Iterator[Draw]:
    """Yield a function that shows text as Markdown, and reasoning dimmed. What was drawn stays on the screen."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        block = _Block(live, reasoning=True)

        def draw(reasoning: str, text: str) -> None:
            nonlocal block
            if text and block.reasoning:
                block.finish()
                block = _Block(live, reasoning=False)
            block.add(text or reasoning)

        try:
            yield draw
        finally:
            block.finish()


class _Block:
    """Reasoning or text that still grows."""

    def __init__(self, live: Live, reasoning: bool) -> None:
        self.reasoning = reasoning
        self._live = live
        self._text = ""
        self._drawn = 0.0  # monotonic time

    def add(self, text: str) -> None:
        self._text += clean(text)
        if (now := monotonic()) - self._drawn < _REDRAW_SECONDS:
            return
        self._drawn = now
        length = finished_length(self._text)
        if length:
            self._print(self._text[:length])
            self._text = self._text[length:]
        self._live.update(_Tail(self._rendered(self._text)), refresh=True)

    def finish(self) -> None:
        self._live.update(Text(), refresh=True)
        if self._text.strip():
            self._print(self._text)
        self._text = ""

    def _print(self, text: str) -> None:
        self._live.update(Text())
        self._live.console.print(self._rendered(text), Text())

    def _rendered(self, text: str) -> RenderableType:
        return Text(text.strip(), "dim") if self.reasoning else Markdown(text)


class _Tail:
    """The last lines of a renderable that fit on the screen."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: object) -> Iterable[Segments]:
        lines = console.render_lines(self._whole, pad=False)[-max(1, console.height - 2) :]
        yield Segments([segment for line in lines for segment in (*line, Segment.line())])
