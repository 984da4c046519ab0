"""From a request body to jobs: tokenized prompts, and sampling parameters within the model's limits."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pdserve.errors import RequestError, RequestTooLong, cut, shown
from pdserve.model.generation_defaults import GenerationDefaults
from pdserve.sampling_params import TOKEN_ID_LISTS, BodyParams, SamplingParams
from router.completions_api.chat_prompt import ChatPrompt, read_chat
from router.completions_api.generate_body import GenerateBody
from router.completions_api.request_bodies import ChatBody, CompletionBody
from router.completions_api.token_params import NO_NAMED_TOKENS, NO_THINKING_BUDGET, NamedTokens, ThinkingParams
from router.dialect.dialect import Prepared
from router.fleet.fleet import ModelLimits
from router.generation.job import Job
from router.images.loading import LoadedImage
from router.service import ServedModel
from router.text.chat.output_parsing import OutputParsing
from router.text.prompt import Prompt
from router.text.prompt_encoder import PromptEncoder
from router.text.stop_strings import build_stop_strings

_T = TypeVar("_T")

MAX_REPEATED = 128 * 1024 * 1024  # bytes of prompt fields in an answer
_ID_BYTES = 8  # approximate JSON bytes per token id
_LOGPROB_BYTES = 64  # approximate JSON bytes per log-probability
_NAMED_IDS = [name for name in TOKEN_ID_LISTS if name in GenerateBody.__struct_fields__]
_SEED_BITS = 63
_SEED_RANGE = 2**64  # modulus of negative seeds


async def encode_completion(body: CompletionBody, encoder: PromptEncoder, limits: ModelLimits) -> list[Prompt]:
    """Tokenize, then truncate. Raises RequestError."""
    prompts = await encoder.encode_all(body.pack_prompts(), body.add_special_tokens, "prompt")
    prompts = [_truncated(prompt, body, limits) for prompt in prompts]
    # -1 log-probabilities: none
    echo_bytes = _ID_BYTES + _LOGPROB_BYTES * (1 + body.num_logprobs) if body.echo else 0
    _check_repeated(sum(prompt.num_tokens for prompt in prompts), body, copies=body.n, echo_bytes=echo_bytes)
    return prompts


async def encode_chat(body: ChatBody, model: ServedModel, limits: ModelLimits) -> ChatPrompt:
    """Render and tokenize, then truncate. Raises RequestError for messages that cannot be rendered."""
    chat = await read_chat(body, model)
    prompt = _truncated(chat.prompt, body, limits, keeps_text=True)
    _check_repeated(prompt.num_tokens, body)
    return msgspec.structs.replace(chat, prompt=prompt)


def _check_repeated(num_tokens: int, body: GenerateBody, *, copies: int = 1, echo_bytes: int = 0) -> None:
    """Bound the prompt fields of the answer, which a completion repeats in each choice. Raises RequestError."""
    num_bytes = echo_bytes + (_ID_BYTES if body.return_token_ids else 0)
    num_bytes += _LOGPROB_BYTES * (1 + body.prompt_logprobs) if body.prompt_logprobs is not None else 0
    if num_bytes * num_tokens * copies > MAX_REPEATED:
        remedy = "lower n or the number of log-probabilities, or send fewer prompts"
        raise RequestError(
            f"the answer would repeat {num_tokens} prompt tokens in {copies} choices with some {num_bytes} bytes each; "
            f"the limit is {MAX_REPEATED} bytes, {remedy}"
        )


def _truncated(prompt: Prompt, body: GenerateBody, limits: ModelLimits, *, keeps_text: bool = False) -> Prompt:
    """Keep ``truncate_prompt_tokens`` tokens; -1 leaves room for ``max_tokens``, or for one token."""
    most = body.truncate_prompt_tokens
    if most == -1:
        room = body.output_limit or 1
        most = max(1, limits.length_beyond(room) - room)
    if most is None or prompt.num_tokens <= most:
        return prompt
    if prompt.images:
        raise RequestError(
            f"truncate_prompt_tokens {most} would cut the prompt of {_described(prompt)}; prompts with images are not "
            "cut: leave it out, or send less",
            "truncate_prompt_tokens",
        )
    if body.truncation_side == "right":
        return Prompt(prompt.first(most))
    # A chat keeps its text: the end of the text shows whether the prompt opens reasoning.
    return Prompt(prompt.last(most), prompt.text if keeps_text else None)


def make_job(
    prompt: Prompt,
    body: GenerateBody,
    limits: ModelLimits,
    *,
    grammar: str = "",
    named: NamedTokens = NO_NAMED_TOKENS,
    thinking: ThinkingParams = NO_THINKING_BUDGET,
    defaults: GenerationDefaults = GenerationDefaults(),  # noqa: B008 - frozen
    pictures: tuple[LoadedImage, ...] = (),
) -> Job:
    """Resolve every default. Raises RequestError beyond limits."""
    check_prompt(prompt, limits)
    for name in _NAMED_IDS:
        check_vocabulary(name, getattr(body, name), limits)
    bias = _logit_bias(body.logit_bias)
    check_vocabulary("logit_bias", list(bias), limits)
    max_tokens = _max_tokens(prompt, body, limits, defaults=defaults)
    if body.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {cut(str(body.min_tokens))} exceeds max_tokens {max_tokens}; lower it", "min_tokens"
        )
    top_k = max(_first(body.top_k, defaults.top_k), 0)  # -1 also means off
    top_p = _first(body.top_p, defaults.top_p)
    if top_p == 0:  # only the best token
        top_k = 1
        top_p = 1.0
    logprobs = len(named.logprob_token_ids) or min(body.num_logprobs, limits.vocab_size)
    sampling = SamplingParams(
        **{name: getattr(body, name) for name in BodyParams.__struct_fields__},
        max_tokens=max_tokens,
        temperature=_first(body.temperature, defaults.temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=_first(body.min_p, defaults.min_p),
        seed=random.getrandbits(_SEED_BITS) if body.seed is None else body.seed % _SEED_RANGE,
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=bias,
        stop_token_ids=tuple(body.stop_token_ids),
        logprobs=logprobs,
        prompt_logprobs=body.most_prompt_logprobs,
        grammar=grammar,
        allowed_token_ids=named.allowed_token_ids,
        bad_words=named.bad_words,
        logprob_token_ids=named.logprob_token_ids,
        thinking_token_budget=thinking.token_budget,
        thinking_start_ids=thinking.start_ids,
        thinking_end_ids=thinking.end_ids,
        thinking_call_ids=thinking.call_ids,
    )
    return Job(prompt, sampling, limits.vocab_size, body.output_limit == 0, pictures)


def _first(given: _T | None, default: _T) -> _T:
    return default if given is None else given


def _max_tokens(prompt: Prompt, body: GenerateBody, limits: ModelLimits, defaults: GenerationDefaults) -> int:
    """The client's limit, or a default cut to the room left; at least 1, because a node always samples one token.

    A limit that is cut fits every node that takes the prompt.
    """
    prompt_len = prompt.num_tokens
    if prompt_len == 0:
        raise RequestError("the prompt has 0 tokens; give at least one", body.prompt_field)
    fixed = body.output_limit is not None and not body.lowers_max_tokens
    limit = limits.max_model_len if fixed else limits.length_beyond(prompt_len)
    room = limit - prompt_len
    if body.output_limit is not None:
        wanted = max(body.output_limit, 1)
        if body.lowers_max_tokens:
            wanted = max(min(wanted, room), 1)
    else:
        usual = room if body.usual_tokens is None else body.usual_tokens
        wanted = max(min(_first(defaults.max_tokens(prompt_len), usual), room), 1)
    if wanted > room:
        remedy = "send fewer or smaller images, or less text" if prompt.images else "shorten the prompt"
        remedy = f"lower {body.limit_field} to {room}" if room > 0 else remedy
        raise RequestTooLong(
            f"prompt {_described(prompt)} + {body.limit_field} {cut(str(wanted))} > limit {limit}; {remedy}",
            body.limit_field if room > 0 else body.prompt_field,
            "context_length_exceeded",
        )
    return wanted


def _described(prompt: Prompt) -> str:
    """Return the length of a prompt, with the part of its images."""
    length = f"{prompt.num_tokens} tokens"
    return f"{length} ({prompt.image_tokens} of {len(prompt.images)} images)" if prompt.images else length


def check_prompt(prompt: Prompt, limits: ModelLimits) -> None:
    """Raise RequestError for a token outside the vocabulary."""
    wrong = prompt.first_outside(limits.vocab_size)
    check_vocabulary("prompt", [] if wrong is None else [wrong], limits)


def check_vocabulary(field: str, token_ids: Sequence[int], limits: ModelLimits) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            last = limits.vocab_size - 1
            raise RequestError(f"token id {cut(str(token_id))} is outside the vocabulary 0 … {last}", field)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    ids = {}
    for token_id, value in bias.items():
        try:
            ids[int(cut(token_id))] = value
        except ValueError as exc:
            raise RequestError(
                f"logit_bias has the key {shown(token_id)}; it must be a token id", "logit_bias"
            ) from exc
        if not math.isfinite(value):
            raise RequestError(f"logit_bias of token {token_id} is not finite", "logit_bias")
    return ids


async def prepared_request(body: GenerateBody, jobs: Sequence[Job], parsing: OutputParsing | None) -> Prepared:
    """Add the stop strings and parsing by which the router reads the output. Raises RequestError."""
    visible: tuple[str, ...] | None = () if parsing is None else parsing.markers
    return Prepared(
        jobs=jobs,
        stops=await build_stop_strings(body.stops, body.include_stop_str_in_output or body.no_stop_trim),
        continues_prompt=body.continues_prompt,
        visible_special_tokens=visible if body.skip_special_tokens else None,
        parsing=parsing,
    )
