"""Test clients: a router's stream to a decode node, and a decode node's stream to a prefill node."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from machine import patience

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.channel import channel_options
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb
from pdserve.sampling_params import SamplingParams

WAIT_SECONDS = 30.0


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **fields})


@dataclass
class Generated:
    """The outputs of one request."""

    number: int
    choices: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[pb.TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[pb.PromptLogprobs] = field(default_factory=list)
    finish: dict[int, str] = field(default_factory=dict)
    failure: pb.Failure | None = None
    cached_tokens: int = 0
    started: threading.Event = field(default_factory=threading.Event)  # a token has arrived
    ended: threading.Event = field(default_factory=threading.Event)
    stream_error: grpc.RpcError | None = None  # error that broke the stream before the end

    @property
    def tokens(self) -> list[int]:
        """Tokens of the only choice, which must have ended without a failure."""
        assert self.failure is None, self.failure
        assert list(self.choices) == [0]
        assert 0 in self.finish
        return self.choices[0]

    def take(self, output: pb.Output, n: int) -> None:
        assert not self.ended.is_set(), "an output after the end"
        if output.HasField("failure"):
            self.failure = output.failure
            self.ended.set()
            return
        if output.HasField("prompt_logprobs"):
            assert not self.choices, "log-probabilities of the prompt after a token"
            self.prompt_logprobs.append(output.prompt_logprobs)
            return
        assert output.choice not in self.finish, "an output after the end of its choice"
        if output.has_token:
            self.choices.setdefault(output.choice, []).append(output.token_id)
            self.started.set()
        if output.HasField("logprobs"):
            self.logprobs.setdefault(output.choice, []).append(output.logprobs)
        if output.finish_reason:
            self.finish[output.choice] = output.finish_reason
        self.cached_tokens += output.cached_tokens
        if len(self.finish) == n:
            self.ended.set()

    def wait(self, seconds: float = WAIT_SECONDS) -> Generated:
        """Wait for the end. Fails as soon as the stream breaks."""
        start = time.monotonic()
        while not self.ended.wait(0.1):
            assert self.stream_error is None, f"the stream of the request broke: {self.stream_error}"
            within = patience(seconds)
            assert time.monotonic() < start + within, f"the request did not end within {within:g} s; its stream is open"
        return self


class RouterClient:
    """One Serve stream. Leaving it as a context manager cancels the stream."""

    def __init__(self, address: str, channel: grpc.Channel | None = None) -> None:
        """``channel`` replaces an insecure one to the address."""
        self._channel = channel or grpc.insecure_channel(address, options=channel_options())
        self._requests: queue.SimpleQueue[pb.ServeRequest | None] = queue.SimpleQueue()
        self._results: dict[int, tuple[Generated, int]] = {}
        self.num_batches = 0
        self.draining = False  # as the node announced
        self.error: grpc.RpcError | None = None
        self._call: Any = pb_grpc.DecodeNodeStub(self._channel).Serve(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the stream and all its requests. Idempotent."""
        self._call.cancel()
        self._requests.put(None)
        self._reader.join()
        self._channel.close()

    def send(
        self,
        prompt: Sequence[int] | bytes,
        sampling: SamplingParams,
        prefill_node: str = "",
        number: int | None = None,
        **fields: Any,
    ) -> Generated:
        """Start a request, whose outputs a thread collects."""
        number = len(self._results) + 1 if number is None else number
        result = Generated(number)
        self._results.setdefault(number, (result, len(fields.get("resume", ())) or sampling.n))
        token_ids = prompt if isinstance(prompt, bytes) else pack_tokens(prompt)
        message = pb.Generate(
            request=number,
            token_ids=token_ids,
            sampling=sampling_to_pb(sampling),
            prefill_node=prefill_node,
            **fields,
        )
        self._requests.put(pb.ServeRequest(generate=message))
        return result

    def generate(
        self, prompt: Sequence[int] | bytes, sampling: SamplingParams, prefill_node: str = "", **fields: Any
    ) -> Generated:
        """Run a request to its end."""
        return self.send(prompt, sampling, prefill_node, **fields).wait()

    def cancel(self, result: Generated) -> None:
        self.put(pb.ServeRequest(cancel=pb.Cancel(request=result.number)))

    def put(self, message: pb.ServeRequest) -> None:
        self._requests.put(message)

    def half_close(self) -> None:
        self._requests.put(None)

    def join(self) -> None:
        """Wait until the node has ended the stream."""
        self._reader.join(patience(WAIT_SECONDS))
        assert not self._reader.is_alive()

    def _read(self) -> None:
        try:
            for batch in self._call:
                self.num_batches += 1
                self.draining |= batch.draining
                for output in batch.outputs:
                    result, n = self._results[output.request]
                    result.take(output, n)
        except grpc.RpcError as exc:
            self.error = exc
            for result, _ in tuple(self._results.values()):
                if not result.ended.is_set():
                    result.stream_error = exc


