"""Random requests in five situations, whose answers must be equal: a differential fuzzer.

    python bench/fuzz_requests.py --minutes 30 [--seed 1]
    python bench/fuzz_requests.py --minutes 30 --kinds recurrent --runners V1     of one kind of KV cache
    python bench/fuzz_requests.py --minutes 30 --kinds images                     chats with 0 to 4 images
    python bench/fuzz_requests.py --minutes 30 --kinds images --runners V2        few and short, on 2 layers
    python bench/fuzz_requests.py --minutes 30 --adapters always                  LoRA adapters in every fleet
    python bench/fuzz_requests.py --seed 1 --fleet 7                         one fleet again, as a difference names it

Needs the test dependencies (pip install -e '.[dev]'); all processes run on this machine, on its CPU. Each fleet has a
random tiny model and nodes of either runner with kernel pages of their own: P, two D, and a reference of runner V1.
V2 runs in Triton's interpreter. Beside the reference, nodes may verify drafts, keep little KV on the device and more in
host memory and on a disk, and pull all that another has cached, or the second half of it. Models that see get chats
with images, whose nodes D may have towers of their own. Nodes may have two LoRA adapters, in one slot or in two; the
references of those requests have merged weights, and no adapters. Each request is sent

    alone         to the reference: one request at a time, never handed off
    handed off    to P and D, one request at a time
    amid others   together with all others, and with requests whose clients leave
    migrated      likewise, while a D that computes answers is killed or drained, or P is killed

Others, with long answers, are sent alone and

    not read      their clients stop reading until a D has paused a request, twice
    next turn     the same clients continue these answers

Tokens, texts, finish reasons and usage must be equal, log-probabilities within --tolerance. That bound lies between two
measured figures: sums in another order move them by up to 5e-6 in float32, and by up to 2e-4 behind delta nets, which
each round reports. One wrong token of 200 moves them by 0.03 or more, in each of these families.

The same --seed gives the same fleets, requests and faults.

After the first fleet with a difference, an unexpected error or a lost block, prints the requests and exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from answers import Answer, ErrorAnswer, first_difference, send_completion
from checkpoints import RECURRENT, make_checkpoint
from fault_injection import inject, is_ready, recover
from fleet import MODEL_NAME, RUNNER_ENVIRONMENTS, Fleet, NodeProcess, add_tokenizer
from image_chats import RandomChats, lengthened
from image_checkpoints import DEEPSTACK, VOCABULARY, add_predictor, largest_embeddings, make_image_checkpoint
from image_checkpoints import KINDS as SEEING
from lora_adapters import KINDS as ADAPTER_KINDS
from lora_adapters import make_adapter, merge
from random_requests import add_stops, new_chat, new_request

KINDS = {  # kinds of KV cache, with families
    "plain": ("llama", "qwen3", "mistral", "qwen2", "mixtral"),
    "window": ("gpt_oss",),
    "latent": ("deepseek_v3", "glm4_moe_lite"),
    "recurrent": ("qwen3_next", "qwen3_5_text"),
    "images": SEEING,
}
BLOCKS = (16, 32, 48, 64, 96, 128)  # tokens; equal on all nodes of a fleet
PAGES = {"V1": (8, 16, 32, 64), "V2": (16, 32, 64)}  # tokens of a kernel page, where they divide a block
CHUNK = 64  # tokens of a step at most
LONGEST = 200  # tokens of a prompt without images
COMMON = ("--max-num-seqs", "8", "--peer-timeout", "30")
CONTEXT = 512  # tokens
IMAGE_CHUNKS = (16, 48, 64, 200, 2048)  # tokens of a step at most
IMAGE_CONTEXT = 1280  # tokens
LEAST_DRAFTING = 32  # tokens of a step of 8 sequences with 3 drafts each
SMALL_CHUNKS = (16, 48, 64)  # beside nodes of V2: its interpreter takes seconds for a hundred tokens
SMALL_LONGEST = 40  # tokens of a chat's texts there
SMALL_TEXT = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4}
PREDICTING = ("qwen3_5", "qwen3_5_moe")  # families of which some checkpoints have a layer that makes drafts
DEEPSTACK_LAYERS = 3  # text layers that a tower joins
FAULTS = ("kill", "kill engine", "terminate")
ANSWER_SECONDS = 900.0  # the longest wait for an answer
#: Triton's interpreter takes seconds per token on a busy machine, and no D may pause for minutes.
PATIENT = ("--client-stall-timeout", f"{ANSWER_SECONDS}", "--request-timeout", f"{4 * ANSWER_SECONDS}")
NOISE = 2  # requests at a time whose clients leave; one beside nodes of V2 that see
#: Numbers of flags that are not given: usually, and for chats with images to nodes of V2. There, a request that is not
#: read would take minutes.
NUMBERS = {"requests": (12, 3), "unread": (3, 0), "max_tokens": (12, 4)}
TOLERANCE = 1e-4  # largest difference of log-probabilities
TOLERANCES = dict.fromkeys((*KINDS["recurrent"], "qwen3_5", "qwen3_5_moe"), 1e-3)
ALWAYS = ("--speculate-when", "always")
KV_MEMORY = "1MiB"
IMAGE_KV_MEMORY = "3MiB"
TIERS = ("--host-kv-memory", "2MiB", "--disk-kv-size", "1GiB")
PULL_HOOK = Path(__file__).parents[1] / "tests" / "e2e" / "split_pulls"  # lets nodes pull whatever that costs
TURNS = 4  # equal requests at a time: not all of them get to the D with the KV
LONGEST_TURN = 500  # tokens of a prompt that continues an answer
UNREAD_TOKENS = 300  # tokens of all choices: more than the buffers between node and client hold, with log-probabilities
COUNTERS = {  # counters of nodes since their last start
    "handoffs": "handoffs",
    "pulled_tokens": "tokens pulled",
    "pull_computed_tokens": "tokens computed beside pulls",
    "host_kv_hit_tokens": "tokens from host memory",
    "disk_kv_hit_tokens": "tokens from disk",
    "spec_decode_num_draft_tokens": "drafts",
    "preemptions": "preemptions",
    "images_encoded": "images encoded",
    "image_cache_hits": "images found encoded",
}
ADAPTERS = ("a", "b")  # names of models
SLOTS = {"never": (0,), "sometimes": (0, 1, 2), "always": (1, 2)}  # numbers of slots to draw from; 0: no adapters
LARGEST_RANK = "24"
REPEATED = 0.4  # share of requests with the prompt of an earlier one, which may have another adapter
REFUSED = "refused"  # the only choice's finish reason of a request that the router refuses

Body = dict[str, Any]
Clients = Mapping[str, httpx.AsyncClient]  # clients of references, by the model that requests name


@dataclass(frozen=True)
class NodePlan:
    runner: str
    page: int

    @classmethod
    def draw(cls, rng: random.Random, block: int, runners: list[str]) -> NodePlan:
        runner = rng.choice(runners)
        return cls(runner, rng.choice([page for page in PAGES[runner] if block % page == 0]))

    def __str__(self) -> str:
        return f"{self.runner} with pages of {self.page}"


@dataclass(frozen=True)
class FleetPlan:
    """The random model and nodes of a fleet."""

    family: str
    vocabulary: int
    block: int
    prefill: NodePlan
    decode: tuple[NodePlan, NodePlan]
    drafts: bool
    tiers: bool
    pulls: str  # "whole", "split": a node computes the first half meanwhile; "": none
    predicts: bool = False  # drafts are those of the model's own layer
    towers: tuple[bool, bool] = (False, False)  # whether each node D encodes images
    one_image: bool = False  # caches of embeddings hold one image of the largest size
    chunk: int = CHUNK
    slots: int = 0  # slots of adapters on each node; 0: no adapters
    adapter_kinds: tuple[str, str] = ("all", "all")

    @classmethod
    def draw(cls, rng: random.Random, args: argparse.Namespace) -> FleetPlan:
        block = rng.choice(BLOCKS)
        nodes = [NodePlan.draw(rng, block, args.runners) for _ in range(3)]
        plan = cls(
            rng.choice(KINDS[rng.choice(args.kinds)]),
            rng.choice(args.vocabularies),
            block,
            nodes[0],
            (nodes[1], nodes[2]),
            drafts=rng.random() < 0.5,
            tiers=rng.random() < 0.5,
            pulls=rng.choice(("", "whole", "split")),
        )
        if plan.sees:
            plan = plan._with_images(rng)
        kinds = rng.sample([*ADAPTER_KINDS], 2)
        return replace(plan, slots=rng.choice(SLOTS[args.adapters]), adapter_kinds=(kinds[0], kinds[1]))

    def _with_images(self, rng: random.Random) -> FleetPlan:
        return replace(
            self,
            vocabulary=VOCABULARY,
            predicts=self.drafts and self.family in PREDICTING and rng.random() < 0.5,
            towers=rng.choice(((False, False), (False, True), (True, True))),
            one_image=rng.random() < 0.4,
            chunk=max(
                LEAST_DRAFTING if self.drafts else 0, rng.choice(SMALL_CHUNKS if self.interprets else IMAGE_CHUNKS)
            ),
        )

    @property
    def interprets(self) -> bool:
        return any(node.runner == "V2" for node in (self.prefill, *self.decode))

    @property
    def longest(self) -> int:
        """Tokens of a prompt without images, or of a chat's texts."""
        return SMALL_LONGEST if self.is_slow else LONGEST

    def chats(self, rng: random.Random) -> RandomChats:
        return RandomChats(rng, like_placeholders=True, small=self.interprets)

    @property
    def sees(self) -> bool:
        return self.family in SEEING

    def make(self, path: Path, seed: int) -> Path:
        """Write the checkpoint."""
        if self.sees:
            model = make_image_checkpoint(path, self.family, seed=seed, **self._small_layers)
            if self.predicts:
                add_predictor(model)
            return model
        layers: Body = {} if self.family in RECURRENT else {"num_hidden_layers": 2}
        return add_tokenizer(make_checkpoint(path, self.family, seed=seed, vocab_size=self.vocabulary, **layers))

    @property
    def _small_layers(self) -> Body:
        """Fields of text_config for Triton's interpreter."""
        if not self.is_slow:
            return {}
        if self.family in DEEPSTACK:
            return {"num_hidden_layers": DEEPSTACK_LAYERS}
        return SMALL_TEXT if self.family in ("qwen3_5", "qwen3_5_moe") else {"num_hidden_layers": 2}

    @property
    def is_slow(self) -> bool:
        """Whether Triton's interpreter computes prompts with images."""
        return self.sees and self.interprets

    def numbers(self, args: argparse.Namespace) -> argparse.Namespace:
        """Return the flags, with numbers where they are not given."""
        given = vars(args)
        drawn = {name: choices[self.is_slow] for name, choices in NUMBERS.items() if given[name] is None}
        return argparse.Namespace(**given | drawn)

    @property
    def common_flags(self) -> list[str]:
        context = IMAGE_CONTEXT if self.sees else CONTEXT
        return [*COMMON, "--max-batch-tokens", str(self.chunk), "--max-model-len", str(context)]

    def make_adapters(self, model: Path, directory: Path, seed: int) -> dict[str, Path]:
        """Write the adapters; return the directories of all, by name."""
        if not self.slots:
            return {}
        kinds = zip(ADAPTERS, self.adapter_kinds, strict=True)
        return {
            name: make_adapter(directory / "adapters" / name, model, kind, seed + number)
            for number, (name, kind) in enumerate(kinds)
        }

    @property
    def models(self) -> list[str]:
        """Names that requests give: the base's, and those of adapters."""
        return [MODEL_NAME, *(ADAPTERS if self.slots else ())]

    def flags(self, node: NodePlan, directory: Path) -> list[str]:
        flags = [*self.common_flags, "--block-size", str(self.block), "--kernel-block-size", str(node.page)]
        if self.slots:
            flags += ["--max-loras", str(self.slots), "--max-lora-rank", LARGEST_RANK]
            flags += [word for name in ADAPTERS for word in ("--lora", f"{name}={directory / 'adapters' / name}")]
        if self.drafts:
            flags += ["--speculate", "mtp" if self.predicts else "lookup", *ALWAYS]
        if self.tiers:
            memory = IMAGE_KV_MEMORY if self.sees else KV_MEMORY
            flags += ["--kv-cache-memory", memory, *TIERS, "--disk-kv", str(directory / "disk")]
        return flags

    @property
    def image_flags(self) -> list[str]:
        """Flags of nodes with a tower."""
        cache = ["--image-cache", str(largest_embeddings(self.family))] if self.one_image else []
        return ["--images", "on", *cache] if self.sees else []

    @property
    def edges(self) -> list[int]:
        """Numbers of tokens at which a prompt needs one more block, page or step."""
        return sorted({self.block, self.prefill.page, *(node.page for node in self.decode), self.chunk})

    def __str__(self) -> str:
        first, second = self.decode
        model = f"{self.family}, vocabulary {self.vocabulary}, blocks of {self.block}"
        extras = [name for name in ("drafts", "tiers") if getattr(self, name)]
        extras += [f"{self.pulls} pulls"] * bool(self.pulls)
        if self.slots:
            extras.append(f"adapters {' and '.join(self.adapter_kinds)} in {self.slots} slots")
        if self.sees:
            extras += [f"{sum(self.towers)} D with towers", f"steps of {self.chunk}"]
            extras += [name for name in ("predicts", "one_image") if getattr(self, name)]
        return ", ".join([model, f"P {self.prefill}", f"D {first}", f"D {second}", *extras])


