"""The n choices of a request: one sequence computes the prompt, the others branch off it.

    prompt ──samples──► choice 0 continues as the same sequence
                  ├───► choice 1 ─┐ sequences of their own: they share the prompt's full blocks through the
                  └───► choice 2 ─┘ prefix cache, and compute the rest of its last block again

If P has sampled the first tokens, choices may have ended before their KV is on D; the first live one continues the
sequence. A single choice may decode ahead on P; D continues after the tokens that it received, and computes their KV.
A request resumed from a failed node begins with the output of each choice.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

from engine.grammars.constraints import GrammarConstraints
from engine.request import Request
from engine.scheduler.microbatch import SampledTokens
from engine.sequence import Sequence
from pdserve.hashing import BlockHashes, root_hash
from pdserve.ipc.finish_reason import finish_reason
from pdserve.ipc.messages import EventBatch, Outputs, Prefilled
from pdserve.logprobs import TokenLogprobs
from pdserve.records import FinishReason


class ChoiceManager:
    """Makes sequences of requests, and output events of samples."""

    def __init__(
        self, block_size: int, eos_token_ids: Collection[int], constraints: GrammarConstraints, events: EventBatch
    ) -> None:
        self._block_size = block_size
        self._constraints = constraints
        self._eos_token_ids = frozenset(eos_token_ids)
        self._events = events
        self._next_seq = 1

    def lead_sequence(self, request: Request) -> Sequence:
        """Make the sequence that computes the prompt. ``request.branches`` has the choices of a resumed request."""
        sampling = request.sampling
        request.stop_ids = frozenset(sampling.stop_token_ids)
        if sampling.grammar or not sampling.ignore_eos:
            request.stop_ids |= self._eos_token_ids
        choice = min(request.branches, default=0)
        return self._sequence(request, choice, request.branches.pop(choice, ()))

    def take_prompt_tokens(self, sequence: Sequence, sampled: SampledTokens) -> bool:
        """Emit the tokens sampled at the end of a prompt. Return whether the sequence continues."""
        if sequence.for_peer:
            return self._take_first_tokens_for_peer(sequence, sampled)
        if sequence.num_outputs:  # it was preempted, or P has sampled its first token
            return self.take_token(sequence, *sampled[0])
        return self._take_first_tokens(sequence, sampled)

    def take_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Emit a token after the first one. Return whether the sequence continues."""
        request = sequence.request
        token_ids = sequence.token_ids
        sequence.append_token(token_id)
        reason = None
        if token_id in request.stop_ids or len(token_ids) == sequence.max_length:
            reason = self._reason(request, token_id, sequence.num_outputs)
            if sequence.for_peer and len(token_ids) == sequence.max_length:
                reason = FinishReason.LENGTH
        self._events.outputs.add(request.rid, sequence.choice, token_id, logprobs=logprobs, finish=reason)
        if reason is not None:
            return False
        if sequence.constraint is not None:
            self._constraints.sampled(sequence)
        return True

    def _take_first_tokens(self, sequence: Sequence, sampled: SampledTokens) -> bool:
        """Emit the first tokens of all choices. Return whether the sequence, which is choice 0, continues.

        Other choices that continue are left in ``request.branches``.
        """
        request = sequence.request
        self._emit_prefilled(request)
        for choice, (token_id, logprobs) in enumerate(sampled):
            reason = self._reason(request, token_id, 1)
            self._events.outputs.add(request.rid, choice, token_id, logprobs=logprobs, finish=reason)
            if reason is None:
                request.branches[choice] = array("I", (token_id,))
        sequence.append_token(sampled[0][0])
        if request.branches.pop(sequence.choice, None) is None:
            return False
        self._constraints.sampled(sequence)
        return True

    def _take_first_tokens_for_peer(self, sequence: Sequence, sampled: SampledTokens) -> bool:
        """Emit the first tokens of all choices on P. Return whether the only choice may decode ahead."""
        request = sequence.request
        token, _ = sampled[0]
        sequence.append_token(token)
        self._emit_prefilled(request)
        ends = len(sequence.token_ids) == sequence.max_length or self._reason(request, token, 1) is not None
        for choice, (token_id, logprobs) in enumerate(sampled):
            finish = FinishReason.LENGTH if ends else None
            self._events.outputs.add(request.rid, choice, token_id, logprobs=logprobs, finish=finish)
        if ends:
            return False
        self._constraints.sampled(sequence)
        return True

    def take_from_peer(self, sequence: Sequence, outputs: Outputs) -> bool:
        """Continue after the tokens that P sampled and D's frontend has sent. Return whether any choice continues.

        The sequence becomes the first that does; the others are left in ``request.branches``.
        """
        request = sequence.request
        if sequence.num_outputs:  # a resumed request has its own
            return True
        live = {
            choice: array("I", tokens)
            for choice, tokens in enumerate(outputs)
            if self._reason(request, tokens[-1], len(tokens)) is None
        }
        if not live:
            return False
        choice = min(live)
        tokens = live.pop(choice)
        sequence.continue_as(choice, tokens)
        self._constraints.sampled(sequence, len(tokens))
        request.branches = live
        return True

    def branch(self, sequence: Sequence) -> list[Sequence]:
        """Make sequences of the choices that wait for the prompt's KV, now that ``sequence`` has it."""
        request = sequence.request
        hashes = sequence.hashes.upto(sequence.token_ids, sequence.prompt_len)
        branches = [self._sequence(request, choice, output, hashes) for choice, output in request.branches.items()]
        request.branches = {}
        return branches

    def _sequence(
        self, request: Request, choice: int, output: Iterable[int], prompt_hashes: Collection[bytes] = ()
    ) -> Sequence:
        token_ids = array("I", request.token_ids)
        token_ids.extend(output)
        root = root_hash(request.cache_salt, request.sampling.adapter)
        sequence = Sequence(
            self._next_seq,
            request,
            choice,
            token_ids=token_ids,
            hashes=BlockHashes(self._block_size, root, prompt_hashes, images=request.images),
            prompt_len=request.prompt_len,
            max_length=request.max_length,
        )
        self._next_seq += 1
        self._constraints.begin(sequence)
        return sequence

    def _emit_prefilled(self, request: Request) -> None:
        self._events.prefilled.append(Prefilled(request.rid, request.cached_tokens or 0, request.queued))

    def _reason(self, request: Request, token_id: int, num_outputs: int) -> FinishReason | None:
        return finish_reason(token_id, num_outputs, request.sampling, self._eos_token_ids)
