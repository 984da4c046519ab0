"""A request and its end, within a process."""

from __future__ import annotations

import gc
import json
import time
import weakref

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams
from router.completions_api.request_bodies import CompletionBody
from router.completions_api.response_encoders import CompletionEncoder
from router.completions_api.response_objects import TokenNames
from router.completions_api.response_writers import StreamedResponse
from router.generation.choice import Choice
from router.generation.generation import RequestGeneration
from router.generation.job import GenerationOptions, Job
from router.metrics import RouterMetrics
from router.text.prompt import Prompt
from router.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(EMBEDDED_MODEL)


def test_finished_request_leaves_no_reference_cycles() -> None:
    jobs = [Job(Prompt(pack_tokens([1, 2, 3])), SamplingParams(max_tokens=4, n=2), vocab_size=512)]
    encoder = CompletionEncoder(TokenNames(TOKENIZER), "model", "id", 0, False)
    response = StreamedResponse(encoder, CompletionBody(prompt=""), jobs)
    options = GenerationOptions(request_id="id", arrived=time.monotonic(), timeout=1.0, migrations=2)
    generation = RequestGeneration(jobs, options, TOKENIZER, response, RouterMetrics().of("m"))
    response.generation = generation
    choice: Choice = generation.runs[0].choices[0]
    response.on_delta(choice, "text", pb.Output(has_token=True, token_id=5))
    left = [weakref.ref(thing) for thing in (generation, response, generation.runs[0])]

    gc.disable()
    try:
        generation.close()
        del generation, response, choice
        assert [reference() for reference in left] == [None, None, None]
    finally:
        gc.enable()


def test_chunks_keep_percent_signs_of_names_and_texts() -> None:
    encoder = CompletionEncoder(TokenNames(TOKENIZER), "100%d", "id", num_top=0, include_usage=False)
    chunk = json.loads(encoder.text_chunk(1, "5%b %%"))
    assert chunk["model"] == "100%d"
    assert chunk["choices"] == [{"index": 1, "text": "5%b %%", "logprobs": None, "finish_reason": None}]
