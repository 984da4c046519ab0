"""Compare random models of all native families with transformers, on V1 and V2, in float32.

python bench/fuzz_models.py --minutes 30
python bench/fuzz_models.py --seed 7 --case 12          one case again, as a difference prints it
python bench/fuzz_models.py --families gpt_oss,glm4_moe --v2 1

Each case draws a config of a family, the format of its checkpoint, weights, prompts, block sizes, and how prompts
are cut into steps (tests/support/random_models.py). Log-probabilities of all generated tokens must equal the library's;
with dynamic frequencies its greedy tokens. Two experts of almost equal score may swap, so a difference counts if other
weights show it as well. A config that is refused counts, too. The exit status is then 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from checkpoints import FAMILIES
from differential import EQUAL, LibraryError, compare
from random_models import RandomModel, draw_model, draw_prompts, draw_setup, fits_v2

_V2_PROMPT = 40  # tokens at most: Triton's interpreter is slow


def main() -> int:
    args = parse_options()
    torch.set_num_threads(args.threads)
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    end = time.monotonic() + 60 * args.minutes
    case = args.case or 0
    outcomes = Counter[str]()
    while case == args.case or (args.case is None and time.monotonic() < end):
        model, version, outcome = run(args, case)
        outcomes[f"{version} {outcome.partition(':')[0]}"] += 1
        if outcome != EQUAL or args.case is not None:
            print(f"--seed {args.seed} --case {case}, {version}: {outcome}\n    {model}", flush=True)
        case += 1
    print(f"seed {args.seed}, {sum(outcomes.values())} cases: {dict(sorted(outcomes.items()))}")
    return int(any("different" in name or "refused" in name for name in outcomes))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES), metavar="A,B")
    parser.add_argument("--v2", type=float, default=0.1, metavar="SHARE", help="of cases on V2 (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default %(default)s)")
    return parser.parse_args()


def run(args: argparse.Namespace, case: int) -> tuple[RandomModel, str, str]:
    """Return a case's model, its runner, and the outcome: EQUAL, or a kind with ": " and its text."""
    numbers = random.Random(f"{args.seed}:{case}")
    model = draw_model(numbers, args.families)
    version = "V2" if numbers.random() < args.v2 and fits_v2(model) else "V1"
    setup = draw_setup(numbers, model, version)
    prompts = draw_prompts(numbers, model, setup["num_tokens"], _V2_PROMPT if version == "V2" else 300)
    texts = []
    for seed in (model.seed, model.seed + 1):
        with tempfile.TemporaryDirectory() as directory:
            try:
                outcome = compare(model.write(Path(directory) / "model", seed), prompts, **setup)
            except LibraryError as exc:
                return model, version, f"no reference: {exc}"
            except AssertionError as exc:
                texts.append(str(exc).strip())
                continue
        if outcome != EQUAL:
            return model, version, f"refused: {outcome}"
        break
    if len(texts) == 1:
        return model, version, f"with one set of weights only: {texts[0]}"
    return model, version, f"different: {texts[0]}, setup {setup}" if texts else EQUAL


if __name__ == "__main__":
    sys.exit(main())
