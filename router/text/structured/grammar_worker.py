"""Compiles grammars for the router: ``python -m router.text.structured.grammar_worker``.

    stdin:  the tokenizer's JSON, then grammars             one per line, each as a JSON string
    stdout: the problem of each, "" for none                one per line, each as a JSON string

A separate process, so that a grammar that compiles too long can be killed and one that needs too much memory does not
harm the router. It exits when its standard input ends.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading

from pdserve.errors import RequestError
from pdserve.grammar import Grammar, GrammarVocabulary, start_thread

_MEMORY = 4 << 30  # bytes of address space


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router handles Ctrl-C
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, most))
    ended = threading.Event()

    def work() -> None:
        try:
            _serve()
        finally:
            ended.set()

    start_thread(work, "grammars")
    ended.wait()
    return 0


def _serve() -> None:
    try:
        vocabulary = GrammarVocabulary(json.loads(sys.stdin.readline()))
    except ValueError as exc:
        _answer(f"the model's tokenizer cannot be used for grammars: {exc}")
        return
    _answer("")
    for line in sys.stdin:
        try:
            Grammar(json.loads(line), vocabulary)
        except RequestError as exc:
            _answer(str(exc))
        else:
            _answer("")


def _answer(problem: str) -> None:
    print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    sys.exit(main())
