"""Quality of the embedded model: held-out questions, tool calls and schemas, asked over a running router's chat API.

    .venv/bin/pdserve up --port 8000 &
    .venv/bin/python bench/held_out.py --url http://127.0.0.1:8000

No training sees these names, wordings and documents (``training/held_out.py``). Answers stand up to 2,000 tokens
before their question. ``--wrong`` prints the answers that are not right.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from training.held_out import Case, cases

PREFILL_NODE = "x-pdserve-prefill-node"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=EMBEDDED_MODEL.name, help="the name that the router serves it under")
    parser.add_argument("--tokenizer", type=Path, default=EMBEDDED_MODEL, help="directory of the model's tokenizer")
    parser.add_argument("--wrong", action="store_true", help="print each wrong answer")
    args = parser.parse_args()
    asked = Counter[str]()
    right = Counter[str]()
    handed_off = Counter[str]()
    with httpx.Client(base_url=args.url, timeout=120) as client:
        for case in cases(args.tokenizer):
            answer = client.post("/v1/chat/completions", json={"model": args.model, **case.body}).raise_for_status()
            message = answer.json()["choices"][0]["message"]
            for key in keys(case):
                asked[key] += 1
                right[key] += case.right(message)
                handed_off[key] += PREFILL_NODE in answer.headers
            if args.wrong and not case.right(message):
                question = case.body["messages"][-1]["content"][-200:]
                print(
                    f"{case.kind}: {question!r}\n  {case.expected}\n  {message.get('tool_calls') or message['content']}"
                )
    print("| | asked | right | through a prefill node |\n|---|---|---|---|")
    for key in asked:
        print(f"| {key} | {asked[key]} | {right[key]} | {handed_off[key]} |")


def keys(case: Case) -> list[str]:
    """Return the rows of the table that a case counts in."""
    if case.kind != "question":
        return [case.kind]
    bound = next(bound for bound in (250, 500, 1000, 2000) if case.distance <= bound)
    return [case.kind, f"question, answer up to {bound:,} tokens before"]


if __name__ == "__main__":
    main()
