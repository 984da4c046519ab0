"""A model runner without a model: the next token is a digest of those before it, and a step sleeps for its cost.

It implements pdserve.protocols.ModelRunner and imports neither torch nor numpy, so a hundred nodes fit on a small
machine. Like V2 it launches a step while the last one is in flight. It has neither KV nor recurrent states, only their
layouts, by which the engine counts blocks and slots: the addresses of the regions are never read. Of the drafts of a
decode it accepts as many as ``--synthetic-acceptance`` says.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from pdserve.adapters.adapter import NO_ADAPTER, NO_ADAPTER_SLOT, Adapter
from pdserve.checkpoint.file_states import check_same_files
from pdserve.checkpoint.files import open_regular
from pdserve.checkpoint.simulated_weights import simulated_digest
from pdserve.checkpoint.weight_patch import read_patch
from pdserve.config.node_config import NodeConfig
from pdserve.config.same_model import check_same_model
from pdserve.config.simulated_costs import SimulatedSteps
from pdserve.kv.layout import KVRegion
from pdserve.logprobs import PromptLogprobs, TokenLogprobs
from pdserve.pausing import Pausing, completed
from pdserve.protocols import PendingDigests
from pdserve.records import DigestOrder, NewSequence, ScheduledSequence, StepOutput, StepPlan
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import FileStates, WeightChange
from pdserve.weights.sharing import OfferedMemory
from runner.sampling.prompt_targets import PromptTargets, Targets

_Sample = tuple[int, TokenLogprobs | None]  # a token of one choice


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A pdserve.protocols.PendingStep whose result is ready at a time of ``time.monotonic``."""

    output: StepOutput
    ends_at: float

    def done(self) -> bool:
        return time.monotonic() >= self.ends_at

    def result(self) -> StepOutput:
        time.sleep(max(0.0, self.ends_at - time.monotonic()))
        return self.output