class PrefillFailed(Exception):
    """The prefill node sent a Failure."""

    def __init__(self, failure: pb.Failure) -> None:
        super().__init__(failure.message)
        self.code = failure.code


EventQueue = queue.SimpleQueue[pb.PrefillEvent | grpc.RpcError | None]


@dataclass
class Prefill:
    """The events of one prompt. Answers to Extend and Release are apart."""

    number: int
    events: EventQueue = field(default_factory=queue.SimpleQueue)
    answers: EventQueue = field(default_factory=queue.SimpleQueue)

    def next(self) -> pb.PrefillEvent:
        """Return the next event. Raises PrefillFailed, and RpcError when the stream broke."""
        return self._get(self.events)

    def next_answer(self) -> pb.PrefillEvent:
        """Return the next answer. Raises RpcError when the stream broke."""
        return self._get(self.answers)

    def put(self, event: pb.PrefillEvent) -> None:
        (self.answers if event.WhichOneof("kind") in ("extended", "released") else self.events).put(event)

    def _get(self, events: EventQueue) -> pb.PrefillEvent:
        event = events.get(timeout=patience(WAIT_SECONDS))
        assert event is not None, "the stream has ended"
        if isinstance(event, grpc.RpcError):
            raise event
        if event.HasField("failed"):
            raise PrefillFailed(event.failed)
        return event

    def all(self) -> list[pb.PrefillEvent]:
        """Return the events up to the last announcement, which follows the first tokens."""
        events = [self.next()]
        while events[-1].WhichOneof("kind") != "first_tokens":
            events.append(self.next())
        return [*events, self.next()]


class PrefillClient:
    """A decode node's stream to a prefill node. Leaving it as a context manager ends the stream."""

    def __init__(self, address: str, channel: grpc.Channel | None = None) -> None:
        """``channel`` replaces an insecure one to the address."""
        self._channel = channel or grpc.insecure_channel(address, options=channel_options())
        self._requests: queue.SimpleQueue[pb.HandoffRequest | None] = queue.SimpleQueue()
        self._prefills: dict[int, Prefill] = {}
        self._numbers = itertools.count(1)
        self.messages: list[list[str]] = []  # the kinds of events in each received message
        self.draining = False  # as the node announced
        self.error: grpc.RpcError | None = None
        self._call: Any = pb_grpc.PrefillNodeStub(self._channel).Serve(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> PrefillClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the stream. Idempotent."""
        self._call.cancel()
        self._requests.put(None)
        self._reader.join()
        self._channel.close()

    def half_close(self) -> None:
        """End the requests, and wait until P has ended the stream."""
        self._requests.put(None)
        self.join()

    def join(self) -> None:
        """Wait until P has ended the stream."""
        self._reader.join(patience(WAIT_SECONDS))
        assert not self._reader.is_alive()

    def send(self, request: pb.PrefillRequest, number: int | None = None) -> Prefill:
        """Send a prompt, whose events a thread collects."""
        number = next(self._numbers) if number is None else number
        prefill = self._prefills.setdefault(number, Prefill(number))
        request.request = number
        self.put(pb.HandoffRequest(prefill=request))
        return prefill

    def extend(self, prefill: Prefill) -> float:
        """Extend a lease; return its seconds, 0 if it has ended."""
        self.put(pb.HandoffRequest(extend=pb.ExtendRequest(request=prefill.number, ask=7)))
        extended = prefill.next_answer().extended
        assert extended.ask == 7
        return extended.lease_ms / 1000

    def release(self, prefill: Prefill) -> bool:
        """Release a lease; return whether it stood."""
        self.put(pb.HandoffRequest(release=pb.ReleaseRequest(request=prefill.number)))
        return prefill.next_answer().released.stood

    def put(self, message: pb.HandoffRequest) -> None:
        self._requests.put(message)

    def _read(self) -> None:
        try:
            for message in self._call:
                self.draining |= message.draining
                self.messages.append([event.WhichOneof("kind") for event in message.events])
                for event in message.events:
                    self._prefills[event.request].put(event)
        except grpc.RpcError as exc:
            self.error = exc
        for prefill in self._prefills.values():
            prefill.events.put(self.error)
            prefill.answers.put(self.error)
