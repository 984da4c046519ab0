"""A scheduler and a model runner of a checkpoint in one process, with drafts of any source.

An ``Oracle`` has the outputs of a run without drafts, so its drafts are right as often as a test wants.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

import runner
from connector.backends.null import NullConnector
from connector.setup import ConnectorSetup
from engine.adapters.build import build_adapters
from engine.executor.rank import Rank
from engine.executor.step_pipeline import Result, StepPipeline
from engine.grammars.workers import GrammarWorkers
from engine.images.build import build_images
from engine.scheduler.drafting import no_drafting
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.speculation.draft_planner import DraftOptions, DraftPlanner
from engine.speculation.draft_source import DraftSource, ModelDrafts
from pdserve.adapters.adapter import Adapter, AdapterLoaded
from pdserve.config.node_config import NodeConfig
from pdserve.images import Images
from pdserve.ipc.messages import AddAdapter, Mode, Submit
from pdserve.logprobs import TokenLogprobs
from pdserve.records import EMPTY_OUTPUT, NO_ORDERS, FinishReason, KVConnectorOutput, StepOutput, StepPlan
from pdserve.sampling_params import SamplingParams

Answers = dict[tuple[int, int], "Answer"]  # by request and choice
Request = tuple[list[int], SamplingParams]


class Answer:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.finish: FinishReason | None = None


class Oracle:
    """A DraftSource with the next tokens of some texts. Each draft is wrong with a probability."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: float, vocab_size: int, seed: int = 0) -> None:
        self._texts = [array("I", text) for text in texts]
        self._wrong = wrong
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self.proposed: list[list[int]] = []  # texts with the drafts

    def propose(self, token_ids: array[int], most: int) -> tuple[int, ...]:
        rng = self._random
        length = len(token_ids)
        likely = [text[length : length + most] for text in self._texts if text[:length] == token_ids] or [array("I")]
        drafts = list(rng.choice(likely))
        drafts += [rng.randrange(self._vocab_size) for _ in range(rng.randint(0, most - len(drafts)))]
        drafts = [rng.randrange(self._vocab_size) if rng.random() < self._wrong else draft for draft in drafts]
        self.proposed.append([*token_ids, *drafts])
        return tuple(drafts)


class DraftedNode:
    """``step`` is one iteration of the step loop. Nodes with ``max_drafts`` 0 have no drafts."""

    def __init__(
        self,
        config: NodeConfig,
        max_drafts: int = 0,
        source: Callable[[], DraftSource] | None = None,
        always: bool = True,
        synthetic: float | None = None,
    ) -> None:
        config = msgspec.structs.replace(config, max_drafts=max_drafts)
        self._runner = runner.build(config, lambda stage, fraction: None)
        self._woken = threading.Event()
        self._grammars = GrammarWorkers(config.model_dir, config.model, self._woken.set)
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=config.kv_layout.num_blocks,
                block_size=config.kv_layout.block_size,
                groups=config.kv_layout.groups,
                num_state_slots=0 if config.state_layout is None else config.state_layout.num_slots,
                max_num_seqs=config.max_num_seqs,
                max_batch_tokens=config.max_batch_tokens,
                full_step=config.max_batch_tokens,
                max_drafts=max_drafts,
                whole_images=config.model.whole_images,
                max_waiting=1000,
                vocab_size=config.model.vocab_size,
                eos_token_ids=config.model.eos_token_ids,
            ),
            drafting=partial(DraftPlanner, DraftOptions(source, always, synthetic)) if max_drafts else no_drafting,
            grammars=self._grammars,
            images=build_images(config, config.kv_layout.block_size),
            adapters=build_adapters(config),
        )
        self._rank = Rank(self._runner, NullConnector(ConnectorSetup("drafted")))
        self._pipeline = StepPipeline(self._rank)
        self.plans: list[StepPlan] = []
        self.answers: Answers = defaultdict(Answer)
        self.num_accepted = 0  # drafts
        self.num_refused = 0  # requests

    def load(self, adapter: Adapter) -> None:
        """Load an adapter at once, as ranks do on a thread."""
        self.scheduler.adapters.take(AddAdapter(adapter))
        for ordered in self.scheduler.adapters.add_orders(NO_ORDERS).adapters:
            self._runner.load_adapter(ordered)
            loaded = KVConnectorOutput(adapters=(AdapterLoaded(ordered.digest),))
            self.scheduler.adapters.update(msgspec.structs.replace(EMPTY_OUTPUT, connector=loaded))

    def submit(
        self, rid: int, prompt: Sequence[int], sampling: SamplingParams, salt: str = "", images: Images = ()
    ) -> None:
        submit = Submit(rid, array("I", prompt).tobytes(), sampling, Mode.LOCAL, salt, images=images)
        self.scheduler.submit(submit)

    def step(self) -> None:
        plan = self.scheduler.plan(self._pipeline.busy)
        self.plans.append(plan)
        for result in self._pipeline.launch(plan, self.scheduler.expected):
            self._apply(result)
        self.scheduler.prepare()
        self._apply(self._pipeline.take(plan))

    def run(self) -> Answers:
        """Step until all requests have ended. Return their answers, and check that all blocks are free."""
        while True:
            self.step()
            self._take_events()
            status = self.scheduler.status()
            if not (self._pipeline.empty and self.scheduler.idle):
                continue
            if not (status.running or status.waiting):
                break
            assert self._woken.wait(30), "no mask arrives"  # a grammar thread must deliver one
            self._woken.clear()
        assert status.free == status.total
        return self.answers

    def close(self) -> None:
        self._rank.close()

    @property
    def num_drafts(self) -> int:
        return sum(plan.num_drafts for plan in self.plans)

    def _apply(self, result: Result | None) -> None:
        if result is not None:
            plan, output = result
            if output.step.decode_counts:
                self.num_accepted += sum(output.step.decode_counts) - plan.num_decodes
            self.scheduler.apply(plan, output, self._pipeline.step_seconds)
            self._take_events()

    def _take_events(self) -> None:
        if (events := self.scheduler.take_events()) is None:
            return
        self.num_refused += len(events.refused)
        for rid, choice, token_id, finish, logprobs in events.outputs.rows():
            answer = self.answers[rid, choice]
            assert answer.finish is None, "a token after the end"
            answer.token_ids.append(token_id)
            answer.logprobs.append(logprobs)
            answer.finish = finish or answer.finish


class WatchedNode(DraftedNode):
    """Records the model's drafts with the tokens before them."""

    def __init__(self, config: NodeConfig, max_drafts: int) -> None:
        super().__init__(config, max_drafts, ModelDrafts)
        self.made: list[tuple[list[int], tuple[int, ...]]] = []  # tokens, drafts

    def _apply(self, result: Result | None) -> None:
        super()._apply(result)
        if result is not None:
            self._note(result[1].step)

    def _note(self, output: StepOutput) -> None:
        running = self.scheduler._live.running
        self.made += [(list(running[seq].token_ids), drafts) for seq, drafts in output.drafts if seq in running]


def run(node: DraftedNode, requests: Sequence[Request]) -> Answers:
    """Send requests at once, and close the node. Return their answers."""
    for rid, (prompt, sampling) in enumerate(requests):
        node.submit(rid, prompt, sampling)
    node.run()
    node.close()
    return node.answers


def token_ids_of(answers: Answers) -> dict[tuple[int, int], list[int]]:
    return {key: answer.token_ids for key, answer in answers.items()}