class SimulatedRunner:
    """Keeps sequences as digests of their tokens, and the time until which its device is busy."""

    max_in_flight = 2

    def __init__(self, config: NodeConfig) -> None:
        assert config.costs is not None
        self._config = config
        self._steps = SimulatedSteps(config.costs, config.image_input, config.image_token_cost)
        self.kv_layout = config.kv_layout
        self.kv_region = KVRegion(0, self.kv_layout.total_bytes, "cpu", 0)
        self.state_layout = config.state_layout
        self.state_region = None
        if config.state_layout is not None:
            self.state_region = KVRegion(0, config.state_layout.total_bytes, "cpu", 0)
        self._vocab_size = config.model.vocab_size
        self._vocabulary = SimulatedVocabulary(range(config.model.vocab_size), config.model.eos_token_ids)
        self._sequences: dict[int, SimulatedSequence] = {}
        self._targets = PromptTargets()
        self._acceptance = acceptance_rate(config.options.synthetic_acceptance or 1.0, config.max_drafts)
        self._adapters: dict[str, Adapter] = {}  # in host memory, by digest
        self._slots: dict[int, str] = {}  # digests on the device, by slot
        self._crashing: set[int] = set()  # sequences with the token of --sim-crash-token
        self._busy_until = 0.0
        loaded = simulated_digest(Path(config.model_dir))
        self._weights = SimulatedWeights(loaded.digest)
        self._loaded_files = loaded.files

    def launch(self, plan: StepPlan) -> SimulatedStep:
        assert not plan.digests, "a simulated node has no KV to digest; resolve refuses --kv-checksum"
        for seq in plan.finished:
            self._sequences.pop(seq, None)
            self._targets.remove(seq)
        for filled in plan.adapters:
            self._slots[filled.slot] = self._adapters[filled.digest].digest
        for new in plan.new:
            self._sequences[new.seq] = SimulatedSequence(new)
            self._targets.add(new)
        masks = {mask.seq: self._vocabulary.allowed(mask.words) for mask in plan.masks}
        self._crash_on_order(plan)
        runs = [self._decode(item, masks.get(item.seq)) for item in plan.scheduled[: plan.num_decodes]]
        counts = tuple(map(len, runs)) if self._config.max_drafts else ()
        runs += [self._sample(item, masks.get(item.seq)) for item in plan.prompts]
        samples = list(chain.from_iterable(runs))
        logprobs = {index: logprob for index, (_, logprob) in enumerate(samples) if logprob is not None}
        token_ids = tuple(token_id for token_id, _ in samples)
        self._busy_until = max(self._busy_until, time.monotonic()) + self._steps.seconds(plan)
        scored = tuple((targets.seq, self._score(targets)) for targets in self._targets.take(plan.scheduled))
        output = StepOutput(
            plan.step, token_ids=token_ids, decode_counts=counts, logprobs=logprobs, prompt_logprobs=scored
        )
        return SimulatedStep(output, self._busy_until)

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[SimulatedStep]:
        return completed(self.launch(plan))

    def digest(self, order: DigestOrder) -> PendingDigests:
        raise AssertionError("a simulated node has no KV to digest; resolve refuses --kv-checksum")

    def launches_by_layer(self, plan: StepPlan) -> bool:
        return False

    @property
    def loaded_files(self) -> FileStates:
        return self._loaded_files

    def offered_weights(self) -> OfferedMemory:
        return OfferedMemory((), ())

    def check_weights(self, change: WeightChange) -> None:
        if change.model_dir:
            check_same_model(self._config, Path(change.model_dir))
        self._weights.after(change)

    def change_weights(self, change: WeightChange) -> None:
        self._weights = self._weights.after(change)

    @property
    def has_weights(self) -> bool:
        return True

    def load_adapter(self, adapter: Adapter) -> None:
        with open_regular(Path(adapter.directory, "adapter_config.json")):
            self._adapters[adapter.digest] = adapter

    def drop_adapter(self, digest: str) -> None:
        self._adapters.pop(digest, None)

    def close(self) -> None:
        self._sequences.clear()

    def _crash_on_order(self, plan: StepPlan) -> None:
        """Raise RuntimeError for a sequence with the token of ``--sim-crash-token``, in its prompt or output."""
        token = self._config.options.sim_crash_token
        if token is None:
            return
        self._crashing.update(new.seq for new in plan.new if token in new.tokens(0, new.num_tokens))
        if any(item.seq in self._crashing for item in plan.scheduled):
            raise RuntimeError(f"token {token} is in a step, and --sim-crash-token names it")

    def _decode(self, item: ScheduledSequence, vocabulary: SimulatedVocabulary | None) -> tuple[_Sample, ...]:
        """Sample one token, and another one for each accepted draft. Drafts after the crash token are rejected."""
        samples = self._sample(item, vocabulary)
        while len(samples) < item.num_tokens and item.seq not in self._crashing:
            if not self._sequences[item.seq].accepts(self._acceptance):
                break
            samples += self._sample(item, vocabulary)
        return samples

    def _sample(self, item: ScheduledSequence, vocabulary: SimulatedVocabulary | None) -> tuple[_Sample, ...]:
        if not item.num_samples:
            return ()
        sequence = self._sequences[item.seq]
        adapter = self._slots[sequence.adapter_slot] if sequence.adapter_slot != NO_ADAPTER_SLOT else NO_ADAPTER
        samples = sequence.sample(item, vocabulary or self._vocabulary, self._weights.with_adapter(adapter))
        if samples[0][0] == self._config.options.sim_crash_token:
            self._crashing.add(item.seq)
        return samples

    def _score(self, targets: Targets) -> PromptLogprobs:
        """Return each token as the best one; the ids after it come next."""
        vocab_size = self._vocab_size
        row = struct.Struct(f"<fI{targets.num_top}I{targets.num_top}f")
        values = [(rank + 1) * math.log(0.5) for rank in range(targets.num_top)]
        table = b"".join(
            row.pack(math.log(0.5), 1, *((token + rank) % vocab_size for rank in range(targets.num_top)), *values)
            for token in targets.token_ids
        )
        return PromptLogprobs(targets.first, targets.num_top, table)


class SimulatedWeights(NamedTuple):
    """A digest in place of weights: equal on all nodes whose checkpoints and patches have the same content."""

    digest: bytes

    def with_adapter(self, digest: str) -> SimulatedWeights:
        """Return the weights that an adapter makes of these; the base's without one."""
        return self if digest == NO_ADAPTER else SimulatedWeights(self.digest + bytes.fromhex(digest))

    def after(self, change: WeightChange) -> SimulatedWeights:
        """Return the weights after a change. Raises CheckpointError."""
        if not change.patch:
            loaded = simulated_digest(Path(change.model_dir))
            if change.weight_files:
                check_same_files(change.model_dir, loaded.files, change.weight_files)
            return SimulatedWeights(loaded.digest)
        digest = hashlib.blake2b(self.digest, digest_size=16)
        patch = read_patch(Path(change.patch))
        with open_regular(patch.path) as (fd, _), open(fd, "rb", closefd=False) as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        return SimulatedWeights(digest.digest())


