"""Which outputs of a decode node are malformed: a prompt leaves the node that sends one, and goes on elsewhere.

The range of a number is that of its request: its choices, prompt and log-probabilities, and the vocabulary. A finish
reason that this release does not know is not malformed (choice.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import logprobs_from_pb
from router.errors import MalformedOutput
from router.generation.choice import Choice
from router.generation.job import Job


def check_output(output: pb.Output, job: Job, choices: Sequence[Choice]) -> None:
    """Raise MalformedOutput unless the output can be one of the ``choices`` of a job. Called for each token."""
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
    if output.HasField("logprobs"):
        fault = logprobs_from_pb(output.logprobs).fault(max(job.sampling.logprobs, 0), job.vocab_size)
        if fault:
            raise MalformedOutput("logprobs", fault)
