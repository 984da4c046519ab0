"""Patterns with look-ahead as regexes without it, all of which a text must match: ``^(?!a)\\w+$`` is ``^\\w+$`` and
``^([^a].*)?$``.

A look-ahead restricts the rest of the text, so a pattern is an expression of regular languages with intersection and
complement. Its conjuncts become regexes: directly, or by an automaton whose states are derivatives of the expression
(J. A. Brzozowski, Derivatives of Regular Expressions, 1964) and are eliminated one by one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import msgspec

_parser: Any = import_module("re._parser")  # no public module gives the parts of a regex
_constants: Any = import_module("re._constants")

_MAX_STATES = 48  # of an automaton; its regex may be exponentially longer
_MAX_REGEX = 16 * 1024  # characters
_MAX_WORK = 20_000  # parts of expressions, at most about 50 ms
_MAX_PATTERN = 1000  # characters
_MAX_COUNT = 1000  # of repetitions

Ranges = tuple[tuple[int, int], ...]  # of code points, sorted, both ends included


class _Unsupported(Exception):
    """The pattern has parts that are not known here, or its regexes become too long."""


class _Language(msgspec.Struct, frozen=True, cache_hash=True):
    """``kind`` and its operands: "set" characters; "cat", "or", "and" parts; "not" part; "repeat" part, least, most."""

    kind: str
    chars: Ranges = ()
    parts: tuple[_Language, ...] = ()
    least: int = 0
    most: int = 0  # -1: without end


_CODE_POINTS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))  # surrogates are no characters
_NOTHING = _Language("or")
_EMPTY = _Language("cat")  # the empty text
_ANY = _Language("set", _CODE_POINTS)
_ALL = _Language("repeat", parts=(_ANY,), most=-1)


def has_look_ahead(pattern: str) -> bool:
    return "(?=" in pattern or "(?!" in pattern


def without_look_ahead(pattern: str) -> list[str] | None:
    """Return regexes that together match what the pattern matches; None if there are none that are short enough.

    ``\\d``, ``\\w`` and ``\\s`` are those of ECMA-262, and ``.`` excludes newlines only.
    """
    if len(pattern) > _MAX_PATTERN:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sets that Python may read differently one day
            tree = _parser.parse(re.sub(r"\(\?<(?=\w)", "(?P<", pattern))
        if tree.state.flags & ~re.UNICODE.value:
            return None
        whole = _Reader().language(list(tree), _ALL, at_start=True)
        parts = whole.parts if whole.kind == "and" else (whole,)
        return [f"^(?:{_regex(part)})$" for part in parts if part != _ALL] or [""]
    except (_Unsupported, _parser.error, RecursionError, OverflowError):
        return None


# ---------------------------------------------------------------- languages


def _cat(*parts: _Language) -> _Language:
    flat = [each for part in parts for each in (part.parts if part.kind == "cat" else (part,))]
    if _NOTHING in flat:
        return _NOTHING
    return flat[0] if len(flat) == 1 else _Language("cat", parts=tuple(flat))


def _or(parts: Iterable[_Language]) -> _Language:
    flat = dict.fromkeys(each for part in parts for each in (part.parts if part.kind == "or" else (part,)))
    if _ALL in flat:
        return _ALL
    return next(iter(flat)) if len(flat) == 1 else _Language("or", parts=_ordered(flat))


def _and(parts: Iterable[_Language]) -> _Language:
    flat = dict.fromkeys(each for part in parts for each in (part.parts if part.kind == "and" else (part,)))
    flat.pop(_ALL, None)
    if _NOTHING in flat:
        return _NOTHING
    if not flat:
        return _ALL
    return next(iter(flat)) if len(flat) == 1 else _Language("and", parts=_ordered(flat))


def _ordered(parts: Iterable[_Language]) -> tuple[_Language, ...]:
    """Return alternatives in an order by which most equal ones become equal. It does not look deeper: that is slow."""
    return tuple(sorted(parts, key=lambda part: (part.kind, part.chars, part.least, part.most, len(part.parts))))


def _not(part: _Language) -> _Language:
    if part.kind == "not":
        return part.parts[0]
    return {_NOTHING: _ALL, _ALL: _NOTHING}.get(part) or _Language("not", parts=(part,))


def _repeat(part: _Language, least: int, most: int) -> _Language:
    if most == 0 or part == _EMPTY:
        return _EMPTY
    if part == _NOTHING:
        return _NOTHING if least else _EMPTY
    return part if least == most == 1 else _Language("repeat", parts=(part,), least=least, most=most)


def _is_nullable(language: _Language) -> bool:
    match language.kind:
        case "set":
            return False
        case "cat" | "and":
            return all(map(_is_nullable, language.parts))
        case "or":
            return any(map(_is_nullable, language.parts))
        case "not":
            return not _is_nullable(language.parts[0])
        case _:
            return not language.least or _is_nullable(language.parts[0])


# ---------------------------------------------------------------- from patterns


def _union(sets: Iterable[Ranges]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(each for ranges in sets for each in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _others(ranges: Ranges) -> Ranges:
    """Return the characters that are in no range."""
    taken = [(-1, -1), *_union((ranges, ((0xD800, 0xDFFF),))), (0x110000, 0x110000)]
    return tuple((last + 1, first - 1) for (_, last), (first, _) in pairwise(taken) if last + 1 < first)


_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = (
    *((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_CATEGORIES: dict[Any, Ranges] = {
    _constants.CATEGORY_DIGIT: _DIGITS,
    _constants.CATEGORY_NOT_DIGIT: _others(_DIGITS),
    _constants.CATEGORY_WORD: _WORD,
    _constants.CATEGORY_NOT_WORD: _others(_WORD),
    _constants.CATEGORY_SPACE: _SPACES,
    _constants.CATEGORY_NOT_SPACE: _others(_SPACES),
}
_ASSERTIONS = (_constants.ASSERT, _constants.ASSERT_NOT, _constants.AT)


class _Reader:
    """Makes languages of whole texts from the parts of a pattern."""

    def language(self, parts: Sequence[Any], rest: _Language, at_start: bool = False) -> _Language:
        """Return the texts that match the parts and then ``rest``; ``at_start``: the parts are the whole pattern."""
        if at_start and not self._is_anchored(parts):
            return _cat(_ALL, self.language(parts, rest))
        found, remaining = rest, list(parts)
        while remaining:
            kind, value = remaining.pop()
            found = self._part(kind, value, found, at_start and self._consumes_nothing(remaining))
        return found

    def _part(self, kind: Any, value: Any, rest: _Language, at_start: bool) -> _Language:
        if kind is _constants.AT:
            if value in (_constants.AT_END, _constants.AT_END_STRING):
                return _EMPTY if _is_nullable(rest) else _NOTHING
            if at_start and value in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
                return rest
            raise _Unsupported
        if kind in (_constants.ASSERT, _constants.ASSERT_NOT):
            direction, parts = value
            if direction < 0:
                raise _Unsupported
            ahead = self._at_start(parts, _ALL) if at_start else self.language(parts, _ALL)
            return _and([ahead if kind is _constants.ASSERT else _not(ahead), rest])
        if kind is _constants.SUBPATTERN:
            _, added, dropped, parts = value
            if added or dropped:
                raise _Unsupported
            return self._at_start(parts, rest) if at_start else self.language(parts, rest)
        if kind is _constants.BRANCH:
            read = self._at_start if at_start else self.language
            return _or([read(parts, rest) for parts in value[1]])
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, parts = value
            if self._asserts(parts):
                if most != 1:
                    raise _Unsupported
                once = self.language(parts, rest)
                return once if least else _or([once, rest])
            most = -1 if most is _constants.MAXREPEAT else most
            if max(least, most) > _MAX_COUNT:
                raise _Unsupported
            return _cat(_repeat(self.language(parts, _EMPTY), least, most), rest)
        return _cat(_Language("set", self._characters(kind, value)), rest)

    def _at_start(self, parts: Sequence[Any], rest: _Language) -> _Language:
        """As ``language``, for parts at the beginning of the text, where ``^`` always holds."""
        anchors = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
        at = 0
        while at < len(parts) and parts[at][0] is _constants.AT and parts[at][1] in anchors:
            at += 1
        return self.language(parts[at:], rest)

    def _characters(self, kind: Any, value: Any) -> Ranges:
        match kind:
            case _constants.LITERAL:
                return ((value, value),)
            case _constants.NOT_LITERAL:
                return _others(((value, value),))
            case _constants.ANY:
                return _others(((10, 10),))
            case _constants.RANGE:
                return (value,)
            case _constants.CATEGORY:
                return _CATEGORIES[value]
            case _constants.IN:
                negated = value[0][0] is _constants.NEGATE
                found = _union(self._characters(*each) for each in value[negated:])
                return _others(found) if negated else found
            case _:
                raise _Unsupported

    def _is_anchored(self, parts: Sequence[Any]) -> bool:
        """Whether a pattern begins with ``^``, also in each branch, or after look-ahead."""
        for kind, value in parts:
            if kind is _constants.AT:
                return value in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
            if kind is _constants.SUBPATTERN:
                return self._is_anchored(value[-1])
            if kind is _constants.BRANCH:
                return all(self._is_anchored(each) for each in value[1])
            if kind not in (_constants.ASSERT, _constants.ASSERT_NOT):
                return False
        return False

    def _consumes_nothing(self, parts: Sequence[Any]) -> bool:
        return all(kind in _ASSERTIONS for kind, _ in parts)

    def _asserts(self, parts: Sequence[Any]) -> bool:
        for kind, value in parts:
            inner: Sequence[Any] = ()
            if kind in _ASSERTIONS:
                return True
            if kind is _constants.SUBPATTERN or kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
                inner = (value[-1],)
            elif kind is _constants.BRANCH:
                inner = value[1]
            if any(self._asserts(each) for each in inner):
                return True
        return False


# ---------------------------------------------------------------- to regexes


def _regex(language: _Language) -> str:
    """Return a regex in Rust's syntax. Raises _Unsupported if it is too long."""
    text = _printed(language) if _is_plain(language) else _Automaton(language).regex()
    if len(text) > _MAX_REGEX:
        raise _Unsupported
    return text


