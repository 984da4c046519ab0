"""Sources from flags, DNS names, and the merged sources of a role."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from pdserve.discovery.polling import dns_addresses, file_addresses, resolve_name
from pdserve.discovery.sources import Directory, check_address, check_source
from pdserve.errors import ConfigError


@pytest.mark.parametrize(
    "source",
    [
        "h:1",
        "[::1]:9001",
        "dns://prefill.ai.svc.cluster.local:9001",
        "k8s://ai/prefill:9001",
        "k8s://ai/prefill:grpc",
        "file:///etc/pdserve/prefill",
    ],
)
def test_sources_are_parsed(source: str) -> None:
    assert check_source(source) == source


@pytest.mark.parametrize(
    "source", ["", "h", "dns://h", "dns://h:p", "k8s://s:1", "k8s://n/s", "http://h:1", "h :1", "file://x"]
)
def test_invalid_source_is_refused(source: str) -> None:
    with pytest.raises(
        ConfigError, match="write host:port, dns://name:port, k8s://namespace/service:port or file:///path"
    ):
        check_source(source)


def test_dns_name_is_resolved_again_and_failures_change_nothing() -> None:
    answers: list[set[str] | None] = [None, {"10.0.0.1:1"}, {"10.0.0.1:1"}, None, {"10.0.0.2:1", "[fd00::1]:1"}]

    async def resolve(name: str, port: int) -> frozenset[str]:
        assert (name, port) == ("name", 1)
        answer = answers.pop(0)
        if answer is None:
            raise OSError("no such name")
        return frozenset(answer)

    async def run() -> list[frozenset[str]]:
        async with aclosing(dns_addresses("name", 1, interval=0.0, resolve=resolve)) as answers:
            return [await anext(answers), await anext(answers)]

    assert asyncio.run(run()) == [{"10.0.0.1:1"}, {"10.0.0.2:1", "[fd00::1]:1"}]


def test_file_is_read_again_and_invalid_content_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nodes"

    async def run() -> list[frozenset[str]]:
        async with aclosing(file_addresses(path, check_address, interval=0.0)) as answers:
            path.write_text("# of today\n\n a:1\nb:2\na:1\n")
            first = await anext(answers)
            second = asyncio.ensure_future(anext(answers))
            for text in (b"no address", b"\xff\xfe", None, b"c:3"):
                path.unlink() if text is None else path.write_bytes(text)
                await asyncio.sleep(0.01)
            return [first, await second]

    assert asyncio.run(run()) == [{"a:1", "b:2"}, {"c:3"}]


def test_localhost_resolves() -> None:
    assert "127.0.0.1:5" in asyncio.run(resolve_name("localhost", 5))


def test_sources_of_a_role_are_merged() -> None:
    async def run() -> list[set[str]]:
        reported: list[set[str]] = []
        directory = Directory(["a:1", "dns://127.0.0.1:2", "a:1"], lambda addresses: reported.append(set(addresses)))
        task = asyncio.create_task(directory.run())
        await directory.complete.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return reported

    assert asyncio.run(run())[-1] == {"a:1", "127.0.0.1:2"}
