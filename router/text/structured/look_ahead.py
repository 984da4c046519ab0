"""Patterns with look-ahead as regexes without it, all of which a text must match: ``^(?!a)\\w+$`` is ``^\\w+$`` and
``^([^a].*)?$``.

A look-ahead restricts the rest of the text, so a pattern is an expression of regular languages with intersection and
complement. Its conjuncts become regexes: directly, or by an automaton whose states are derivatives of the expression
(J. A. Brzozowski, Derivatives of Regular Expressions, 1964) and are eliminated one by one.

Alternatives share what follows them, so an expression is a graph, whose paths may be exponentially many. Equal
languages are one object, and each walk visits an object once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from router.text.structured.python_patterns import UnknownPattern, constants, has_flags, parsed
from router.text.structured.work_budget import Budget

_MAX_STATES = 48  # states per automaton; its regex may be exponentially longer
_MAX_REGEX = 16 * 1024  # characters
_MAX_WORK = 80_000  # steps for a pattern
_MAX_PATTERN = 1000  # characters
_MAX_COUNT = 1000  # highest repetition count in a pattern
_MAX_CACHED = 256  # patterns
_PARTS_PER_STEP = 32  # parts of a new language that cost one step
_NOT_KNOWN: list[str] = []

Ranges = tuple[tuple[int, int], ...]  # ranges of code points, sorted, both ends included


class RewrittenPatterns:
    """A cache of ``without_look_ahead``. The event loop and threads share it; at worst, two do the same work."""

    def __init__(self) -> None:
        self._known: dict[str, list[str] | None] = {}

    def get(self, pattern: str, budget: Budget) -> list[str] | None:
        """Raises WorkExceeded."""
        if (rewritten := self._known.get(pattern, _NOT_KNOWN)) is not _NOT_KNOWN:
            return rewritten
        if len(self._known) >= _MAX_CACHED:
            self._known.clear()
        rewritten = without_look_ahead(pattern, budget)
        self._known[pattern] = rewritten
        return rewritten


def has_look_ahead(pattern: str) -> bool:
    return "(?=" in pattern or "(?!" in pattern


def without_look_ahead(pattern: str, budget: Budget) -> list[str] | None:
    """Return regexes that together match what the pattern matches; None if there are none that are short enough.

    ``\\d``, ``\\w`` and ``\\s`` are those of ECMA-262, and ``.`` excludes newlines only. Raises WorkExceeded.
    """
    if len(pattern) > _MAX_PATTERN:
        return None
    try:
        return budget.part(_MAX_WORK).attempt(lambda part: _rewritten(pattern, part))
    except (UnknownPattern, RecursionError):
        return None


def _rewritten(pattern: str, budget: Budget) -> list[str]:
    """Raises UnknownPattern, also if regexes become too long."""
    tree = parsed(re.sub(r"\(\?<(?=\w)", "(?P<", pattern), budget)
    if has_flags(tree):
        raise UnknownPattern
    languages = _Languages(budget)
    whole = _Reader(languages).language(list(tree), languages.all, at_start=True)
    parts = whole.parts if whole.kind == "and" else (whole,)
    return [f"^(?:{_regex(part, languages)})$" for part in parts if part is not languages.all] or [""]


# ---------------------------------------------------------------- languages


class _Language:
    """``kind`` and its operands: "set" characters; "cat", "or", "and" parts; "not" part; "repeat" part, least, most.

    Made by _Languages only, so equal ones are one object.
    """

    __slots__ = ("chars", "is_nullable", "kind", "least", "most", "parts", "regex_chars")

    def __init__(self, kind: str, chars: Ranges, parts: tuple[_Language, ...], least: int, most: int) -> None:
        self.kind = kind
        self.chars = chars
        self.parts = parts
        self.least = least
        self.most = most  # -1: unlimited
        self.is_nullable = self._is_nullable()  # whether the empty text belongs to it
        self.regex_chars = self._regex_chars()  # length of its regex; -1: an automaton must find it

    def _is_nullable(self) -> bool:
        match self.kind:
            case "set":
                return False
            case "cat" | "and":
                return all(part.is_nullable for part in self.parts)
            case "or":
                return any(part.is_nullable for part in self.parts)
            case "not":
                return not self.parts[0].is_nullable
            case _:
                return not self.least or self.parts[0].is_nullable

    def _regex_chars(self) -> int:
        if self.kind in ("and", "not") or any(part.regex_chars < 0 for part in self.parts):
            return -1
        inner = sum(part.regex_chars for part in self.parts)
        return inner + len(_printed_set(self.chars) if self.kind == "set" else _around(self, [""] * len(self.parts)))


_CODE_POINTS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))  # surrogates are no characters


class _Languages:
    """Makes the languages of one pattern."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._known: dict[tuple[str, Ranges, tuple[_Language, ...], int, int], _Language] = {}
        self.nothing = self._language("or")
        self.empty = self._language("cat")  # the empty text
        self.any = self.set(_CODE_POINTS)
        self.all = self._language("repeat", parts=(self.any,), most=-1)

    def _language(
        self, kind: str, chars: Ranges = (), parts: tuple[_Language, ...] = (), least: int = 0, most: int = 0
    ) -> _Language:
        key = (kind, chars, parts, least, most)
        if (language := self._known.get(key)) is None:
            self._spend(len(parts) + len(chars))
            language = self._known[key] = _Language(*key)
        return language

    def _spend(self, num_parts: int) -> None:
        self.budget.spend(2 + num_parts // _PARTS_PER_STEP)

    def set(self, chars: Ranges) -> _Language:
        return self._language("set", chars)

    def cat(self, *parts: _Language) -> _Language:
        flat: list[_Language] = []
        for part in parts:
            flat += part.parts if part.kind == "cat" else (part,)
        self._spend(len(flat))
        if self.nothing in flat:
            return self.nothing
        return flat[0] if len(flat) == 1 else self._language("cat", parts=tuple(flat))

    def _flat(self, kind: str, parts: Iterable[_Language]) -> dict[_Language, None]:
        flat: dict[_Language, None] = {}
        for part in parts:
            flat.update(dict.fromkeys(part.parts if part.kind == kind else (part,)))
            self._spend(len(part.parts))
        self.budget.spend(len(flat))  # for the sorting
        return flat

    def either(self, parts: Iterable[_Language]) -> _Language:
        flat = self._flat("or", parts)
        if self.all in flat:
            return self.all
        return next(iter(flat)) if len(flat) == 1 else self._language("or", parts=_ordered(flat))

    def both(self, parts: Iterable[_Language]) -> _Language:
        flat = self._flat("and", parts)
        flat.pop(self.all, None)
        if self.nothing in flat:
            return self.nothing
        if not flat:
            return self.all
        return next(iter(flat)) if len(flat) == 1 else self._language("and", parts=_ordered(flat))

    def negated(self, part: _Language) -> _Language:
        if part.kind == "not":
            return part.parts[0]
        if part is self.nothing:
            return self.all
        return self.nothing if part is self.all else self._language("not", parts=(part,))

    def repeated(self, part: _Language, least: int, most: int) -> _Language:
        if most == 0 or part is self.empty:
            return self.empty
        if part is self.nothing:
            return self.nothing if least else self.empty
        return part if least == most == 1 else self._language("repeat", parts=(part,), least=least, most=most)


def _ordered(parts: Iterable[_Language]) -> tuple[_Language, ...]:
    """Return alternatives in an order by which most equal ones become equal. It does not look deeper: that is slow."""
    return tuple(sorted(parts, key=lambda part: (part.kind, part.chars, part.least, part.most, len(part.parts))))


# ---------------------------------------------------------------- from patterns


def _union(sets: Iterable[Ranges]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(span for ranges in sets for span in ranges):
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
    constants.CATEGORY_DIGIT: _DIGITS,
    constants.CATEGORY_NOT_DIGIT: _others(_DIGITS),
    constants.CATEGORY_WORD: _WORD,
    constants.CATEGORY_NOT_WORD: _others(_WORD),
    constants.CATEGORY_SPACE: _SPACES,
    constants.CATEGORY_NOT_SPACE: _others(_SPACES),
}
_ASSERTIONS = (constants.ASSERT, constants.ASSERT_NOT, constants.AT)


class _Reader:
    """Makes languages of whole texts from the parts of a pattern."""

    def __init__(self, languages: _Languages) -> None:
        self._languages = languages
        self._budget = languages.budget
        self._asserting: dict[int, bool] = {}  # by the id of parts, which the parsed pattern keeps

    def language(self, parts: Sequence[Any], rest: _Language, at_start: bool = False) -> _Language:
        """Return the texts that match the parts and then ``rest``; ``at_start``: the parts are the whole pattern."""
        if at_start and not self._is_anchored(parts):
            return self._languages.cat(self._languages.all, self.language(parts, rest))
        consuming = (at for at, (kind, _) in enumerate(parts) if kind not in _ASSERTIONS)
        last_at_start = next(consuming, len(parts)) if at_start else -1
        language = rest
        for at in range(len(parts) - 1, -1, -1):
            self._budget.spend(2)
            kind, value = parts[at]
            language = self._part(kind, value, language, at <= last_at_start)
        return language

    def _part(self, kind: Any, value: Any, rest: _Language, at_start: bool) -> _Language:
        if kind is constants.AT:
            if value in (constants.AT_END, constants.AT_END_STRING):
                return self._languages.empty if rest.is_nullable else self._languages.nothing
            if at_start and value in (constants.AT_BEGINNING, constants.AT_BEGINNING_STRING):
                return rest
            raise UnknownPattern
        if kind in (constants.ASSERT, constants.ASSERT_NOT):
            direction, parts = value
            if direction < 0:
                raise UnknownPattern
            read = self._at_start if at_start else self.language
            ahead = read(parts, self._languages.all)
            return self._languages.both([ahead if kind is constants.ASSERT else self._languages.negated(ahead), rest])
        if kind is constants.SUBPATTERN:
            _, added, dropped, parts = value
            if added or dropped:
                raise UnknownPattern
            return self._at_start(parts, rest) if at_start else self.language(parts, rest)
        if kind is constants.BRANCH:
            read = self._at_start if at_start else self.language
            return self._languages.either([read(parts, rest) for parts in value[1]])
        if kind in (constants.MAX_REPEAT, constants.MIN_REPEAT):
            least, most, parts = value
            if self._asserts(parts):
                if most != 1:
                    raise UnknownPattern
                once = self.language(parts, rest)
                return once if least else self._languages.either([once, rest])
            most = -1 if most is constants.MAXREPEAT else most
            if max(least, most) > _MAX_COUNT:
                raise UnknownPattern
            once = self.language(parts, self._languages.empty)
            return self._languages.cat(self._languages.repeated(once, least, most), rest)
        return self._languages.cat(self._languages.set(self._characters(kind, value)), rest)

    def _at_start(self, parts: Sequence[Any], rest: _Language) -> _Language:
        """As ``language``, for parts at the beginning of the text, where ``^`` always holds."""
        anchors = (constants.AT_BEGINNING, constants.AT_BEGINNING_STRING)
        at = 0
        while at < len(parts) and parts[at][0] is constants.AT and parts[at][1] in anchors:
            at += 1
        return self.language(parts[at:], rest)

    def _characters(self, kind: Any, value: Any) -> Ranges:
        match kind:
            case constants.LITERAL:
                return ((value, value),)
            case constants.NOT_LITERAL:
                return _others(((value, value),))
            case constants.ANY:
                return _others(((10, 10),))
            case constants.RANGE:
                return (value,)
            case constants.CATEGORY:
                return _CATEGORIES[value]
            case constants.IN:
                self._budget.spend(len(value))
                negated = value[0][0] is constants.NEGATE
                ranges = _union(self._characters(*part) for part in value[negated:])
                return _others(ranges) if negated else ranges
            case _:
                raise UnknownPattern

    def _is_anchored(self, parts: Sequence[Any]) -> bool:
        """Whether a pattern begins with ``^``, also in each branch, or after look-ahead."""
        for kind, value in parts:
            if kind is constants.AT:
                return value in (constants.AT_BEGINNING, constants.AT_BEGINNING_STRING)
            if kind is constants.SUBPATTERN:
                return self._is_anchored(value[-1])
            if kind is constants.BRANCH:
                return all(self._is_anchored(branch) for branch in value[1])
            if kind not in (constants.ASSERT, constants.ASSERT_NOT):
                return False
        return False

    def _asserts(self, parts: Sequence[Any]) -> bool:
        """Whether parts have an assertion, at any depth. Each list of parts is walked once, however deep it lies."""
        asserts = self._asserting.get(id(parts))
        if asserts is None:
            asserts = self._asserting[id(parts)] = any(self._part_asserts(kind, value) for kind, value in parts)
        return asserts

    def _part_asserts(self, kind: Any, value: Any) -> bool:
        self._budget.spend()
        inner: Sequence[Any] = ()
        if kind is constants.SUBPATTERN or kind in (constants.MAX_REPEAT, constants.MIN_REPEAT):
            inner = (value[-1],)
        elif kind is constants.BRANCH:
            inner = value[1]
        return kind in _ASSERTIONS or any(map(self._asserts, inner))


# ---------------------------------------------------------------- to regexes


def _regex(language: _Language, languages: _Languages) -> str:
    """Return a regex in Rust's syntax. Raises UnknownPattern if it is too long."""
    if language.regex_chars >= 0:
        return _printed(language, languages.budget)
    text = _Automaton(language, languages).regex()
    if len(text) > _MAX_REGEX:
        raise UnknownPattern
    return text


def _printed(language: _Language, budget: Budget) -> str:
    """Return the regex of a language that has one. Raises UnknownPattern if it is too long."""
    if language.regex_chars > _MAX_REGEX:
        raise UnknownPattern
    budget.spend_chars(language.regex_chars)
    if language.kind == "set":
        return _printed_set(language.chars)
    return _around(language, [_printed(part, budget) for part in language.parts])


def _around(language: _Language, parts: Sequence[str]) -> str:
    """Return the regex of a language from those of its parts."""
    match language.kind:
        case "cat":
            return "".join(parts)
        case "or":
            return f"(?:{'|'.join(parts)})"
        case _:
            most = "" if language.most < 0 else str(language.most)
            return f"(?:{parts[0]}){{{language.least},{most}}}"


def _printed_set(ranges: Ranges) -> str:
    if ranges == _CODE_POINTS:
        return "(?s:.)"
    return "[" + "".join(f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in ranges) + "]"


class _Automaton:
    """The deterministic automaton of a language."""

    def __init__(self, language: _Language, languages: _Languages) -> None:
        self._languages = languages
        self._budget = languages.budget
        self._classes = _classes(language, languages.budget)
        self._derivatives: dict[tuple[_Language, int], _Language] = {}
        self._states = {language: 0}  # language → number of its state
        self._edges: dict[tuple[int, int], str] = {}  # (from, to) → regex of one character
        pending = [language]
        while pending:
            pending += self._add_edges(pending.pop())

    def _add_edges(self, state: _Language) -> list[_Language]:
        """Add the edges from a state, and return the new states."""
        targets: dict[_Language, list[Ranges]] = {}
        for ranges in self._classes:
            target = self._derivative(state, ranges[0][0])
            if target is not self._languages.nothing:
                targets.setdefault(target, []).append(ranges)
        new = [target for target in targets if target not in self._states]
        for target in new:
            self._states[target] = len(self._states)
        if len(self._states) > _MAX_STATES:
            raise UnknownPattern
        for target, sets in targets.items():
            self._budget.spend(sum(map(len, sets)))
            self._edges[self._states[state], self._states[target]] = _printed_set(_union(sets))
        return new

    def _derivative(self, language: _Language, code: int) -> _Language:
        """Return what may follow the character."""
        derivative = self._derivatives.get((language, code))
        if derivative is None:
            self._budget.spend(2 + len(language.parts) + len(language.chars))
            derivative = self._derivatives[language, code] = self._new_derivative(language, code)
        return derivative

    def _new_derivative(self, language: _Language, code: int) -> _Language:
        make = self._languages
        match language.kind:
            case "set":
                has = any(first <= code <= last for first, last in language.chars)
                return make.empty if has else make.nothing
            case "cat":
                derivatives = []
                for index, part in enumerate(language.parts):
                    derivatives.append(make.cat(self._derivative(part, code), *language.parts[index + 1 :]))
                    if not part.is_nullable:
                        break
                return make.either(derivatives)
            case "or":
                return make.either([self._derivative(part, code) for part in language.parts])
            case "and":
                return make.both([self._derivative(part, code) for part in language.parts])
            case "not":
                return make.negated(self._derivative(language.parts[0], code))
            case _:
                (part,) = language.parts
                most = language.most if language.most < 0 else language.most - 1
                rest = make.repeated(part, max(0, language.least - 1), most)
                return make.cat(self._derivative(part, code), rest)

    def regex(self) -> str:
        """Eliminate states until one regex leads from a first state to a last one."""
        first = -1
        last = -2
        graph = _Graph(self._budget)
        for (start, end), text in self._edges.items():
            graph.add(start, end, text)
        graph.add(first, 0, "")
        for state, at in self._states.items():
            if state.is_nullable:
                graph.add(at, last, "")
        remaining = set(range(len(self._states)))
        while remaining:
            at = min(remaining, key=graph.degree)
            self._budget.spend(len(remaining))
            remaining.remove(at)
            graph.eliminate(at)
            if graph.num_chars > 4 * _MAX_REGEX:
                raise UnknownPattern
        regex = graph.edge(first, last)
        return _printed(self._languages.nothing, self._budget) if regex is None else regex


class _Graph:
    """Regexes between states."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._out: dict[int, dict[int, str]] = {}  # from → to → regex
        self._into: dict[int, set[int]] = {}  # to → from
        self.num_chars = 0

    def edge(self, start: int, end: int) -> str | None:
        return self._out.get(start, {}).get(end)

    def add(self, start: int, end: int, text: str) -> None:
        """Add an alternative to the edge."""
        before = self.edge(start, end)
        if before is not None:
            self.num_chars -= len(before)
            text = f"(?:{before}|{text})"
        self._budget.spend_chars(len(text))
        self.num_chars += len(text)
        self._out.setdefault(start, {})[end] = text
        self._into.setdefault(end, set()).add(start)

    def degree(self, at: int) -> int:
        """Return the number of edges at a state."""
        out = self._out.get(at, {})
        return len(out) + len(self._into.get(at, ())) - (at in out)

    def eliminate(self, at: int) -> None:
        """Join each edge to a state with each edge from it, and drop the state."""
        out = self._out.pop(at, {})
        starts = self._into.pop(at, set())
        own = out.pop(at, None)
        loop = "" if own is None else f"(?:{own})*"
        into = {start: self._out[start].pop(at) for start in starts - {at}}
        for end in out:
            self._into[end].discard(at)
        self.num_chars -= sum(map(len, (*out.values(), *into.values(), own or "")))
        for start, before in into.items():
            for end, after in out.items():
                self.add(start, end, before + loop + after)


def _classes(language: _Language, budget: Budget) -> list[Ranges]:
    """Return sets of characters that the language does not tell apart."""
    seen = {language}
    pending = [language]
    while pending:
        new = [part for part in pending.pop().parts if part not in seen]
        budget.spend(1 + len(new))
        seen.update(new)
        pending += new
    sets = {part.chars for part in seen}
    changes: dict[int, int] = {0: 0, 0xE000: 0}  # bits of the sets that begin or end at a code point
    for bit, ranges in enumerate(sets):
        budget.spend(1 + len(ranges))
        for first, last in ranges:
            changes[first] = changes.get(first, 0) ^ 1 << bit
            changes[last + 1] = changes.get(last + 1, 0) ^ 1 << bit
    ends = sorted(changes)
    budget.spend(len(ends))
    classes: dict[int, list[tuple[int, int]]] = {}
    holding = 0  # bits of the sets that have the characters
    for first, after in pairwise([*ends, 0x110000]):
        holding ^= changes[first]
        if first < after and not 0xD800 <= first < 0xE000:
            classes.setdefault(holding, []).append((first, min(after - 1, 0xD7FF) if first < 0xD800 else after - 1))
    return [_union([tuple(ranges)]) for ranges in classes.values()]
