"""Token rules: the masks of ``allowed_token_ids``, ``bad_words`` and ``thinking_token_budget``.

They depend on the request and on the output of a choice alone, so another node continues it with the same tokens.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from pdserve.grammar import without
from pdserve.records import TokenMask
from pdserve.sampling_params import SamplingParams

_UNBEGUN = -1
_ENDED = -2
_REST_OF_CHARACTER = 3  # tokens of a byte each


class TokenRules:
    """The rules of a request."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self.sampling = sampling
        self._num_bytes = TokenMask.num_bytes(vocab_size)
        allowed = ((1 << vocab_size) - 1).to_bytes(self._num_bytes, "little")
        if sampling.allowed_token_ids:
            allowed = self.mask_of(sampling.allowed_token_ids)
        self.fixed = without(allowed, [word[0] for word in sampling.bad_words if len(word) == 1])
        self._longer: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # bad words, by their last but one token
        for word in sampling.bad_words:
            if len(word) > 1:
                self._longer[word[-2]].append(word)
        self.always_fixed = not self._longer and not sampling.thinking_end_ids  # independent of the output
        self.longest = max(map(len, sampling.bad_words), default=0)  # tokens of a bad word

    def mask_of(self, token_ids: Iterable[int]) -> bytes:
        words = bytearray(self._num_bytes)
        for token_id in token_ids:
            words[token_id // 8] |= 1 << token_id % 8
        return bytes(words)

    def bad_ends(self, output: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a bad word."""
        words = self._longer.get(output[-1], ()) if output else ()
        return [word[-1] for word in words if tuple(output[1 - len(word) :]) == word[:-1]]


class ChoiceRules:
    """The rules of a choice, and how far its reasoning is."""

    def __init__(self, rules: TokenRules) -> None:
        self._rules = rules
        self._scanned = 0  # output tokens scanned for markers
        self._ends = (rules.sampling.thinking_end_ids, *rules.sampling.thinking_call_ids)  # markers that end it
        self._thinks_from = _UNBEGUN if rules.sampling.thinking_start_ids else 0  # index in the output
        self.always_fixed = rules.always_fixed  # apart from forbidden tokens

    def masks(self, token_ids: array[int], prompt_len: int, forbidden: Collection[int]) -> tuple[bytes, ...]:
        """Return the mask of the next token; ``token_ids`` are the prompt and the output.

        A second mask replaces it where a grammar first requires the rest of a character.
        """
        late = self._beyond_budget(token_ids, prompt_len)
        if late is None:
            return (self._unforced(token_ids, prompt_len, forbidden),)
        end = self._rules.sampling.thinking_end_ids
        written = next(length for length in range(len(end) - 1, -1, -1) if late[len(late) - length :] == end[:length])
        forced = self._rules.mask_of((end[written],))
        may_wait = not written and len(late) < _REST_OF_CHARACTER
        return (forced, self._unforced(token_ids, prompt_len, forbidden)) if may_wait else (forced,)

    def _unforced(self, token_ids: array[int], prompt_len: int, forbidden: Collection[int]) -> bytes:
        """A forbidden token, or one that would complete a bad word, is allowed where no other one is."""
        recent = token_ids[max(prompt_len, len(token_ids) - self._rules.longest) :]
        excluded = {*self._rules.bad_ends(recent), *forbidden}
        return without(self._rules.fixed, excluded) if excluded else self._rules.fixed

    def _beyond_budget(self, token_ids: array[int], prompt_len: int) -> tuple[int, ...] | None:
        """Return the tokens since the budget of the reasoning was used up; None: it is not, or the reasoning ended."""
        sampling = self._rules.sampling
        if not sampling.thinking_end_ids or self._thinks_from == _ENDED:
            return None
        self._find_markers(token_ids, prompt_len)
        if self._thinks_from < 0:
            return None
        used_up = prompt_len + self._thinks_from + sampling.thinking_token_budget
        return tuple(token_ids[used_up:]) if used_up <= len(token_ids) else None

    def _find_markers(self, token_ids: array[int], prompt_len: int) -> None:
        sampling = self._rules.sampling
        num_outputs = len(token_ids) - prompt_len
        for end in range(self._scanned + 1, num_outputs + 1):
            begun = self._thinks_from != _UNBEGUN
            for marker in self._ends if begun else (sampling.thinking_start_ids,):
                start = end - len(marker)
                if start < max(0, self._thinks_from):
                    continue
                if tuple(token_ids[prompt_len + start : prompt_len + end]) == marker:
                    self._thinks_from = _ENDED if begun else end
                    break
            if self._thinks_from == _ENDED:
                break
        self._scanned = num_outputs
