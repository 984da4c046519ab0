"""Compiles grammars for grammar_checker.py: ``python -m router.text.structured.grammar_worker``.

A separate process, so that a grammar that compiles too long can be killed and one that needs too much memory does not
harm the router.
"""

from __future__ import annotations

import resource
import signal
import threading

import msgspec

from pdserve.errors import RequestError
from pdserve.grammar import Grammar, GrammarVocabulary, from_ebnf, start_thread
from router.text.structured.grammar_checker import GrammarAnswer, GrammarQuestion
from router.text.structured.schema_problems import located_problem
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
        question = msgspec.json.decode(message, type=GrammarQuestion)
        write_message(msgspec.json.encode(_answer(question, vocabulary)))


def _answer(question: GrammarQuestion, vocabulary: GrammarVocabulary) -> GrammarAnswer:
    try:
        if question.is_ebnf:
            return GrammarAnswer(text=from_ebnf(question.text))
        Grammar(question.text, vocabulary)
    except RequestError as exc:
        return GrammarAnswer(located_problem(question.text) or str(exc))
    return GrammarAnswer()


if __name__ == "__main__":
    main()
