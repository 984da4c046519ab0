"""From the bytes of a body to a typed struct, within limits of shape and length.

Unknown fields are rejected, except OpenAI fields without effect here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from pdserve.errors import RequestError, cut
from router.text.json_bounds import MAX_ITEMS

MAX_NESTING = 100  # levels of objects and lists
MAX_LENGTHS = {  # by field
    "messages": 10_000,
    "documents": 2048,
    "chat_template_kwargs": 64,
    "logit_bias": 1024,
    "stop_token_ids": 1024,
    "cache_salt": 1024,
    "bad_words": 1024,
    "allowed_token_ids": 16_384,
    "logprob_token_ids": 1024,
}
_TOKEN_IDS = (
    "prompt",
    "tokens",
)  # lists of token ids; their types bound the nesting
MAX_STOP_CHARS = 4096  # per stop string
_MAX_PROBLEM = 130  # characters of msgspec's message, which may quote a value

# Fields without effect here, each with the reason. Agents send them with every turn; other servers ignore them.
_IGNORED = {
    **dict.fromkeys(("metadata", "client_metadata"), "labels for logs of a provider"),
    **dict.fromkeys(("moderation", "safety_identifier"), "checks of OpenAI"),
    **dict.fromkeys(("service_tier", "store"), "contracts with OpenAI"),
    **dict.fromkeys(("prediction", "verbosity"), "hints that no model here reads"),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), "prefixes are cached anyway"
    ),
    **dict.fromkeys(("cache_control", "session_id"), "prefixes are cached anyway"),
    "context_management": "OpenAI's and Anthropic's compaction; nothing is dropped here",
    **dict.fromkeys(("anthropic_beta", "anthropic_version"), "headers of Anthropic that proxies put into bodies"),
    **dict.fromkeys(("plugins", "provider", "route", "transforms", "usage"), "OpenRouter's choice among providers"),
}
_METADATA = "_metadata"  # suffix of further fields with labels: litellm_metadata, request_metadata …
# Fields of OpenAI, vLLM and SGLang that are not supported, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": ({},),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "modalities": (["text"], []),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
    # fields of vLLM
    "ec_transfer_params": ({},),
    "enable_response_messages": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ("", []),
    "repetition_detection": ({},),
    "return_assistant_tokens_mask": (False,),
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # fields of SGLang
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "data_parallel_rank": (),
    "custom_labels": ({},),
    "custom_logit_processor": ("", []),
    "custom_params": ({},),
    "disagg_prefill_dp_rank": (),
    "extra_key": ("", []),
    "images_config": ({},),
    "input_ids": ([],),
    "lora_path": ("", []),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "ngram_corpus_id": ("", []),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "routed_dp_rank": (),
    "routed_experts_start_len": (0,),
    "session_params": ({},),
    "stop_regex": ("", []),
    "stream_reasoning": (True,),
    "task": (),
    "use_audio_in_video": (False,),
}
_OTHER_ENDPOINTS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
_TRANSFER = (
    "kv_transfer_params is not supported: decode nodes fetch KV by themselves; run without the sidecar for "
    "prefill, and name the prefill node by the header x-prefiller-host-port (--trust-routing-headers)"
)
_REPLACED = {"functions": "tools", "function_call": "tool_choice", "rid": "request_id"}

Body = TypeVar("Body", bound=msgspec.Struct)


def parse_json(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"the body is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def other_fields() -> dict[str, dict[str, Any]]:
    """JSON schemas of the accepted fields without effect, by name."""
    unsupported = {name: {"enum": [*values, None]} for name, values in _UNSUPPORTED.items()}
    unsupported["kv_transfer_params"] = {"enum": [{}, None]}
    return {**{name: {} for name in sorted(_IGNORED)}, **unsupported}


def convert(fields: dict[str, Any], kind: type[Body], token_ids: Container[str] = _TOKEN_IDS) -> Body:
    """Build a typed body; null means absent. ``token_ids`` names such fields. Raises RequestError with the field."""
    names = kind.__struct_fields__
    fields = {k: value for k, value in fields.items() if value is not None and (k in names or not _is_ignored(k))}
    _check_shape({name: value for name, value in fields.items() if name not in token_ids})
    _check_lengths(fields)
    for name, value in fields.items():
        if name in names:
            continue
        if any(_equal(value, no_effect) for no_effect in _UNSUPPORTED.get(name, ())):
            continue
        if name == "kv_transfer_params":
            if value == {}:
                continue
            raise RequestError(_TRANSFER, name, "unsupported_parameter")
        if name in _UNSUPPORTED:
            raise RequestError(f"{name} is not supported; leave it out", name, "unsupported_parameter")
        if name in _REPLACED:
            raise RequestError(f"{name} is not supported; use {_REPLACED[name]} instead", name, "unsupported_parameter")
        if name in _OTHER_ENDPOINTS:
            text = f"{name} is a parameter of {_OTHER_ENDPOINTS[name]}; send the request there"
            raise RequestError(text, name, "unknown_parameter")
        name = cut(name)
        nearest = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {nearest[0]}?" if nearest else "leave it out"
        raise RequestError(f"unknown parameter {name}; {remedy}", name, "unknown_parameter")
    whole = _whole_numbers(kind)
    known_fields = {name: value for name, value in fields.items() if name in names}
    for name in whole & known_fields.keys():  # 4.0, as JavaScript and typed languages write numbers
        value = known_fields[name]
        if isinstance(value, float) and value.is_integer():
            known_fields[name] = int(value)
    try:
        return msgspec.convert(known_fields, kind)
    except msgspec.ValidationError as exc:
        raise _validation_error(str(exc)) from exc


@cache
def _whole_numbers(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of fields that are integers, or null."""
    hints = get_type_hints(kind).items()
    return frozenset(name for name, hint in hints if hint is int or set(get_args(hint)) == {int, type(None)})


