"""Hostile templates and messages: each fails its own request only, and the next chat is served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

import psutil
import pytest
import uvloop
from router_process import wait_for

from pdserve.errors import RequestError
from router.text.chat.template import ChatTemplate, RenderRequest
from router.text.chat.template_renderer import TemplateRenderers

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
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=20)
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


def test_slow_template_delays_others_by_at_most_its_time_limit() -> None:
    async def run() -> None:
        renderers = TemplateRenderers(ChatTemplate(TEMPLATE, {}), seconds=1.0)
        try:
            results = await asyncio.gather(
                *(renderers.render(render_request(say)) for say in ["loop", "loop", "one", "two"]),
                return_exceptions=True,
            )
        finally:
            await renderers.close()
        assert [isinstance(result, RequestError) for result in results] == [True, True, False, False]
        assert results[2:] == ["one", "two"]

    asyncio.run(run())