class SimulatedVocabulary:
    """Token ids. An EOS token is sampled only if a grammar allows nothing else."""

    def __init__(self, token_ids: Iterable[int], eos_token_ids: Collection[int]) -> None:
        every = array("I", token_ids)
        self._eos_token_ids = ends = frozenset(eos_token_ids)
        self.ids = array("I", (token_id for token_id in every if token_id not in ends)) or every

    def allowed(self, mask: bytes) -> SimulatedVocabulary:
        """Return the tokens that ``TokenMask.words`` allows."""
        bits = int.from_bytes(mask, "little")
        return SimulatedVocabulary(_bits_set(bits), self._eos_token_ids)

    def token(self, number: int) -> int:
        """Return the token id for a large random number."""
        return self.ids[number % len(self.ids)]


def _bits_set(bits: int) -> Iterator[int]:
    """Yield the indices of set bits, lowest first."""
    text = bin(bits)[:1:-1]
    at = text.find("1")
    while at >= 0:
        yield at
        at = text.find("1", at + 1)


class SimulatedSequence:
    """The next token depends on weights, adapter, images and all tokens so far; random sampling adds seed and choice.

    So a request continues with the same tokens on a decode node, after a preemption, or as a new request whose prompt
    ends with the tokens generated before.
    """

    def __init__(self, new: NewSequence) -> None:
        self._digest = hashlib.blake2b(digest_size=8)
        for image in new.images:  # before the tokens, which continue in another sequence
            self._digest.update(image.digest + image.start.to_bytes(8, "little"))
        self._digest.update(new.token_ids)
        self._sampling = new.sampling
        self._choice = new.choice
        self.adapter_slot = new.adapter_slot

    def sample(
        self, item: ScheduledSequence, vocabulary: SimulatedVocabulary, weights: SimulatedWeights
    ) -> tuple[_Sample, ...]:
        """Sample one token, or the first of each choice; the sequence continues with the first sample."""
        choices = item.sampled_choices(self._choice)
        samples = tuple(self._sample_choice(choice, vocabulary, weights) for choice in choices)
        self._digest.update(array("I", (samples[0][0],)).tobytes())
        return samples

    def accepts(self, rate: float) -> bool:
        """Whether the next draft is right, which is so for ``rate`` of all texts."""
        digest = self._digest.copy()
        digest.update(b"draft")
        return int.from_bytes(digest.digest(), "little") < rate * 2**64

    def _sample_choice(self, choice: int, vocabulary: SimulatedVocabulary, weights: SimulatedWeights) -> _Sample:
        digest = self._digest.copy()
        digest.update(weights.digest)
        if not self._sampling.greedy:
            digest.update(f" {self._sampling.seed} {choice}".encode())
        number = int.from_bytes(digest.digest(), "little")
        logprobs = None if self._sampling.logprobs < 0 else _logprobs(number, self._sampling, vocabulary)
        return vocabulary.token(number), logprobs


def acceptance_rate(mean_tokens: float, num_drafts: int) -> float:
    """Return the probability p of a right draft for so many tokens per step: 1 + p + p² … = ``mean_tokens``."""
    low = 0.0
    high = 1.0
    for _ in range(50):
        rate = (low + high) / 2
        tokens = sum(rate**number for number in range(num_drafts + 1))
        low, high = (rate, high) if tokens < mean_tokens else (low, rate)
    return high


def _logprobs(number: int, sampling: SamplingParams, vocabulary: SimulatedVocabulary) -> TokenLogprobs:
    """Return 1/2 for the sampled token, 1/4, 1/8 and so on for the ids after it, or for requested ones."""
    ranks = range(min(sampling.logprobs, len(vocabulary.ids)))
    if requested := sampling.logprob_token_ids:
        return TokenLogprobs(math.log(0.5), requested, tuple((i + 2) * math.log(0.5) for i in range(len(requested))))
    return TokenLogprobs(
        math.log(0.5),
        tuple(vocabulary.token(number + rank) for rank in ranks),
        tuple((rank + 1) * math.log(0.5) for rank in ranks),
    )
