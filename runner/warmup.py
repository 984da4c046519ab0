"""Warm-up steps: they compile every kernel before the first request, and show the memory that steps need."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pdserve.adapters.adapter import NO_ADAPTER_SLOT
from pdserve.config.node_config import NodeConfig
from pdserve.images import DIGEST_BYTES, PIXEL_BYTES, EncodedImage, ImageInput, ImageMode, ImageSpan, largest_image
from pdserve.kv.states import NO_SLOT, StateSnapshot
from pdserve.model.model_config import TRANSFORMERS
from pdserve.protocols import ModelRunner
from pdserve.records import TOKEN_BYTES, DigestOrder, Drafts, NewSequence, ScheduledSequence, StepPlan, TokenMask
from pdserve.sampling_params import SamplingParams
from runner.graph_sizes import GraphSizes

#: Prompt tokens of steps; sizes too large for a graph are run. Each is at most twice the one before: the tiles of
#: experts double with their tokens, and each size is compiled.
_CHUNKS = (75, 150, 300, 600, 1000, 1500, 2500, 4000)

#: Prompt tokens for models without experts and recurrent states. Their kernels depend on tokens only where FlashInfer
#: gathers keys, from 1,024 on, and products of every size have run (``product_sizes``).
_DENSE_CHUNKS = (600, 1500)

_FEW = 2  # tokens of a prompt that attention takes together with decodes

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)

#: A request that uses every sampling parameter.
DEMANDING = SamplingParams(
    max_tokens=1,
    min_tokens=1,
    temperature=0.5,
    top_k=5,
    top_p=0.5,
    min_p=0.1,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias={0: 1.0},
    stop_token_ids=(1,),
    logprobs=1,
    prompt_logprobs=1,
    grammar="any",  # a runner reads masks only
)


def _more(config: NodeConfig) -> int:
    """Return how many tokens follow a prompt: two decodes, and one with drafts."""
    return 2 + (1 + config.max_drafts if config.max_drafts else 0)


def adapter_slots(config: NodeConfig) -> tuple[int, ...]:
    """Return the slots of the sequences that warm-up steps run: the base, and an adapter if the node takes any."""
    return (NO_ADAPTER_SLOT,) if config.adapters is None else (NO_ADAPTER_SLOT, 0)


def run_largest_steps(runner: ModelRunner, config: NodeConfig, adapter_slot: int = NO_ADAPTER_SLOT) -> None:
    """Run a step with the most prompt tokens, and one with the most sequences that use every sampling parameter.

    On a node that encodes images, run the largest image before: the text behind it leaves no offsets of positions, with
    which no graph can be captured.
    """
    if config.images is ImageMode.TOWER and config.image_input is not None:
        _run_image(runner, config, config.image_input)
    longest = min(config.max_batch_tokens, config.max_model_len - _more(config))
    whole, rest = divmod(config.max_batch_tokens, longest)
    lengths = [longest] * whole + ([rest] if rest else [])
    run_prompts(runner, config, lengths[: config.max_num_seqs], GREEDY, adapter_slot)
    most = config.max_num_seqs
    run_prompts(runner, config, [config.max_batch_tokens // most] * most, DEMANDING, adapter_slot)


def _run_image(runner: ModelRunner, config: NodeConfig, accepted: ImageInput) -> None:
    """Encode the largest image, and compute as many of its tokens as a step holds."""
    tokens = largest_image(accepted, config.max_model_len)
    if config.model.whole_images:
        tokens = max(1, min(tokens, config.max_batch_tokens, config.max_model_len - _more(config)))
    rows = math.isqrt(tokens)
    height = rows * accepted.cell
    width = tokens // rows * accepted.cell
    span = ImageSpan(0, *accepted.grid(height, width), bytes(DIGEST_BYTES))
    image = EncodedImage(span.digest, height, width, bytes(height * width * PIXEL_BYTES))
    length = min(span.num_tokens, config.max_batch_tokens, config.max_model_len - _more(config))
    new = msgspec.structs.replace(_sequence(runner, config, 0, length), images=(span,))
    prompt = ScheduledSequence(new.seq, length, 1)
    runner.launch(StepPlan(-1, new=(new,), scheduled=(prompt,), images=(image,))).result()
    runner.launch(StepPlan(-1, finished=(new.seq,), dropped_images=(span.digest,))).result()


def run_small_steps(runner: ModelRunner, config: NodeConfig, adapter_slot: int = NO_ADAPTER_SLOT) -> None:
    """Run one request and a few, greedy and demanding: shapes that kernels may be compiled for separately."""
    few = min(3, config.max_num_seqs)
    for sampling in (GREEDY, DEMANDING):
        run_prompts(runner, config, [1], sampling, adapter_slot)
        run_prompts(runner, config, [config.kv_layout.block_size + 1], sampling, adapter_slot)
        run_prompts(runner, config, [2] * few, sampling, adapter_slot)


def run_mixed_steps(runner: ModelRunner, config: NodeConfig, adapter_slot: int = NO_ADAPTER_SLOT) -> None:
    """Run chunks of prompts beside one sequence that decodes, and beside four.

    Tensors of the prompts then begin at other offsets, for which Triton compiles kernels again.
    """
    model = config.model
    dense = model.impl != TRANSFORMERS and model.moe is None and model.state is None
    chunks = _DENSE_CHUNKS if dense else _CHUNKS
    in_graphs = GraphSizes.of_node(config).most_mixed_tokens
    for others in (1, 4):
        most = min(config.max_batch_tokens - others, config.max_model_len - _more(config))
        for chunk in sorted({min(chunk, most) for chunk in (_FEW, *chunks) if chunk == _FEW or chunk > in_graphs}):
            if chunk > 1 and others < config.max_num_seqs:
                _run_beside(runner, config, others, chunk, adapter_slot)


def _run_beside(runner: ModelRunner, config: NodeConfig, others: int, chunk: int, adapter_slot: int) -> None:
    lengths = [1] * others + [chunk]
    new = [_sequence(runner, config, number, length, GREEDY, adapter_slot) for number, length in enumerate(lengths)]
    decodes = tuple(ScheduledSequence.decode(sequence.seq) for sequence in new[:-1])
    prompt = ScheduledSequence(new[-1].seq, chunk, 1)
    runner.launch(StepPlan(-1, new=tuple(new[:-1]), scheduled=decodes, num_decodes=others)).result()
    mixed = StepPlan(-1, new=tuple(new[-1:]), scheduled=(*decodes, prompt), num_decodes=others)
    runner.launch(mixed).result()
    runner.launch(StepPlan(-1, finished=tuple(sequence.seq for sequence in new))).result()


def _sequence(
    runner: ModelRunner,
    config: NodeConfig,
    number: int,
    length: int,
    sampling: SamplingParams = GREEDY,
    adapter_slot: int = NO_ADAPTER_SLOT,
) -> NewSequence:
    """Return a sequence with room for what follows. All share blocks and states: nothing reads their tokens."""
    layout = runner.kv_layout
    num_entries = ((length + _more(config)) // layout.block_size + 1) * layout.groups.num_groups
    blocks = tuple((number + at) % layout.num_blocks for at in range(num_entries))
    state_slot = NO_SLOT if runner.state_layout is None else number % runner.state_layout.num_slots
    tokens = bytes(length * TOKEN_BYTES)
    return NewSequence(
        seq=-1 - number,
        token_ids=tokens,
        prompt_len=length,
        num_computed=0,
        block_ids=blocks,
        sampling=sampling,
        state_slot=state_slot,
        adapter_slot=adapter_slot,
    )


def product_sizes(config: NodeConfig) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens and of samples for ``Model.run_products``, as in steps without a graph.

    Above 1,024 samples only each 128th: logits of all numbers would take seconds.
    """
    tokens = [
        *range(GraphSizes.of_node(config).most_mixed_tokens + 8, 2048, 8),
        *range(2048, config.max_batch_tokens + 1, 128),
    ]
    most = config.max_num_seqs * (1 + config.max_drafts)
    samples = [*range(1, min(most, 1024) + 1), *range(1024 + 128, most + 1, 128)]
    return [size for size in tokens if size <= config.max_batch_tokens], samples


