"""Compiles grammars for the router: ``python -m router.text.structured.grammar_worker``.

    messages:  the tokenizer's JSON, then grammars
    answers:   the problem of each, "" for none

A separate process, so that a grammar that compiles too long can be killed and one that needs too much memory does not
harm the router.
"""

from __future__ import annotations

import resource
import signal
import threading

from pdserve.errors import RequestError
from pdserve.grammar import Grammar, GrammarVocabulary, start_thread
from router.text.worker_process import read_message, write_message

_MEMORY = 4 << 30  # bytes of address space


def main() -> None:
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


def _serve() -> None:
    try:
        vocabulary = GrammarVocabulary((read_message() or b"").decode())
    except ValueError as exc:
        write_message(f"the model's tokenizer cannot be used for grammars: {exc}".encode())
        return
    write_message(b"")
    while (message := read_message()) is not None:
        try:
            Grammar(message.decode(), vocabulary)
        except RequestError as exc:
            write_message(str(exc).encode())
        else:
            write_message(b"")


if __name__ == "__main__":
    main()
