"""HTTP clients of other languages, unmodified, straight to a router and through nginx and HAProxy, plain and over TLS.

Streams are silent for longer than the proxies' timeouts, connections and WebSockets idle, bodies large. All ways are
tried at the same time, so the tests take little more than one silence each.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import small_tokenizers
import trustme
from certificates import write_https
from machine import patience
from proxies import proxy
from router_process import MODEL, router_process
from scripted_node import Conversation, ScriptedNode
from websockets.asyncio.client import connect

from router.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(600)]

SILENCE = 70.0  # seconds; nginx waits for 60, HAProxy as Debian configures it for 50
IDLE = 40.0  # seconds between requests of a connection; proxies end idle ones after 50 and 75
PROGRAMS = Path(__file__).parent / "programs" / "http"
WAYS = [f"{way}-{scheme}" for way in ("direct", "nginx", "haproxy") for scheme in ("http", "https")]
UPLOADED = "é" * 500_000  # as JSON six bytes each


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proxies")


@pytest.fixture(scope="module")
def authority(directory: Path) -> trustme.CA:
    ca = trustme.CA()
    (directory / "ca.pem").write_bytes(ca.cert_pem.bytes())
    write_https(directory / "cert.pem", directory / "key.pem", ca)
    return ca


@pytest.fixture(scope="module")
def urls(directory: Path, authority: trustme.CA) -> Iterator[dict[str, str]]:
    """URLs by way. Two routers, one with TLS, have a node that is silent, or answers "AB" at once."""
    (model_dir := directory / "model").mkdir()
    small_tokenizers.write(model_dir, small_tokenizers.byte_level(), chat_template=small_tokenizers.CHATML)
    a, b = Tokenizer.load(model_dir).encode("AB")
    node = ScriptedNode(MODEL)

    async def silent(conversation: Conversation) -> None:
        conversation.token(a)
        await asyncio.sleep(SILENCE)
        await brief(conversation)

    async def brief(conversation: Conversation) -> None:
        conversation.token(a)
        conversation.token(b, finish="length")

    node.scripts |= {"silent": silent, "brief": brief}
    flags = ["--decode", node.address, "--migrations", "0"]
    tls = ["--tls-cert", str(directory / "cert.pem"), "--tls-key", str(directory / "key.pem")]
    with ExitStack() as stack:
        stack.callback(node.close)
        plain = stack.enter_context(router_process(model_dir, flags))
        secure = stack.enter_context(router_process(model_dir, [*flags, *tls]))
        ways = {"direct-http": plain.url, "direct-https": f"https://{secure.address}"}
        for name in ("nginx", "haproxy"):
            urls = stack.enter_context(proxy(name, directory, plain.address))
            ways |= {f"{name}-{scheme}": url for scheme, url in urls.items()}
        yield ways


@pytest.fixture(scope="module")
def bodies(directory: Path) -> dict[str, str]:
    """Files of requests, by the variables that name them for programs."""
    completion = {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "stream": True}
    bodies: dict[str, dict[str, Any]] = {
        "UPLOAD": {"model": MODEL, "prompt": UPLOADED},
        "STREAM": completion | {"cache_salt": "silent"},
        "BRIEF": completion | {"cache_salt": "brief"},
    }
    for name, body in bodies.items():
        (directory / name).write_text(json.dumps(body))
    return {name: str(directory / name) for name in bodies}


@pytest.fixture(scope="module")
def environ(directory: Path, authority: trustme.CA, bodies: dict[str, str]) -> dict[str, str]:
    """Variables for programs, with the authority where each language looks for it."""
    ca = directory / "ca.pem"
    store = directory / "store"
    if shutil.which("keytool"):
        command: list[str | Path] = [
            "keytool",
            "-importcert",
            "-noprompt",
            "-alias",
            "ca",
            "-file",
            ca,
            "-keystore",
            store,
        ]
        subprocess.run([*command, "-storepass", "changeit"], check=True, capture_output=True)
    java = f"-Djavax.net.ssl.trustStore={store} -Djavax.net.ssl.trustStorePassword=changeit"
    authorities = {"SSL_CERT_FILE": ca, "NODE_EXTRA_CA_CERTS": ca, "AUTHORITY": ca, "JDK_JAVA_OPTIONS": java}
    return {**os.environ, **bodies, **{name: str(value) for name, value in authorities.items()}}


def built(language: str, directory: Path) -> list[str]:
    """Return the command of a program, compiled where that takes longer than to run it. Skips without its language."""
    program, source = {
        "java": ("javac", "Client.java"),
        "go": ("go", "client.go"),
        "node": ("node", "client.mjs"),
        "curl": ("curl", "curl.sh"),
    }[language]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is missing; install it to test {language}")
    path = str(PROGRAMS / source)
    match language:
        case "java":
            subprocess.run(["javac", "-d", directory, path], check=True)
            return ["java", "-cp", str(directory), "Client"]
        case "go":
            (cache := directory / "go").mkdir(exist_ok=True)
            environ = {**os.environ, "GOCACHE": str(cache), "GO111MODULE": "off"}
            subprocess.run(["go", "build", "-o", directory / "client", path], check=True, env=environ)
            return [str(directory / "client")]
        case "node":
            return ["node", path]
        case _:
            return ["bash", path]


@pytest.mark.parametrize("language", ["java", "go", "node", "curl"])
def test_default_clients_get_through(
    language: str, urls: dict[str, str], environ: dict[str, str], directory: Path
) -> None:
    """A list, a large upload, a stream that is silent for long, and a request after it."""
    command = built(language, directory)

    def output(way: str) -> str:
        variables = environ | {"PDSERVE_URL": urls[way]}
        seconds = SILENCE + patience(60)
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds)
        return ended.stdout + ended.stderr

    with ThreadPoolExecutor(len(WAYS)) as pool:
        outputs = dict(zip(WAYS, pool.map(output, WAYS), strict=True))
    counted: set[str] = set()
    for way, text in outputs.items():
        shown = dict(line.partition(" ")[::2] for line in text.splitlines())
        assert shown.get("models") == "200", (way, text)
        counted.add(next(iter(re.findall(r'"count":(\d+)', shown["upload"])), shown["upload"]))
        assert shown["stream"].count(": keep-alive") >= SILENCE // 10 - 2, (way, text)
        for name, tokens in (("stream", "AAB"), ("again", "AB")):
            assert [shown[name].count(f'"text":"{token}"') for token in "AB"] == [tokens.count("A"), 1], (way, text)
            assert "[DONE]" in shown[name], (way, text)
    assert len(counted) == 1, counted
    assert int(counted.pop()) >= len(UPLOADED)


def test_idle_connections_are_used_again(urls: dict[str, str], directory: Path, authority: trustme.CA) -> None:
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))

    def ask_twice(way: str) -> list[tuple[int, bool]]:
        url = urlsplit(urls[way])
        connections = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        fields: dict[str, Any] = {"context": context} if url.scheme == "https" else {}
        connection = connections[url.scheme](url.netloc, timeout=patience(20), **fields)
        answers = []
        for pause in (0.0, IDLE):
            time.sleep(pause)
            before = connection.sock
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            response.read()
            answers.append((response.status, before is None or connection.sock is before))
        connection.close()
        return answers

    with ThreadPoolExecutor(len(WAYS)) as pool:
        assert dict(zip(WAYS, pool.map(ask_twice, WAYS), strict=True)) == dict.fromkeys(WAYS, [(200, True)] * 2)


def test_websockets_idle_and_answer(urls: dict[str, str], directory: Path, authority: trustme.CA) -> None:
    """A socket without messages is kept by pings, and a silent response arrives whole."""
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    message = {"type": "response.create", "model": MODEL, "input": "Hi", "store": False, "max_output_tokens": 50}

    async def talk(url: str) -> list[str]:
        tls: dict[str, Any] = {"ssl": context} if url.startswith("https") else {}
        async with connect(url.replace("http", "ws", 1) + "/v1/responses", proxy=None, **tls) as opened:
            texts = []
            for salt in ("brief", "silent"):
                if salt == "silent":
                    await asyncio.sleep(SILENCE)
                await opened.send(json.dumps(message | {"cache_salt": salt}))
                events: list[dict[str, Any]] = []
                while not events or not events[-1]["type"].startswith(("response.completed", "response.inc", "error")):
                    events.append(json.loads(await asyncio.wait_for(opened.recv(), SILENCE + patience(20))))
                deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
                texts.append("".join(deltas))
            return texts

    async def all_ways() -> list[list[str]]:
        return await asyncio.gather(*(talk(urls[way]) for way in WAYS))

    assert dict(zip(WAYS, asyncio.run(all_ways()), strict=True)) == {way: ["AB", "AAB"] for way in WAYS}