@dataclass
class World:
    """The running processes of a fleet."""

    nodes: Fleet
    references: Mapping[str, Fleet]  # by the model that requests name

    @contextmanager
    @staticmethod
    def start(plan: FleetPlan, directory: Path, seed: int) -> Iterator[World]:
        model = plan.make(directory / "model", seed)
        adapters = plan.make_adapters(model, directory, seed)
        merged = {name: merge(model, path, directory / f"merged-{name}") for name, path in adapters.items()}
        listed = directory / "decode"
        listed.touch()
        pulls = {
            "SPLIT_PULLS": str(directory),
            "PULL_SECONDS": "0",
            "PYTHONPATH": f"{PULL_HOOK}:{os.environ.get('PYTHONPATH', '')}",
        }
        if plan.pulls == "split":
            (directory / "split").touch()
        with ExitStack() as stack:
            nodes = stack.enter_context(Fleet())
            references = {name: stack.enter_context(Fleet()) for name in plan.models}
            for name, reference in references.items():
                weights = merged.get(name, model)
                flags = [*plan.common_flags, *plan.image_flags, "--block-size", "16", "--served-model-name", name]
                reference.start_decode(weights, flags, RUNNER_ENVIRONMENTS["V1"])
                reference.start_router(weights, [*PATIENT, "--served-model-name", name])
            flags = [*plan.flags(plan.prefill, directory), "--lease-seconds", "3", "--drain-timeout", "0"]
            sources = ["--kv-source", f"file://{listed}"] if plan.pulls else []
            flags += [*sources, *plan.image_flags]
            nodes.start_prefill(model, flags, {**RUNNER_ENVIRONMENTS[plan.prefill.runner], **pulls})
            for node, sees in zip(plan.decode, plan.towers, strict=True):
                flags = [*plan.flags(node, directory), "--handoff-min-tokens", "1", "--drain-timeout", "0", *sources]
                flags += plan.image_flags if sees else ()
                nodes.start_decode(model, flags, {**RUNNER_ENVIRONMENTS[node.runner], **pulls})
            listed.write_text("".join(f"{node.address}\n" for node in nodes.nodes))
            policy = ["--policy", "prefix-aware"] if plan.pulls else []  # this policy names the nodes to pull from
            nodes.start_router(model, ["--migrations", "50", *PATIENT, *policy], pulls)
            nodes.wait_ready(300.0)
            for reference in references.values():
                reference.wait_ready(300.0)
            world = World(nodes, references)
            world.wait_served()
            yield world

    def wait_idle(self) -> None:
        """Wait until no node holds a block; each adds up its blocks."""
        for fleet in (self.nodes, *self.references.values()):
            for node in fleet.nodes:
                node.wait_idle(60.0)

    def wait_served(self) -> None:
        """Wait until the router knows all nodes again."""
        self.nodes.wait_until(lambda: all(is_ready(node) for node in self.nodes.nodes), 120.0)
        self.nodes.wait_until(lambda: self.router_metric("pdserve_nodes_ready") == len(self.nodes.nodes), 60.0)
        self.nodes.wait_until(lambda: all(node.describe().connected_peers for node in self.nodes.decode), 60.0)

    def router_metric(self, name: str) -> float:
        lines = httpx.get(f"{self.nodes.url}/metrics", trust_env=False, timeout=30).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@dataclass
