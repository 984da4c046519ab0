"""Checks of the fields of both completions and chats that need neither model nor prompt."""

from __future__ import annotations

import math
import re

from pdserve.errors import RequestError, cut, shown
from pdserve.records import MAX_PROMPT_LOGPROBS
from router.completions_api.generate_body import GenerateBody

MAX_CHOICES = 128  # per prompt
MAX_STOP_STRINGS = 16
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
    within("min_tokens", body.min_tokens, 0, math.inf)
    within("temperature", body.temperature or 0.0, 0.0, 2.0)
    within("top_p", 1.0 if body.top_p is None else body.top_p, 0.0, 1.0, above=True)
    within("top_k", body.top_k or 0, -1, 2**31 - 1)
    within("min_p", body.min_p or 0.0, 0.0, 1.0)
    within("seed", body.seed or 0, -(2**63), 2**64 - 1)
    within(
        "repetition_penalty",
        1.0 if body.repetition_penalty is None else body.repetition_penalty,
        0.0,
        100.0,
        above=True,
    )
    within("presence_penalty", body.presence_penalty, -2.0, 2.0)
    within("frequency_penalty", body.frequency_penalty, -2.0, 2.0)
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens != -1:
        within("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, math.inf)
    within("priority", body.priority, -(2**31), 2**31 - 1)
    within("n", body.n, 1, MAX_CHOICES)
    for token_id, bias in body.logit_bias.items():
        within(f"logit_bias of token {cut(token_id)}", bias, -100.0, 100.0, param="logit_bias")
    within("number of stop strings", len(body.stops), 0, MAX_STOP_STRINGS, param="stop")
    if "" in body.stops:
        raise RequestError("a stop string is empty; leave it out", "stop")
    _check_token_rules(body)
    if body.request_id and not _REQUEST_ID.fullmatch(body.request_id):
        text = f"request_id {shown(body.request_id)} must have 1 to 64 letters, digits, '.', '_' and '-'"
        raise RequestError(text, "request_id")
    body.structure  # noqa: B018 - converted where the body is parsed, for large bodies on a thread


def _check_token_rules(body: GenerateBody) -> None:
    if not all(body.bad_words):
        raise RequestError("bad_words has an empty text; leave it out", "bad_words")
    if body.logprob_token_ids and body.num_logprobs < 0:
        raise RequestError("logprob_token_ids needs logprobs; set it, or leave both out", "logprob_token_ids")
    within(
        "thinking_token_budget", -1 if body.thinking_token_budget is None else body.thinking_token_budget, -1, math.inf
    )


def within(name: str, value: float, low: float, high: float, *, above: bool = False, param: str | None = None) -> None:
    if (low < value if above else low <= value) and value <= high:
        return
    floor = f"above {low:g}" if above else f"at least {low:g}"
    ceiling = "" if high == math.inf else f" and at most {high:g}"
    raise RequestError(f"{name} is {cut(str(value))}; it must be {floor}{ceiling}", param or name)
