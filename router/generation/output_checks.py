"""Find malformed outputs of a decode node. A prompt leaves the node that sends one, and continues elsewhere.

The range of a number is that of its request: its choices, prompt and log-probabilities, and the vocabulary. A finish
reason that this release does not know is not malformed (choice.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.logprobs import logprobs_fault
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import prompt_logprobs_from_pb
from router.errors import MalformedOutput
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.prompt_scores import PromptScores


def add_scores(output: pb.Output, scores: PromptScores | None) -> None:
    """Add log-probabilities of the prompt; without ``scores`` none were asked for. Raises MalformedOutput."""
    if scores is None:
        raise MalformedOutput("prompt_logprobs", "log-probabilities of the prompt that were not asked for")
    scores.add(prompt_logprobs_from_pb(output.prompt_logprobs))


def check_output(output: pb.Output, job: Job, choices: Sequence[Choice], scores: PromptScores | None) -> None:
    """Raise MalformedOutput unless the output can be one of the ``choices`` of a job. Called for each token."""
    if scores is not None and not scores.complete:
        raise MalformedOutput("prompt_logprobs", "a token before all log-probabilities of the prompt")
    if output.choice >= len(choices):
        raise MalformedOutput("choice", f"choice {output.choice}, and the request has {len(choices)}")
    if output.cached_tokens:
        most = job.prompt.num_tokens + sum(len(choice.token_ids) for choice in choices)
        if output.cached_tokens > most:
            raise MalformedOutput("cached_tokens", f"{output.cached_tokens} cached tokens of {most}")
    if not output.has_token:
        return
    if output.token_id >= job.vocab_size:
        raise MalformedOutput("token_id", f"token {output.token_id} of a vocabulary of {job.vocab_size}")
    if fault := logprobs_fault(output.logprobs, job.sampling.logprobs, job.vocab_size):
        raise MalformedOutput("logprobs", fault)