def run_prompts(
    runner: ModelRunner,
    config: NodeConfig,
    lengths: Sequence[int],
    sampling: SamplingParams,
    adapter_slot: int = NO_ADAPTER_SLOT,
) -> None:
    """Run prompts of these lengths in one step, decode steps of all, one of them with drafts, and their end."""
    lengths = [max(1, min(length, config.max_model_len - _more(config))) for length in lengths]
    new = [_sequence(runner, config, number, length, sampling, adapter_slot) for number, length in enumerate(lengths)]
    seqs = [sequence.seq for sequence in new]
    prompts = tuple(ScheduledSequence(seq, length, 1) for seq, length in zip(seqs, lengths, strict=True))
    tokens = tuple(ScheduledSequence.decode(seq) for seq in seqs)
    everything = b"\xff" * TokenMask.num_bytes(config.model.vocab_size)
    masks = tuple(TokenMask(seq, everything) for seq in seqs) if sampling.grammar else ()
    ahead = config.max_drafts if config.model.num_draft_layers else 0
    has_states = runner.state_layout is not None
    snapshots = tuple(StateSnapshot(prompt.seq, 1, 1) for prompt in prompts[:1] if has_states and prompt.num_tokens > 1)
    plan = StepPlan(-1, new=tuple(new), scheduled=prompts, masks=masks, drafts_ahead=ahead, state_snapshots=snapshots)
    runner.launch(plan).result()
    for _ in range(2):
        plan = StepPlan(-1, scheduled=tokens, num_decodes=len(tokens), masks=masks, drafts_ahead=ahead)
        runner.launch(plan).result()
    if num_drafts := config.max_drafts:
        drafted = tuple(ScheduledSequence.decode(seq, num_drafts) for seq in seqs)
        drafts = tuple(Drafts(seq, (0,) * num_drafts) for seq in seqs)
        plan = StepPlan(-1, scheduled=drafted, num_decodes=len(seqs), drafts=drafts, drafts_ahead=ahead)
        runner.launch(plan).result()
    digests = (DigestOrder((0,), 1, state_slots=(0,) if has_states else ()),) if config.options.checks_kv else ()
    copies = ((0, 1),) if has_states else ()
    runner.launch(StepPlan(-1, finished=tuple(seqs), digests=digests, state_copies=copies)).result()
    for order in digests:
        runner.digest(order).result()
