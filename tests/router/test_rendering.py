"""Hostile templates and messages: each fails its own request only, and the next chat is served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil
import pytest
import uvloop
from machine import patience
from router_process import wait_for

from pdserve.errors import RequestError
from router.text.chat.template import ChatTemplate, RenderRequest
from router.text.chat.template_renderer import TemplateRenderers
from router.text.fair_slots import CLIENT

TEMPLATE = """
{%- set say = messages[0]['say'] -%}
{%- if say == 'loop' -%}{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif say == 'memory' -%}{{ 'x' * 10000000000 }}
{%- elif say == 'double' -%}
  {%- set ns = namespace(x='xxxxxxxx') -%}
  {%- for a in range(60) -%}{%- set ns.x = ns.x ~ ns.x -%}{%- endfor -%}{{ ns.x }}
{%- elif say == 'format' -%}{{ '{:>9999999999}'.format(1) }}
{%- elif say == 'recurse' -%}{%- macro f() -%}{{ f() }}{%- endmacro -%}{{ f() }}
{%- elif say == 'raise' -%}{{ raise_exception('no thanks') }}
{%- elif say == 'escape' -%}{{ ''.__class__.__mro__ }}
{%- else -%}{{ say }}{%- endif -%}
"""
HOSTILE = {
    "loop": "takes more than",
    "memory": "too much memory|takes more than",
    "double": "too much memory|takes more than",
    "format": "too much memory|takes more than",
    "recurse": "cannot render",
    "raise": "no thanks",
    "escape": "refuses",
}


def render_request(say: object) -> RenderRequest:
    return RenderRequest([{"role": "user", "say": say}], True, {}, None, None, False)


def render_all(says: Sequence[object]) -> list[str]:
    """Return each text in order, or the error's message. Asserts that no process is left."""

    async def run() -> list[str]:
        renderers = TemplateRenderers(ChatTemplate(TEMPLATE, {}), seconds=2.0, max_memory=512 << 20)
        results = []
        try:
            for say in says:
                try:
                    results.append(await renderers.render(render_request(say)))
                except RequestError as exc:
                    results.append(f"{exc.param}: {exc}")
        finally:
            await renderers.close()
        return results

    before = set(psutil.Process().children())
    results = asyncio.run(run())
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=patience(20))
    assert not alive
    return results


def test_hostile_template_fails_only_its_own_request() -> None:
    says = [part for say in HOSTILE for part in (say, f"after {say}")]
    results = render_all(says)
    for say, hostile, after in zip(HOSTILE, results[::2], results[1::2], strict=True):
        assert hostile.startswith("messages: ")
        assert re.search(HOSTILE[say], hostile)
        assert after == f"after {say}"


def test_template_values_are_unchanged() -> None:
    says = ["", "日本語 🙂 \0\r\n", "x" * 1_000_000, 10**30, 0.1, [1, {"a": None}]]
    assert render_all(says) == [str(say) for say in says]


def test_memory_of_a_large_chat_is_given_back() -> None:
    async def run() -> None:
        renderers = TemplateRenderers(ChatTemplate(TEMPLATE, {}))
        try:
            before: set[int] = {process.pid for process in psutil.Process().children()}
            assert await renderers.render(render_request("one")) == "one"
            [process] = (process for process in psutil.Process().children() if process.pid not in before)
            resident = process.memory_info().rss
            large = RenderRequest([{"role": "user", "say": "two", "name": "x" * 20_000_000}])
            assert await renderers.render(large) == "two"
            wait_for(lambda: process.memory_info().rss < resident + 15_000_000)
        finally:
            await renderers.close()

    asyncio.run(run())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_killed_process_is_replaced(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        renderers = TemplateRenderers(ChatTemplate(TEMPLATE, {}))
        try:
            assert await renderers.render(render_request("one")) == "one"
            for process in psutil.Process().children():
                if "router.text.chat.render_process" in process.cmdline():
                    process.kill()
            await asyncio.sleep(0.2)  # until the loop has seen its end
            with pytest.raises(RequestError, match="crashed its process"):
                await renderers.render(render_request("two"))
            assert await renderers.render(render_request("three")) == "three"
        finally:
            await renderers.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


def test_slow_chats_of_a_client_leave_a_process_to_others() -> None:
    async def run() -> None:
        renderers = TemplateRenderers(ChatTemplate(TEMPLATE, {}), seconds=2.0)
        ended: list[object] = []

        async def render(client: str, say: str) -> None:
            CLIENT.set(client)
            with suppress(RequestError):
                await renderers.render(render_request(say))
            ended.append(say)

        try:
            slow = [asyncio.create_task(render("busy", "loop")) for _ in range(6)]
            await asyncio.sleep(0)
            await asyncio.gather(*(asyncio.create_task(render("quiet", say)) for say in ("one", "two")))
            assert ended == ["one", "two"]
            await asyncio.gather(*slow[:2])
            await asyncio.create_task(render("busy", "three"))  # a killed process is replaced
        finally:
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
            await renderers.close()

    asyncio.run(run())
