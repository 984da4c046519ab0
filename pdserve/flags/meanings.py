"""Flags of vLLM, SGLang, TGI and llama.cpp, and their meanings here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence

#: Flags of other servers, with the equivalent here: a flag, or words.
MEANINGS = {
    **dict.fromkeys(("--model", "--model-path", "--model-id"), "MODEL, as the first word after the command"),
    "--tp-size": "--tp",
    "--num-shard": "--tp",
    "--pp-size": "--pp",
    "--ep-size": "--ep",
    "--enable-expert-parallel": "--ep with the value of --tp",
    "-O0": "--cuda-graphs off",
    "-dp": "`pdserve up --decode N`, or `--elastic --nodes N`",
    "--data-parallel-size": "`pdserve up --decode N`, or `--elastic --nodes N`",
    "--dp-size": "`pdserve up --decode N`, or `--elastic --nodes N`",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "--max-total-tokens": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--cuda-memory-fraction": "--gpu-memory-utilization",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--num-gpu-blocks-override": "--kv-cache-memory",
    "--max-running-requests": "--max-num-seqs",
    "--max-batch-size": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--chunked-prefill-size": "--max-batch-tokens",
    "--max-prefill-tokens": "--max-batch-tokens",
    "--max-batch-prefill-tokens": "--max-batch-tokens",
    "--max-queued-requests": "--max-queue",
    "--max-concurrent-requests": "--max-inflight",
    "--page-size": "--block-size",
    "--disable-cuda-graph": "--cuda-graphs off",
    "--runner": "--task",
    "--convert": "--task",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--allowed-origins": "--cors-origin",
    "--uvicorn-log-level": "--log-level",
    "--enable-log-requests": "--log-requests",
    "--otlp-traces-endpoint": "--traces",
    "--random-seed": "the field `seed` of requests",
    "--seed": "the field `seed` of requests",
    "--download-dir": "the environment variable HF_HUB_CACHE",
    "--hf-token": "the environment variable HF_TOKEN",
    "--disaggregation-mode": "the commands `pdserve prefill` and `pdserve decode`",
    "--disaggregation-transfer-backend": "--kv-connector",
    "--kv-events-config": "the flags --kv-events-endpoint, --kv-events-replay-endpoint and --kv-events-topic of nodes",
    "--lora-paths": "--lora",
    "--max-loras-per-batch": "--max-loras",
    "--max-loaded-loras": "--max-cpu-loras",
    "--kv-role": "the commands `pdserve prefill` and `pdserve decode`",
}

_NO_LEVELS = "nothing is compiled but kernels; steps are CUDA graphs unless --cuda-graphs is off"

#: Flags of other servers for behaviour that pdserve always has: accepted, with a line that says why.
DEFAULTS = {
    "--enable-prefix-caching": "prefixes are always cached",
    "--enable-chunked-prefill": "long prompts are always computed in chunks; --itl-target bounds them",
    "--enable-auto-tool-choice": "tools are called without it; --tool-call-parser auto finds the model's format",
    "--disable-log-requests": "requests are not logged without --log-requests",
    "--no-enable-log-requests": "requests are not logged without --log-requests",
    "--disable-log-stats": "figures are metrics, not lines of the log",
    "--enable-prompt-tokens-details": "`usage` always has them",
    "--disable-frontend-multiprocessing": "a node's frontend and engine are two processes, the router is a third",
    **dict.fromkeys(("-O1", "-O2", "-O3"), _NO_LEVELS),
    "--async-scheduling": "runner V2 always launches a step before it knows the last one's tokens",
}

#: Flags of other servers that take a value and have no effect here, with the reason.
DEFAULTS_WITH_VALUE = {
    "--root-path": "pages and redirects are relative; have the proxy remove the prefix",
    "--distributed-executor-backend": "ranks are processes",
    **dict.fromkeys(("-O", "--optimization-level"), _NO_LEVELS),
    **dict.fromkeys(("--guided-decoding-backend", "--grammar-backend"), "llguidance computes all grammars"),
    **dict.fromkeys(("--limit-mm-per-prompt", "--mm-processor-kwargs"), "models read text only"),
}

#: Flags of other servers with equal values and meaning: accepted, with a line that names ours.
RENAMED = {
    "-tp": "--tp",
    "--tp-size": "--tp",
    "-pp": "--pp",
    "-q": "--quantization",
    "--pp-size": "--pp",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--uvicorn-log-level": "--log-level",
    "--enable-log-requests": "--log-requests",
}

#: Flags of other servers for MODEL: accepted, with a line that says where it belongs.
OF_MODEL = ("--model", "--model-path", "--model-id")

#: Values of other servers, by our flag: accepted, with a line that names ours. None: the flag is left out.
VALUES: Mapping[str, Mapping[str, str | None]] = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--attention-backend": {"FLASHINFER": "flashinfer", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch"},
    "--generation-config": {"vllm": "none"},
    "--quantization": {
        "awq_marlin": "awq",
        "gptq_marlin": "gptq",
        "modelopt_fp4": "modelopt",
    },  # vLLM's names of kernels
    "--load-format": {"safetensors": "auto"},
    "--max-model-len": {"auto": None, "-1": None},
}
#: Flags whose numbers may have units elsewhere.
SCALED = ("--max-model-len", "--max-batch-tokens", "--max-num-batched-tokens", "--max-num-seqs")
_UNITS = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}

_NO_COPIES = "experts have no copies; --ep gives each shard as many experts as the others"

#: Flags of other servers that have no counterpart, each with the reason.
REASONS = {
    "--trust-remote-code": "code from checkpoints never runs; architectures of the transformers library run without it",
    "--tokenizer": "the tokenizer comes from MODEL",
    "--tokenizer-path": "the tokenizer comes from MODEL",
    "--no-enable-prefix-caching": "prefixes are always cached; `cache_salt` in requests divides the cache",
    "--disable-radix-cache": "prefixes are always cached; `cache_salt` in requests divides the cache",
    "--kv-transfer-config": "--kv-connector names the back end, and a decode node's --prefill what it reads from",
    "--speculative-config": "--speculate lookup, mtp or eagle3:DIR, and --num-drafts; there are no other draft models",
    "--speculative-algorithm": "--speculate lookup, mtp or eagle3:DIR, and --num-drafts; no other draft models",
    "--enable-eplb": _NO_COPIES,
    "--eplb-config": _NO_COPIES,
    "--ep-num-redundant-experts": _NO_COPIES,
    "--num-redundant-experts": _NO_COPIES,
    "--eplb-rebalance-num-iterations": _NO_COPIES,
    "--revision": "download it with `hf download ID --revision NAME`, and give the printed directory as MODEL",
    "--hf-overrides": "change config.json in a copy of the checkpoint's directory, and give that as MODEL",
    "--override-generation-config": "requests set these fields; change generation_config.json in a copy of the "
    "checkpoint's directory, or use --generation-config none",
    **dict.fromkeys(("-O", "-cc", "--compilation-config"), _NO_LEVELS),
    "--structured-outputs-config": "llguidance computes all grammars, which begin behind the reasoning",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks; --max-batch-tokens is their size",
    "--swap-space": "KV is never swapped; --max-num-seqs and --kv-cache-memory bound it",
    "--cpu-offload-gb": "weights are never offloaded; use --tp or --pp over more GPUs",
}

#: Flags that nodes do not have, since the router speaks HTTP.
OF_ROUTERS = {
    "--tool-call-parser",
    "--reasoning-parser",
    "--chat-template",
    "--api-keys",
    "--cors-origin",
    "--policy",
    "--max-logprobs",
    "--max-queue",
    "--max-inflight",
    "--response-store",
    "--tls-cert",
    "--tls-key",
}

_SIMILAR = 0.7  # least similarity (difflib's ratio) of a flag to suggest


def translated(
    words: Sequence[str], flags: Collection[str], say: Callable[[str], None], takes_model: bool = False
) -> list[str]:
    """Return a command line in our flags. ``say`` gets a line for each flag of another server that is accepted.

    ``takes_model``: the command has a positional MODEL.
    """
    ours: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.replace("_", "-") if flag.startswith("-") else flag
        if name in flags:
            ours.append(word)
        elif name in DEFAULTS:
            say(f"{name} has no effect: {DEFAULTS[name]}")
        elif name in DEFAULTS_WITH_VALUE and (equals or left):
            left = left if equals else left[1:]
            say(f"{name} has no effect: {DEFAULTS_WITH_VALUE[name]}")
        elif name in OF_MODEL and takes_model and (equals or left):
            ours.insert(0, value if equals else left.pop(0))
            say(f"{name} is MODEL here, the first word after the command")
        elif (renamed := RENAMED.get(name)) in flags:
            say(f"{name} is {renamed} here")
            ours.append(f"{renamed}{equals}{value}")
        else:
            ours.append(word)
    return ours


def with_our_values(words: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Return a command line of our flags in our values. ``say`` gets a line for each value that is translated."""
    translation: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if (flag not in VALUES and flag not in SCALED) or not (equals or left):
            translation.append(word)
            continue
        value = value if equals else left.pop(0)
        ours = _our_value(flag, value)
        if ours != value:
            say(f"{flag} {value} is {ours or 'the default'} here")
        if ours is not None:
            translation += [f"{flag}={ours}"] if equals else [flag, ours]
    return translation