class Findings:
    counts: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0  # difference of two log-probabilities of the same token
    failures: list[str] = field(default_factory=list)

    def compare(self, way: str, body: Body, actual: Answer, expected: Answer, tolerance: float) -> None:
        self.counts[way] += 1
        if actual.matches(expected, tolerance):
            errors = [choice.logprob_error(actual.choices[index]) for index, choice in expected.choices.items()]
            self.largest = max(self.largest, *errors)
        else:
            difference = (
                f"error {actual.choices[0].text!r}" if is_refused(actual) else first_difference(actual, expected)
            )
            self.failures.append(f"{way}: {difference}\n    {json.dumps(body)}")
            print(self.failures[-1], flush=True)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.most_common())
        return f"{counts}; largest difference of log-probabilities {self.largest:.1e}"


async def send(client: httpx.AsyncClient, body: Body, salt: str, pauses: Iterable[tuple[int, float]] = ()) -> Answer:
    """Return the answer, or that of a refused request: its error as the text of one choice."""
    try:
        return await send_completion(client, {**body, "cache_salt": salt}, pauses=pauses)
    except httpx.HTTPError as exc:
        raise AssertionError(f"no answer ({exc!r}) to {json.dumps(body)}") from exc
    except ErrorAnswer as exc:
        refused = Answer()
        refused.add({"system_fingerprint": "", "choices": [{**_REFUSAL, "text": str(exc)}]})
        return refused