def _is_ignored(name: str) -> bool:
    return name in _IGNORED or name.endswith(_METADATA)


def _check_shape(fields: Mapping[str, Any]) -> None:
    num_items = 0
    level = _containers(fields.values())
    for _ in range(MAX_NESTING):
        num_items += sum(map(len, level))
        if num_items > MAX_ITEMS:
            raise RequestError(f"the body has more than {MAX_ITEMS} values; send fewer")
        level = _containers(
            child for container in level for child in (container.values() if isinstance(container, dict) else container)
        )
        if not level:
            return
    raise RequestError(f"the body is nested more than {MAX_NESTING} levels deep; flatten it")


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]


def _check_lengths(fields: Mapping[str, Any]) -> None:
    for name, limit in MAX_LENGTHS.items():
        value = fields.get(name)
        if isinstance(value, str | list | dict) and len(value) > limit:
            raise RequestError(f"{name} has length {len(value)}; the limit is {limit}, send fewer", name)
    stops = fields.get("stop")
    for stop in stops if isinstance(stops, list) else [stops]:
        if isinstance(stop, str) and len(stop) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string has {len(stop)} characters; the limit is {MAX_STOP_CHARS}", "stop")


def _equal(value: Any, other: Any) -> bool:
    """JSON equality: false is not 0."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


_MISSING = "Object missing required field `"
_FIELD = re.compile(r"[^.\[]+")


def _validation_error(message: str) -> RequestError:
    """msgspec's message with the field in front and as ``param``. Only the path at its end has a bounded length."""
    what, _, path = message.removesuffix("`").rpartition(" - at `$.")
    if message.startswith(_MISSING):
        name = message.removeprefix(_MISSING).partition("`")[0]
        return RequestError(f"{name} is missing", name, "missing_required_parameter")
    field = _FIELD.match(path)
    if not what or field is None:
        return RequestError(cut(message, _MAX_PROBLEM))
    what = cut(what.replace("`", ""), _MAX_PROBLEM)
    return RequestError(f"{path}: {what[:1].lower()}{what[1:]}", field[0])
