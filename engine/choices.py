"""The n choices of a request: one sequence computes the prompt, the others branch off it.

    prompt ──samples──► choice 0 goes on as the same sequence
                  ├───► choice 1 ─┐ sequences of their own: they share the prompt's full blocks through the
                  └───► choice 2 ─┘ prefix cache, and compute the rest of its last block again

Where P has sampled the first tokens, choices may have ended before their KV is here: the first that has not goes on.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.hashing import BlockHashes
from engine.messages import Output
from engine.report import Report, Totals
from engine.requests import Request, Sequence
from pdserve.records import FinishReason, Sample
from pdserve.stopping import finish_reason


class Choices:
    """Makes sequences of requests, and outputs of samples."""

    def __init__(self, block_size: int, eos_token_ids: Collection[int], report: Report, totals: Totals) -> None:
        self._block_size = block_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._report = report
        self._totals = totals
        self._next_seq = 1

    def lead(self, request: Request) -> Sequence:
        """The sequence that computes the prompt."""
        return self._sequence(request, 0, list(request.prompt))

    def take(self, sequence: Sequence, samples: tuple[Sample, ...]) -> bool:
        """Report what a step has sampled for a sequence; several samples are the first tokens of all choices.

        Returns whether the sequence goes on. Other choices that do are left in ``request.branches``.
        """
        request, (own, *others) = sequence.request, samples
        for choice, sample in enumerate(others, start=1):
            if self._emit(request, choice, sample, 1) is None:
                request.branches[choice] = sample.token_id
        sequence.token_ids.append(own.token_id)
        return self._emit(request, sequence.choice, own, sequence.num_outputs) is None

    def take_for_peer(self, request: Request, samples: tuple[Sample, ...]) -> None:
        """Report the first tokens of all choices on P; which of them go on is the peer's to decide."""
        for choice, sample in enumerate(samples):
            self._report_token(request, choice, sample, None, 1)

    def take_from_peer(self, sequence: Sequence, first: tuple[Sample, ...]) -> bool:
        """Take over first tokens that P has sampled and D's front has passed on. Returns whether any choice goes on.

        The first one that does is the sequence from now on; the others are left in ``request.branches``.
        """
        request = sequence.request
        live = {
            choice: sample.token_id
            for choice, sample in enumerate(first)
            if finish_reason(sample.token_id, 1, request.sampling, self._eos_token_ids) is None
        }
        if not live:
            return False
        del request.sequences[sequence.choice]
        sequence.choice = min(live)
        request.sequences[sequence.choice] = sequence
        sequence.token_ids.append(live.pop(sequence.choice))
        request.branches = live
        return True

    def branch(self, sequence: Sequence) -> list[Sequence]:
        """The choices that wait for the prompt's KV, now that ``sequence`` has it, as sequences to be admitted."""
        request = sequence.request
        digests = sequence.hashes.upto(sequence.token_ids, sequence.prompt_len)
        branches = [
            self._sequence(request, choice, [*request.prompt, token_id], digests)
            for choice, token_id in request.branches.items()
        ]
        request.branches = {}
        return branches

    def _sequence(
        self, request: Request, choice: int, token_ids: list[int], digests: Collection[bytes] = ()
    ) -> Sequence:
        hashes = BlockHashes(self._block_size, request.cache_salt, tuple(digests))
        sequence = Sequence(self._next_seq, request, choice, token_ids, hashes, len(request.prompt), request.max_length)
        self._next_seq += 1
        request.sequences[choice] = sequence
        return sequence

    def _emit(self, request: Request, choice: int, sample: Sample, num_outputs: int) -> FinishReason | None:
        reason = finish_reason(sample.token_id, num_outputs, request.sampling, self._eos_token_ids)
        self._report_token(request, choice, sample, reason, num_outputs)
        return reason

    def _report_token(
        self, request: Request, choice: int, sample: Sample, reason: FinishReason | None, num_outputs: int
    ) -> None:
        cached = request.cached_tokens or 0 if num_outputs == 1 else 0
        self._report.outputs.append(Output(request.rid, choice, sample, reason, cached))
        self._totals.output_tokens += 1
