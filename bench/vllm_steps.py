"""Decode step and prefill times of vLLM, measured as ``engine_steps.py`` measures them.

    VLLM_PYTHON bench/vllm_steps.py MODEL [--dummy] [--batches 1,8,32] [--prompts 256,1024]

Run it in an environment with vLLM (tested with 0.32.0); it imports nothing of pdserve. Prompts are random token ids and
nothing is cached. The time of a decode step is the mean while all requests of a batch decode, the best of ``--repeat``
after a run that is not measured: vLLM compiles kernels in the first one. A prefill ends with its first token; best of
``--repeat``.

With ``--dummy``, many tokens go to the same experts: biases of routers exceed scores in gpt-oss, and FP8 weights are
almost all zero. Measure such models with a checkpoint of ``make_checkpoint.py`` instead.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

PROMPT = 64  # prompt tokens of the decode runs
LARGEST_GRAPH = 512  # tokens; vLLM's default
SKIPPED = 8  # steps in which all decode, before they are measured


class Bench:
    def __init__(self, engine: Any, vocab_size: int) -> None:
        self._engine, self._vocab_size, self._number = engine, vocab_size, 0

    def run(self, batch: int, prompt: int, output: int) -> tuple[float, list[float]]:
        """Return the seconds of a run, and the moments of steps after which all requests decode."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False
        )
        prompts = [random.choices(range(self._vocab_size // 2, self._vocab_size), k=prompt) for _ in range(batch)]
        start = time.perf_counter()
        for token_ids in prompts:
            self._number += 1
            self._engine.add_request(str(self._number), {"prompt_token_ids": token_ids}, sampling)
        started, moments, is_ending = set[str](), list[float](), False
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            started.update(each.request_id for each in outputs)
            is_ending = is_ending or any(each.finished for each in outputs)
            if outputs and len(started) == batch and not is_ending:
                moments.append(time.perf_counter())
        return time.perf_counter() - start, moments

    def decode_step(self, batch: int, steps: int, repeat: int) -> float:
        runs = [self.run(batch, PROMPT, steps + 2 * SKIPPED + batch // 8)[1] for _ in range(1 + repeat)]
        return min((run[-1] - run[SKIPPED]) / (len(run) - 1 - SKIPPED) for run in runs[1:])

    def prefill(self, prompt: int, repeat: int) -> float:
        return min([self.run(1, prompt, 1)[0] for _ in range(1 + repeat)])


def graph_sizes(batches: list[int], prompts: list[int]) -> list[int]:
    """Return those of vLLM's default sizes that are measured. Capturing all takes a minute and changes no step."""
    return sorted({*batches, *(tokens for tokens in prompts if tokens <= LARGEST_GRAPH)})


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
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory (default %(default)s)")
    args = parser.parse_args()
    from vllm import LLM

    llm = LLM(
        model=args.model,
        load_format="dummy" if args.dummy else "auto",
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
        max_num_seqs=max(args.batches),
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": graph_sizes(args.batches, args.prompts)},
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
