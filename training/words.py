"""Names, words and values from which conversations are made. An eighth of the names is held out for the evaluation."""

from __future__ import annotations

import random
import re
import tomllib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LISTS: dict[str, list[str]] = {
    name: words.split() for name, words in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}


def listed(name: str) -> list[str]:
    """Return a list of words.toml."""
    return _LISTS[name]


_CODAS = ["", "", "", "n", "r", "l", "s", "m", "t", "k", "x", "nd", "rn", "th", "ck", "sk", "v", "lm"]
_WORD = re.compile(r"Ġ([a-z]{3,})")
_PIECE = re.compile(r"[a-z]{2,}")


def held_out(name: str) -> bool:
    """Whether a name is kept for the evaluation."""
    return zlib.crc32(name.lower().encode()) % 8 == 0


@dataclass
class Words:
    """Draws names and values. Training and evaluation see disjoint names, and each conversation distinct ones."""

    rng: random.Random
    evaluating: bool = False
    vocabulary: Sequence[str] = ()  # whole lower-case words
    pieces: Sequence[str] = ()  # parts of words, so that every token is met in some name
    used: set[str] = field(default_factory=set)

    def fresh(self, make: Callable[[], str]) -> str:
        """Return a name of the right set that this conversation has not used."""
        name = make()
        for _ in range(200):
            if name not in self.used and held_out(name) == self.evaluating:
                break
            name = make()
        self.used.add(name)
        return name

    def start(self) -> None:
        """Begin a conversation: all names are free again."""
        self.used.clear()

    def syllables(self) -> str:
        rng = self.rng
        count = rng.choice((2, 2, 2, 3, 3))
        return "".join(rng.choice(listed("onsets")) + rng.choice(listed("vowels")) for _ in range(count)) + rng.choice(
            _CODAS
        )

    def invented(self) -> str:
        """A capitalized word that does not exist."""
        if self.pieces and self.rng.random() < 0.3:
            text = "".join(self.rng.choice(self.pieces) for _ in range(self.rng.choice((1, 2, 2, 3))))
        else:
            text = self.syllables()
        return text[:14].capitalize()

    def word(self) -> str:
        """Any English word of the vocabulary, or an object."""
        return self.rng.choice(self.vocabulary or listed("objects"))

    def person(self) -> str:
        def make() -> str:
            rng = self.rng
            first = rng.choice(listed("first_names")) if rng.random() < 0.5 else self.invented()
            return first if rng.random() < 0.7 else f"{first} {self.invented()}"

        return self.fresh(make)

    def place(self) -> str:
        return self.fresh(lambda: self.rng.choice(listed("places")) if self.rng.random() < 0.4 else self.invented())

    def colour(self) -> str:
        return self.rng.choice(listed("colours")) if self.rng.random() < 0.7 else self.word()

    def pick(self, values: Sequence[str]) -> str:
        """One of the values, or now and then any word, so that the model reads and does not guess."""
        return self.rng.choice(values) if self.rng.random() < 0.75 else self.word()

    def number(self) -> str:
        return str(self.rng.randrange(10 ** self.rng.choice((1, 2, 2, 3, 4, 4, 5))))

    def code(self) -> str:
        """Return a code such as 4417, QX-417 or 7b2."""
        rng = self.rng
        letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.choice((1, 2, 3))))
        digits = "".join(rng.choice("0123456789") for _ in range(rng.choice((2, 3, 4))))
        return rng.choice((digits, f"{letters}-{digits}", f"{letters}{digits}", f"{digits}-{digits[::-1]}"))

    def date(self) -> str:
        return f"{self.rng.choice(listed('months'))} {self.rng.randint(1, 28)}"

    def thing(self) -> str:
        """An object with an adjective, such as "brass key", which this conversation has not used."""
        rng = self.rng

        def make() -> str:
            noun = rng.choice(listed("objects")) if rng.random() < 0.75 else self.word()
            adjective = rng.choice(listed("adjectives")) if rng.random() < 0.8 else self.word()
            return f"{adjective} {noun}"

        return self.fresh(make)

    def spot(self) -> str:
        rng = self.rng
        noun = rng.choice(listed("spots")) if rng.random() < 0.8 else self.word()
        if rng.random() < 0.15:
            noun = f"{noun} of the {rng.choice(listed('spots')) if rng.random() < 0.5 else self.word()}"
        return f"{rng.choice(listed('adjectives'))} {noun}" if rng.random() < 0.5 else noun

    def value(self) -> str:
        """A value of any kind."""
        kinds = (self.code, self.code, self.number, self.word, self.invented, self.date, self.colour, self.two_words)
        return self.rng.choice(kinds)()

    def two_words(self) -> str:
        return f"{self.word()} {self.word()}"


def words_of(tokens: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the words and the parts of words in a byte-level BPE vocabulary."""
    listed = sorted(tokens)
    words = [match[1] for token in listed if (match := _WORD.fullmatch(token))]
    return words, [token for token in listed if _PIECE.fullmatch(token)]