def _is_plain(language: _Language) -> bool:
    return language.kind not in ("and", "not") and all(map(_is_plain, language.parts))


def _printed(language: _Language) -> str:
    match language.kind:
        case "set":
            return _printed_set(language.chars)
        case "cat":
            return "".join(map(_printed, language.parts))
        case "or":
            return f"(?:{'|'.join(map(_printed, language.parts))})"
        case _:
            most = "" if language.most < 0 else str(language.most)
            return f"(?:{_printed(language.parts[0])}){{{language.least},{most}}}"


def _printed_set(ranges: Ranges) -> str:
    if ranges == _CODE_POINTS:
        return "(?s:.)"
    return "[" + "".join(f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in ranges) + "]"


class _Automaton:
    """The deterministic automaton of a language."""

    def __init__(self, language: _Language) -> None:
        self._classes = _classes(language)
        self._states = {language: 0}  # numbered
        self._edges: dict[tuple[int, int], str] = {}  # regexes of one character, by both states
        self._work = 0  # parts that derivatives have visited
        pending = [language]
        while pending:
            pending += self._add_edges(pending.pop())

    def _add_edges(self, state: _Language) -> list[_Language]:
        """Add the edges from a state, and return the new states."""
        targets: dict[_Language, list[Ranges]] = {}
        for ranges in self._classes:
            target = self._derivative(state, ranges[0][0])
            if target != _NOTHING:
                targets.setdefault(target, []).append(ranges)
        new = [target for target in targets if target not in self._states]
        for target in new:
            self._states[target] = len(self._states)
        if len(self._states) > _MAX_STATES:
            raise _Unsupported
        for target, sets in targets.items():
            self._edges[self._states[state], self._states[target]] = _printed_set(_union(sets))
        return new

    def _derivative(self, language: _Language, code: int) -> _Language:
        """Return what may follow the character."""
        self._work += 1 + len(language.parts)
        if self._work > _MAX_WORK:
            raise _Unsupported
        match language.kind:
            case "set":
                return _EMPTY if any(first <= code <= last for first, last in language.chars) else _NOTHING
            case "cat":
                found = []
                for index, part in enumerate(language.parts):
                    rest = language.parts[index + 1 :]
                    self._work += len(rest)
                    found.append(_cat(self._derivative(part, code), *rest))
                    if not _is_nullable(part):
                        break
                return _or(found)
            case "or":
                return _or([self._derivative(part, code) for part in language.parts])
            case "and":
                return _and([self._derivative(part, code) for part in language.parts])
            case "not":
                return _not(self._derivative(language.parts[0], code))
            case _:
                (part,) = language.parts
                most = language.most if language.most < 0 else language.most - 1
                return _cat(self._derivative(part, code), _repeat(part, max(0, language.least - 1), most))

    def regex(self) -> str:
        """Eliminate states until one regex leads from a first state to a last one."""
        first, last = -1, -2
        edges = {**self._edges, (first, 0): ""}
        edges |= {(at, last): "" for state, at in self._states.items() if _is_nullable(state)}
        remaining = set(range(len(self._states)))
        while remaining:
            at = min(remaining, key=lambda state: sum(state in edge for edge in edges))
            remaining.remove(at)
            _eliminate(edges, at)
            if sum(map(len, edges.values())) > 4 * _MAX_REGEX:
                raise _Unsupported
        return edges.get((first, last), _printed(_NOTHING))


