"""Checks of the fields of both completions and chats that need neither model nor prompt."""

from __future__ import annotations

import math
import re

from pdserve.errors import RequestError, cut, shown
from pdserve.model.generation_defaults import RECOMMENDED
from pdserve.ranges import ranges_of, within
from pdserve.sampling_params import MAX_PROMPT_LOGPROBS, BodyParams, SamplingParams
from router.completions_api.generate_body import GenerateBody

MAX_STOP_STRINGS = 64  # editors send 19 and more
#: Fields with the ranges of SamplingParams; other fields mean more than the parameter, and are checked one by one.
_AS_DECLARED = [name for name in (*BodyParams.__struct_fields__, *RECOMMENDED) if name in ranges_of(SamplingParams)]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # nothing that ends a log line or a header


def check_ranges(body: GenerateBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true; leave it out", "stream_options")
    if body.prompt_logprobs is not None:
        if body.prompt_logprobs == -1:
            text = f"prompt_logprobs is -1, all tokens of the vocabulary; the limit is {MAX_PROMPT_LOGPROBS}"
            raise RequestError(f"{text}, ask for fewer", "prompt_logprobs")
        within("prompt_logprobs", body.prompt_logprobs, 0, MAX_PROMPT_LOGPROBS)
        if body.stream:
            text = "prompt_logprobs cannot be streamed; leave out prompt_logprobs or stream"
            raise RequestError(text, "prompt_logprobs")
    if body.output_limit is not None:  # 0 scores the prompt only
        within(body.limit_field, body.output_limit, 0 if body.most_prompt_logprobs >= 0 else 1, math.inf)
    for name in _AS_DECLARED:
        value = getattr(body, name)
        if value is not None and (name, value) != ("top_p", 0):  # top_p 0 means the best token (make_job)
            ranges_of(SamplingParams)[name].check(name, value)
    within("seed", body.seed or 0, -(2**63), 2**64 - 1)
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens != -1:
        within("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, math.inf)
    within("priority", body.priority, -(2**31), 2**31 - 1)
    for token_id, bias in body.logit_bias.items():
        allowed = ranges_of(SamplingParams)["logit_bias"]
        within(f"logit_bias of token {cut(token_id)}", bias, allowed.low, allowed.high, param="logit_bias")
    within("number of stop strings", len(body.stops), 0, MAX_STOP_STRINGS, param="stop")
    if "" in body.stops:
        raise RequestError("a stop string is empty; leave it out", "stop")
    _check_token_rules(body)
    if body.request_id and not _REQUEST_ID.fullmatch(body.request_id):
        text = f"request_id {shown(body.request_id)} must have 1 to 64 letters, digits, '.', '_' and '-'"
        raise RequestError(text, "request_id")
    body.structure  # noqa: B018 - raises for two


def _check_token_rules(body: GenerateBody) -> None:
    if not all(body.bad_words):
        raise RequestError("bad_words has an empty text; leave it out", "bad_words")
    if body.logprob_token_ids and body.num_logprobs < 0:
        raise RequestError("logprob_token_ids needs logprobs; set it, or leave both out", "logprob_token_ids")
    within(
        "thinking_token_budget", -1 if body.thinking_token_budget is None else body.thinking_token_budget, -1, math.inf
    )
