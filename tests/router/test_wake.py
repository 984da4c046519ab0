from __future__ import annotations

import asyncio

from router.dialect.wake import Wake


def test_wake_ends_waits_before_and_after_it_is_set() -> None:
    async def use() -> list[str]:
        wake = Wake()
        order = list[str]()

        async def wait(name: str) -> None:
            await wake.wait()
            order.append(name)

        cancelled = asyncio.create_task(wait("cancelled"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        waiting = asyncio.create_task(wait("before"))
        await asyncio.sleep(0)
        wake.set()
        wake.set()
        await waiting
        await wait("after")
        wake.clear()
        again = asyncio.create_task(wait("again"))
        await asyncio.sleep(0)
        assert not again.done()
        wake.set()
        await again
        return order

    assert asyncio.run(use()) == ["before", "after", "again"]
