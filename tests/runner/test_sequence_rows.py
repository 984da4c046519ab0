"""The rows of a step's tokens, by the plan's counts."""

from __future__ import annotations

from pdserve.records import ScheduledSequence
from runner.sequence_rows import StepBatch


def test_decodes_have_logits_for_every_token_and_prompts_for_the_last_one() -> None:
    """A prompt of three tokens in a step is none of the decodes, though a decode with two drafts is as long."""
    scheduled = (
        ScheduledSequence.decode(7),
        ScheduledSequence.decode(8, num_drafts=2),
        ScheduledSequence(9, 3, 1),
        ScheduledSequence(10, 5, 0),
        ScheduledSequence(11, 2, 4),
    )
    batch = StepBatch.of(scheduled, 2, [0, 1, 2, 3, 4])
    assert batch.query_starts.tolist() == [0, 1, 4, 7, 12, 14]
    assert batch.sampling.tolist() == [0, 1, 1, 1, 2, 4]
    assert [sequence.seq for sequence in batch.sampled] == [7, 8, 8, 8, 9, 11]
    assert batch.logits_tokens.tolist() == [0, 1, 2, 3, 6, 13]
    assert batch.sample_of_row.tolist() == [0, 1, 4, -1, 5]
    assert batch.longest == 5
    assert batch.has_drafts


def test_decodes_without_drafts_have_one_row() -> None:
    scheduled = tuple(ScheduledSequence.decode(seq) for seq in range(4))
    batch = StepBatch.of(scheduled, 4, [3, 2, 1, 0])
    assert batch.sampling.tolist() == batch.logits_tokens.tolist() == batch.sample_of_row.tolist() == [0, 1, 2, 3]
    assert batch.sampling_rows.tolist() == [3, 2, 1, 0]
    assert not batch.has_drafts
