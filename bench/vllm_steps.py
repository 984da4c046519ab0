"""Decode step and prefill times of vLLM, measured as ``engine_steps.py`` measures them.

    VLLM_PYTHON bench/vllm_steps.py MODEL [--dummy] [--batches 1,8,32] [--prompts 256,1024]

Run it in an environment with vLLM (tested with 0.32.0); it imports nothing of pdserve. Prompts are random token ids and
nothing is cached. The time of a decode step is the mean while all requests of a batch decode, the best of ``--repeat``
after a run that is not measured: vLLM compiles kernels in the first one. A prefill ends with its first token; best of
``--repeat``. With drafts (``--ngram``) it is the time per token of a sequence.

With ``--dummy``, many tokens go to the same experts: biases of routers exceed scores in gpt-oss, and FP8 weights are
almost all zero. Measure such models with a checkpoint of ``make_checkpoint.py`` instead.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any, NamedTuple

PROMPT = 64  # prompt tokens of the decode runs
LARGEST_GRAPH = 512  # tokens; vLLM's default
SKIPPED = 8  # steps in which all decode, before they are measured


class Mark(NamedTuple):
    """A moment of a run."""

    seconds: float
    tokens: int  # tokens of all requests so far


class Bench:
    def __init__(self, engine: Any, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._number = 0

    def run(self, batch: int, prompt: int, output: int) -> tuple[float, list[Mark]]:
        """Return the seconds of a run, and the marks after steps in which all requests decode."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False
        )
        prompts = [random.choices(range(self._vocab_size // 2, self._vocab_size), k=prompt) for _ in range(batch)]
        start = time.perf_counter()
        for token_ids in prompts:
            self._number += 1
            self._engine.add_request(str(self._number), {"prompt_token_ids": token_ids}, sampling)
        num_tokens = dict[str, int]()
        marks = list[Mark]()
        is_ending = False
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            num_tokens |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
            is_ending = is_ending or any(output.finished for output in outputs)
            if outputs and len(num_tokens) == batch and not is_ending:
                marks.append(Mark(time.perf_counter(), sum(num_tokens.values())))
        return time.perf_counter() - start, marks

    def decode_step(self, batch: int, steps: int, repeat: int) -> float:
        """Return the seconds per token of a sequence."""
        runs = [self.run(batch, PROMPT, steps + 2 * SKIPPED + batch // 8)[1] for _ in range(1 + repeat)]
        pairs = [(run[SKIPPED], run[-1]) for run in runs[1:]]
        return min((last.seconds - first.seconds) * batch / (last.tokens - first.tokens) for first, last in pairs)

    def prefill(self, prompt: int, repeat: int) -> float:
        return min([self.run(1, prompt, 1)[0] for _ in range(1 + repeat)])


def graph_sizes(batches: list[int], prompts: list[int], drafts: int = 0) -> list[int]:
    """Return vLLM's default sizes that are measured. Capturing all takes a minute and changes no step."""
    steps = [batch * (1 + drafts) for batch in batches]
    return sorted({*batches, *steps, *(tokens for tokens in prompts if tokens <= LARGEST_GRAPH)})


def always_propose() -> None:
    """Replace the n-gram lookup: random texts have no copies. The drafts are the first tokens of each text.

    vLLM's engine has to run in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    def propose(_: Any, most: int, sampled: list[list[int]], __: Any, token_ids: Any, **___: Any) -> list[list[int]]:
        return [token_ids[row, :most].tolist() if tokens else [] for row, tokens in enumerate(sampled)]

    NgramProposer.propose = propose


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--dummy", action="store_true", help="random weights instead of the checkpoint's")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--prompts", type=numbers, default=[256, 1024])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ngram", type=int, metavar="K", help="speculate with up to K drafts of its n-gram lookup")
    parser.add_argument(
        "--acceptance",
        type=float,
        metavar="P",
        help="K drafts that cost nothing to find; each is accepted with this probability if those before it are",
    )
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory (default %(default)s)")
    args = parser.parse_args()
    if args.acceptance is not None and not args.ngram:
        parser.error("--acceptance needs --ngram K, the number of drafts")
    from vllm import LLM

    speculation: dict[str, Any] = {}
    if args.ngram:
        speculation = {"method": "ngram", "num_speculative_tokens": args.ngram, "prompt_lookup_max": 5}
        speculation["prompt_lookup_min"] = 2
    if args.acceptance is not None:
        always_propose()
        speculation["rejection_sample_method"] = "synthetic"
        speculation["synthetic_acceptance_rates"] = [args.acceptance**number for number in range(1, args.ngram + 1)]
    llm = LLM(
        model=args.model,
        load_format="dummy" if args.dummy else "auto",
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
        max_num_seqs=max(args.batches),
        disable_log_stats=True,
        speculative_config=speculation or None,
        compilation_config={"cudagraph_capture_sizes": graph_sizes(args.batches, args.prompts, args.ngram or 0)},
    )
    bench = Bench(llm.llm_engine, llm.llm_engine.model_config.get_vocab_size())
    for batch in args.batches:
        seconds = bench.decode_step(batch, args.steps, args.repeat)
        figures = {"ms_per_step": round(seconds * 1e3, 3), "tok_per_s": round(batch / seconds)}
        print(json.dumps({"decode_batch": batch} | figures), flush=True)
    for prompt in args.prompts:
        seconds = bench.prefill(prompt, args.repeat)
        figures = {"ms": round(seconds * 1e3, 2), "tok_per_s": round(prompt / seconds)}
        print(json.dumps({"prefill_tokens": prompt} | figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