def _is_one_prompt(body: Body) -> bool:
    return "messages" in body or isinstance(body["prompt"][0], int)


def is_refused(answer: Answer) -> bool:
    return 0 in answer.choices and answer.choices[0].finish_reason == REFUSED


_REFUSAL = {"index": 0, "finish_reason": REFUSED, "logprobs": None, "token_ids": []}


@dataclass
class Round:
    """Random requests to one fleet, in each situation."""

    world: World
    plan: FleetPlan
    rng: random.Random
    findings: Findings
    args: argparse.Namespace
    bodies: list[Body] = field(default_factory=list)
    expected: list[Answer] = field(default_factory=list)
    lasted: float = 0.0  # seconds from the first request to the last answer, without faults

    def __post_init__(self) -> None:
        self._chats = self.plan.chats(self.rng)

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            references = self.world.references.items()
            alone = {name: await stack.enter_async_context(self._client(fleet)) for name, fleet in references}
            client = await stack.enter_async_context(self._client(self.world.nodes))
            await self._record(alone)
            for body, expected in zip(self.bodies, self.expected, strict=True):
                self._compare("handed off", body, await send(client, body, self._salt()), expected)
            began = time.monotonic()
            await self._together("amid others", client)
            self.lasted = time.monotonic() - began
            await self._not_read(alone)
            fault = asyncio.create_task(asyncio.to_thread(self._inject_and_recover, self._draw_fault()))
            await self._together("migrated", client)
            await fault
        await asyncio.to_thread(self.world.wait_idle)

    async def _record(self, alone: Clients) -> None:
        """Draw the requests; record the answers of the reference. Some get a stop from their first answer."""
        for _ in range(self.args.requests):
            body = self._draw()
            reference = alone[body["model"]]
            body = await self._aligned(reference, body)
            answer = await send(reference, body, self._salt())
            if not is_refused(answer) and add_stops(self.rng, body, answer):
                answer = await send(reference, body, self._salt())
            self.findings.counts["alone"] += 1
            self.findings.counts["with adapters"] += body["model"] in ADAPTERS
            self.findings.counts[answer.choices[0].finish_reason] += 1
            self.bodies.append(body)
            self.expected.append(answer)

    async def _aligned(self, client: httpx.AsyncClient, body: Body) -> Body:
        """Return a body whose prompt, or one of its images, often begins or ends at an edge, or one token off."""
        if "messages" not in body or self.rng.random() < 0.3:
            return body
        response = await client.post("/v1/chat/completions/render", json=body)
        if response.status_code != 200:
            return body
        rendered = response.json()
        places = [len(rendered["token_ids"])]
        for place in (rendered.get("features") or {"mm_placeholders": {"image": []}})["mm_placeholders"]["image"]:
            places += [place["offset"], place["offset"] + place["length"]]
        more = -(self.rng.choice(places[-3:]) + self.rng.choice((-1, 0, 1))) % self.rng.choice(self.plan.edges)
        return {
            **body,
            "messages": lengthened(body["messages"], min(more, self.plan.longest)),
        }

    async def _together(self, way: str, client: httpx.AsyncClient) -> None:
        """Send all requests at the same time, beside neighbours whose clients leave."""
        noise = 1 if self.plan.is_slow else NOISE
        neighbours = [asyncio.create_task(self._neighbour(client, self.rng.getrandbits(60))) for _ in range(noise)]
        salts = [self._salt() for _ in self.bodies]
        try:
            answers = await asyncio.gather(
                *(send(client, body, salt) for body, salt in zip(self.bodies, salts, strict=True))
            )
        finally:
            for neighbour in neighbours:
                neighbour.cancel()
            await asyncio.gather(*neighbours, return_exceptions=True)
        for body, answer, expected in zip(self.bodies, answers, self.expected, strict=True):
            self._compare(way, body, answer, expected)

    async def _not_read(self, alone: Clients) -> None:
        """Send requests with long answers at the same time; their clients stop reading twice. Then continue some.

        A D has these answers in its cache. Other nodes may pull them.
        """
        bodies = [self._draw_unread() for _ in range(self.args.unread)]
        salts = [str(self.rng.getrandbits(60)) for _ in bodies]
        expected = [await send(alone[body["model"]], body, salt) for body, salt in zip(bodies, salts, strict=True)]
        async with self._client(self.world.nodes, [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]) as client:
            sent = (send(client, *request, self._stops()) for request in zip(bodies, salts, strict=True))
            answers = await asyncio.gather(*sent)
            for body, salt, answer, reference in zip(bodies, salts, answers, expected, strict=True):
                self._compare("not read", body, answer, reference)
                if _is_one_prompt(body) and not is_refused(reference):
                    turn = self._next_turn(body, reference)
                    alike = await send(alone[turn["model"]], turn, salt)
                    for reply in await asyncio.gather(*(send(client, turn, salt) for _ in range(TURNS))):
                        self._compare("next turn", turn, reply, alike)

    def _next_turn(self, body: Body, answer: Answer) -> Body:
        """Return a request that continues the first choice of an answer."""
        fields = ("model", "seed", "temperature", "n", "stream", "logprobs")
        if "messages" in body:
            answered = {"role": "assistant", "content": answer.choices[0].text}
            messages = [*body["messages"], answered, self._chats.user(10, self.rng.randint(0, 1))]
            return {**{name: body[name] for name in (*fields, "top_logprobs")}, "messages": messages, "max_tokens": 4}
        prompt = [*body["prompt"], *answer.choices[0].token_ids[:UNREAD_TOKENS], self.rng.randrange(3, 4000)]
        return {**{name: body[name] for name in fields}, "prompt": prompt[-LONGEST_TURN:], "max_tokens": 4}

    def _stops(self) -> Iterator[tuple[int, float]]:
        """Yield pauses of a client, which end once a D has paused a request, or none computes an answer any more."""
        for tokens in (1, UNREAD_TOKENS // 3):
            busy = True
            while busy:
                yield tokens, 0.5
                statuses = [node.status() for node in self.world.nodes.decode]
                paused = any(status.paused for status in statuses)
                self.findings.counts["pauses"] += paused
                busy = not paused and any(status.running or status.waiting or status.reading for status in statuses)

    def _draw_unread(self) -> Body:
        """Draw a request whose answer does not fit into the buffers on its way."""
        body = self._draw()
        n = body["n"] * (1 if _is_one_prompt(body) else 2)
        long = {"stream": True, "logprobs": 20, "max_tokens": -(-UNREAD_TOKENS // n), "ignore_eos": True}
        if "messages" in body:
            long |= {"logprobs": True, "top_logprobs": 20}
        return {**body, **long, "min_tokens": 0}

    async def _neighbour(self, client: httpx.AsyncClient, seed: int) -> None:
        """Send random requests without end; leave each one before its answer ends, or when it ends."""
        rng = random.Random(seed)
        chats = self.plan.chats(rng)
        while True:
            body = self._draw(rng, chats)
            with suppress(ErrorAnswer, TimeoutError):
                async with asyncio.timeout(rng.uniform(0.0, 4.0)):
                    await send_completion(client, body, rng.randint(1, 10) if body["stream"] else float("inf"))
            self.findings.counts["neighbours"] += 1

    def _draw_fault(self) -> tuple[NodeProcess, str, float]:
        """Return a node, its fault, and how long after a D began to compute answers it comes."""
        decode = self.world.nodes.decode
        may_lose_p = any(self.plan.towers) or not self.plan.sees  # else no node would encode images
        node = self.world.nodes.prefill[0] if self.rng.random() < 0.2 and may_lose_p else self.rng.choice(decode)
        return node, self.rng.choice(FAULTS), self.rng.random() * self.lasted

    def _inject_and_recover(self, fault: tuple[NodeProcess, str, float]) -> None:
        node, kind, delay = fault
        before = self.world.router_metric("pdserve_migrations_total")
        with suppress(AssertionError):  # a node may get no request
            self.world.nodes.wait_until(lambda: node.status().running > 0, 10.0)
        time.sleep(delay)  # the fault may come at any point of the answers
        inject(node, kind)
        recover(node, kind)
        self.world.nodes.wait_ready(300.0)
        self.world.wait_served()
        self.findings.counts[f"{node.name.partition('-')[0]}: {kind}"] += 1
        self.findings.counts["migrations"] += int(self.world.router_metric("pdserve_migrations_total") - before)

    def _compare(self, way: str, body: Body, actual: Answer, expected: Answer) -> None:
        tolerance = self.args.tolerance or TOLERANCES.get(self.plan.family, TOLERANCE)
        self.findings.compare(way, body, actual, expected, tolerance)

    def _draw(self, rng: random.Random | None = None, chats: RandomChats | None = None) -> Body:
        rng = rng or self.rng
        plan = self.plan
        if plan.sees:
            messages = (chats or self._chats).draw(plan.longest)
            body = new_chat(rng, messages, self.args.max_tokens, plan.vocabulary, prompt_logprobs=all(plan.towers))
        else:
            body = new_request(rng, plan.edges, plan.longest, self.args.max_tokens, plan.vocabulary)
        return self._with_adapter(rng, body) if plan.slots else body

    def _with_adapter(self, rng: random.Random, body: Body) -> Body:
        """Name the base or an adapter; some bodies get the prompt of an earlier one, whose KV may be another's."""
        prompt = "messages" if self.plan.sees else "prompt"
        repeated = self.bodies and rng.random() < REPEATED
        return {
            **body,
            "model": rng.choice(self.plan.models),
            prompt: rng.choice(self.bodies)[prompt] if repeated else body[prompt],
        }

    def _salt(self) -> str:
        """Return a salt: half of the requests find what earlier ones left in prefix caches."""
        return "common" if self.rng.random() < 0.5 else str(self.rng.getrandbits(60))

    def _client(self, fleet: Fleet, options: Sequence[tuple[int, int, int]] = ()) -> httpx.AsyncClient:
        """Return a client of a router, whose sockets have ``options``."""
        limits = httpx.Limits(max_connections=None)
        transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=options)
        return httpx.AsyncClient(base_url=fleet.url, timeout=ANSWER_SECONDS, trust_env=False, transport=transport)


def fuzz_fleet(number: int, args: argparse.Namespace, until: float) -> Findings:
    """Run rounds on one fleet until one finds a difference."""
    rng = random.Random(f"{args.seed}/{number}")
    plan = FleetPlan.draw(rng, args)
    args = plan.numbers(args)
    findings = Findings()
    print(f"fleet {number}: {plan}", flush=True)
    with tempfile.TemporaryDirectory() as directory, World.start(plan, Path(directory), number) as world:
        for index in range(args.rounds):
            fuzz_round = Round(world, plan, random.Random(f"{args.seed}/{number}/{index}"), findings, args)
            try:
                asyncio.run(fuzz_round.run())
            except AssertionError as exc:  # a node ended, holds blocks or serves no more
                findings.failures.append(f"round {index}: {exc}")
                print(f"{findings.failures[-1]}\n    while it computed some of:", flush=True)
                print("\n".join(f"    {json.dumps(body)}" for body in fuzz_round.bodies), flush=True)
            print(f"  round {index}: {findings}", flush=True)
            if findings.failures or time.monotonic() > until:
                break
        for node in world.nodes.nodes:
            for key, value in node.status().counters.items():
                name = key.split("{")[0].removeprefix("pdserve_").removesuffix("_total")
                if name in COUNTERS:
                    findings.counts[COUNTERS[name]] += int(value)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet", type=int, metavar="N", help="only this fleet")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="of a fleet (default %(default)s)")
    defaults = {name: f"default {usual}; {slow} for images on V2" for name, (usual, slow) in NUMBERS.items()}
    parser.add_argument("--requests", type=int, metavar="N", help=f"of a round ({defaults['requests']})")
    parser.add_argument(
        "--unread", type=int, metavar="N", help=f"requests of a round that are not read ({defaults['unread']})"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help=f"of an answer ({defaults['max_tokens']})")
    parser.add_argument(
        "--vocabularies", type=int, nargs="+", default=[4096, 4099, 4128, 4133], metavar="N", help="sizes to draw from"
    )
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], help="of KV cache, to draw from")
    parser.add_argument("--runners", nargs="+", choices=("V1", "V2"), default=["V1", "V2"], help="to draw from")
    parser.add_argument(
        "--adapters", choices=[*SLOTS], default="sometimes", help="whether fleets have LoRA adapters (%(default)s)"
    )
    parser.add_argument("--tolerance", type=float, help="of log-probabilities (default 1e-4, behind delta nets 1e-3)")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    total = Findings()
    for number in range(10**6) if args.fleet is None else [args.fleet]:
        findings = fuzz_fleet(number, args, until)
        total.counts += findings.counts
        total.largest = max(total.largest, findings.largest)
        if findings.failures:
            print(f"--seed {args.seed} --fleet {number}: {len(findings.failures)} differences")
            return 1
        if time.monotonic() > until:
            break
    print(f"no difference: {total}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