def _eliminate(edges: dict[tuple[int, int], str], at: int) -> None:
    """Join each edge to a state with each edge from it, and drop the state."""
    loop = f"(?:{edges[at, at]})*" if (at, at) in edges else ""
    into = [(start, text) for (start, end), text in edges.items() if end == at != start]
    out = [(end, text) for (start, end), text in edges.items() if start == at != end]
    for edge in [edge for edge in edges if at in edge]:
        del edges[edge]
    for start, before in into:
        for end, after in out:
            text = before + loop + after
            edges[start, end] = f"(?:{edges[start, end]}|{text})" if (start, end) in edges else text


def _classes(language: _Language) -> list[Ranges]:
    """Return sets of characters that the language does not tell apart."""
    sets: set[Ranges] = set()
    pending = [language]
    while pending:
        each = pending.pop()
        pending += each.parts
        sets.add(each.chars)
    ends = sorted({0, 0xE000} | {end for ranges in sets for first, last in ranges for end in (first, last + 1)})
    classes: dict[frozenset[Ranges], list[tuple[int, int]]] = {}
    for first, after in pairwise([*ends, 0x110000]):
        if first < after and not 0xD800 <= first < 0xE000:
            holding = frozenset(each for each in sets if any(low <= first <= high for low, high in each))
            classes.setdefault(holding, []).append((first, min(after - 1, 0xD7FF) if first < 0xD800 else after - 1))
    return [_union([tuple(ranges)]) for ranges in classes.values()]
