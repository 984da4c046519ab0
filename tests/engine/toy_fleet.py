"""P and D with the toy runner, a connector between them, and a scripted frontend."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from toy import reference
from toy_node import Node

from engine.ipc.messages import (
    Cancel,
    Connect,
    FreeLease,
    KVConfirmed,
    Leased,
    Mode,
    Outputs,
    PrefillLocally,
    ReadEnded,
    StartRead,
)
from pdserve.records import Peer, SamplingParams

STAGES = ("reserved", "part", "part reading", "part read", "leased", "reading", "read")


@dataclass(frozen=True)
class Job:
    """A request to D. ``what`` happens to it ``when``: at a stage, or a number of steps after its arrival.

    "cancel" and "give up" come from D; "break": its reads fail from then on; "expire": P's lease ends. With digests:
    "corrupt": later digests are announced wrong; "overwrite": P's blocks change after their announcement.
    The first ``done`` tokens of each choice come from another D, unless a choice ends with them.
    """

    prompt: list[int]
    sampling: SamplingParams
    mode: Mode = Mode.HANDOFF
    arrival: int = 0
    what: str = ""
    when: str | int = ""
    done: int = 0
    ahead: int = 0  # tokens after the first that P may sample meanwhile

    @property
    def resume(self) -> dict[int, list[int]]:
        """Output so far of each resumed choice; empty for a new request."""
        wholes = {choice: self._whole(choice) for choice in range(self.sampling.n)}
        return {choice: whole[: self.done] for choice, whole in wholes.items() if 0 < self.done < len(whole)}

    def expected(self, choice: int) -> list[int]:
        """Return the tokens that D must output."""
        whole = self._whole(choice)
        return whole[self.done :] if self.resume else whole

    def _whole(self, choice: int) -> list[int]:
        return reference(self.prompt, choice, self.sampling.max_tokens, self.sampling.stop_token_ids)


@dataclass
class Fleet:
    """Requests by number. D alone goes on with ``settled`` ones."""

    p: Node
    d: Node
    jobs: list[Job]
    now: int = 0
    outputs: dict[int, list[list[int]]] = field(default_factory=dict)  # of P, by choice, once D has received any
    reserved: set[int] = field(default_factory=set)
    announced: dict[int, int] = field(default_factory=dict)  # tokens
    reading: Counter[int] = field(default_factory=Counter)  # parts
    broken: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)
    sampled: defaultdict[int, dict[int, list[int]]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # by P, by choice
    settled: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Run all requests to their end; then check all tokens, and that all blocks are free."""
        self.d.obey(Connect(Peer("p", self.p.epoch, (self.p.kv,))))
        last = max(job.arrival for job in self.jobs)
        for _ in range(3000):
            self._turn()
            if self._idle and self.now > last:
                break
        else:
            raise AssertionError("requests do not end")
        for rid, job in enumerate(self.jobs):
            for choice in range(job.sampling.n):
                tokens, expected = self.d.tokens[rid, choice], job.expected(choice)
                assert tokens == (expected[: len(tokens)] if rid in self.cancelled else expected), (rid, choice, job)
        self.d.assert_all_free()
        self.p.assert_all_free()

    def close(self) -> None:
        self.p.close()
        self.d.close()

    @property
    def _idle(self) -> bool:
        status = self.d.scheduler.status()
        if not (self.d.engine.idle and self.p.engine.idle):
            return False
        if status.reading or status.quarantined:
            time.sleep(0.0005)  # the connector's thread is copying
            return False
        return True

    def _turn(self) -> None:
        for rid, job in enumerate(self.jobs):
            if job.arrival == self.now:
                self.d.submit(rid, job.prompt, job.sampling, job.mode, resume=job.resume)
            if isinstance(job.when, int) and job.arrival + job.when == self.now:
                self._intervene(rid)
        self.now += 1
        self._turn_of_d()
        self._turn_of_p()

    def _turn_of_d(self) -> None:
        batch = self.d.step()
        for reserved in batch.reserved:
            rid, job = reserved.rid, self.jobs[reserved.rid]
            self.reserved.add(rid)
            if self._fate(rid, "reserved"):
                continue
            if reserved.cached_tokens >= len(job.prompt):
                self.d.obey(PrefillLocally(rid))
                self.settled.add(rid)
            else:
                sampling = SamplingParams(max_tokens=1) if job.resume else job.sampling
                self.p.submit(rid, job.prompt, sampling, Mode.LEASE, reserved.cached_tokens, decode_ahead=job.ahead)
        for ended in batch.reads:
            if ended.rid not in self.settled | self.cancelled:
                self._read_ended(ended)

    def _read_ended(self, ended: ReadEnded) -> None:
        rid = ended.rid
        self.reading[rid] -= 1
        if ended.error:
            assert rid in self.broken or (ended.num_corrupt and rid in self.corrupt), ended
            self._give_up(rid)
        elif self.announced[rid] < len(self.jobs[rid].prompt):
            self._fate(rid, "part read")
        elif not self.reading[rid] and not self._fate(rid, "read"):
            self.p.obey(FreeLease(rid))
            self.d.obey(KVConfirmed(rid, self._outputs(rid)))
            self.settled.add(rid)

    def _turn_of_p(self) -> None:
        batch = self.p.step()
        for rid, choice, token_id, *_ in batch.outputs.rows():
            self.sampled[rid].setdefault(choice, []).append(token_id)
            if rid in self.outputs and rid not in self.settled | self.cancelled:
                self._tell(rid)
        for leased in batch.leased:
            if leased.rid in self.settled | self.cancelled:  # given up while its digests were computed
                self.p.obey(FreeLease(leased.rid))
                continue
            self._lease(leased)

    def _lease(self, leased: Leased) -> None:
        rid = leased.rid
        last = leased.num_tokens == len(self.jobs[rid].prompt)
        assert bool(self.sampled[rid]) >= last, "first tokens come with the last blocks, or before"
        if last:
            self._tell(rid)
        if self._fate(rid, "leased" if last else "part"):
            return
        epoch = "nobody" if rid in self.broken else self.p.epoch
        digests = leased.digests
        if rid in self.corrupt and self.jobs[rid].what == "corrupt":
            digests = (digests[0] ^ 1, *digests[1:])
        elif rid in self.corrupt:
            self.p.runner.overwrite(leased.block_ids[-1])
        self.announced[rid] = leased.num_tokens
        self.reading[rid] += 1
        self.d.obey(StartRead(rid, epoch, leased.block_ids, leased.num_tokens, digests))
        self._fate(rid, "reading" if last else "part reading")

    def _tell(self, rid: int) -> None:
        """Pass the tokens that P has sampled to the client."""
        self.outputs[rid] = [list(tokens) for _, tokens in sorted(self.sampled[rid].items())]
        for choice, tokens in enumerate(() if self.jobs[rid].resume else self.outputs[rid]):
            self.d.tokens[rid, choice][:] = tokens

    def _outputs(self, rid: int) -> Outputs:
        return tuple(map(tuple, self.outputs.get(rid, ())))

    def _fate(self, rid: int, stage: str) -> bool:
        """Apply the request's fault if it is due at this stage; return whether its handoff has ended."""
        if self.jobs[rid].when == stage:
            self._intervene(rid)
        return rid in self.settled | self.cancelled

    def _intervene(self, rid: int) -> None:
        what = self.jobs[rid].what
        if what == "cancel":
            self._hang_up(rid)
            self.d.obey(Cancel(rid))
            self.cancelled.add(rid)
        elif what == "break":
            self.broken.add(rid)
        elif what in ("corrupt", "overwrite"):
            self.corrupt.add(rid)
        elif rid in self.reserved and rid not in self.settled:
            if what == "expire":  # then P's front fails it
                self.p.obey(FreeLease(rid))
            self._give_up(rid)

    def _hang_up(self, rid: int) -> None:
        """Cancel the prompt on P and free its lease."""
        self.p.obey(Cancel(rid))
        self.p.obey(FreeLease(rid))

    def _give_up(self, rid: int) -> None:
        self._hang_up(rid)
        self.d.obey(PrefillLocally(rid, () if self.jobs[rid].resume else self._outputs(rid)))
        self.settled.add(rid)