def _our_value(flag: str, value: str) -> str | None:
    if flag in VALUES and value in VALUES[flag]:
        return VALUES[flag][value]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmKM])", value) if flag in SCALED else None
    return str(int(float(match[1]) * _UNITS[match[2]])) if match else value


def describe_unknown(flag: str, flags: Collection[str], program: str) -> str:
    """Return an error for a flag that is not one of ``flags``, with the remedy."""
    flag = flag.replace("_", "-")
    if reason := REASONS.get(flag.partition(".")[0]):  # vLLM's --compilation-config.mode is a field of that flag's JSON
        return f"{flag} is not supported: {reason}"
    meant = MEANINGS.get(flag, flag)
    if meant != flag and (not meant.startswith("--") or meant.split()[0] in flags):
        return f"unknown flag {flag}; use {meant}"
    if meant in OF_ROUTERS:
        what = f"{flag} is {meant}, a flag" if meant != flag else f"{flag} is a flag"
        return f"{what} of `pdserve router` and `pdserve up`, not of {program}"
    nearest = _nearest(flag, flags)
    return f"unknown flag {flag}; " + (f"did you mean {nearest}?" if nearest else f"see {program} --help")


def _nearest(flag: str, flags: Collection[str]) -> str | None:
    """Return the shortest known flag that continues ``flag``, else one of similar letters or with all its words."""
    if longer := min((name for name in flags if name.startswith(f"{flag}-")), key=len, default=None):
        return longer
    if similar := difflib.get_close_matches(flag, flags, n=1, cutoff=_SIMILAR):
        return similar[0]
    words = set(flag.strip("-").split("-"))
    return min((name for name in flags if words <= set(name.strip("-").split("-"))), key=len, default=None)
