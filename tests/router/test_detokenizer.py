"""The joined texts of the incremental detokenizers equal a full decode; no text holds part of a character."""

from __future__ import annotations

import small_tokenizers
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from router.text.tokenizer import Tokenizer, TokenizerConfig

BYTE_LEVEL = small_tokenizers.byte_level()
BYTE_FALLBACK = small_tokenizers.byte_fallback()
WORD_PIECE = small_tokenizers.word_piece()
METASPACE = small_tokenizers.metaspace()
REPLACEMENT = "\ufffd"

texts = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab é日🙂👩‍ \n")), max_size=60)


def pieces(backend: tokenizers.Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Tokenizer(backend, TokenizerConfig(), None).detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def token_id(token: str) -> int:
    number = BYTE_LEVEL.token_to_id(token)
    assert number is not None, token
    return number


def ids_of(backend: tokenizers.Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=40)


@given(ids_of(BYTE_LEVEL))
def test_byte_level_equals_decode_for_any_ids(token_ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)


@given(texts)
def test_byte_level_sends_whole_characters(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text).ids
    sent = pieces(BYTE_LEVEL, token_ids)
    assert "".join(sent) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in sent)


@given(texts)
def test_byte_fallback_equals_decode_for_texts(text: str) -> None:
    token_ids = BYTE_FALLBACK.encode(text).ids
    sent = pieces(BYTE_FALLBACK, token_ids)
    assert "".join(sent) == BYTE_FALLBACK.decode(token_ids, skip_special_tokens=True)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in sent)


@given(ids_of(BYTE_FALLBACK))
def test_byte_fallback_keeps_characters_around_invalid_bytes(token_ids: list[int]) -> None:
    # A whole decode replaces every byte of a run of byte tokens that holds a broken one; a stream has sent the valid
    # characters of it by then. Everything else is the same.
    sent = "".join(pieces(BYTE_FALLBACK, token_ids))
    whole = BYTE_FALLBACK.decode(token_ids, skip_special_tokens=True)
    rest = iter(sent)
    assert all(character in rest for character in whole if character != REPLACEMENT)
    if REPLACEMENT not in whole:
        assert sent == whole


@given(ids_of(WORD_PIECE))
def test_word_piece_equals_decode(token_ids: list[int]) -> None:
    assert "".join(pieces(WORD_PIECE, token_ids)) == WORD_PIECE.decode(token_ids, skip_special_tokens=True)


@given(ids_of(METASPACE))
def test_metaspace_equals_decode(token_ids: list[int]) -> None:
    assert "".join(pieces(METASPACE, token_ids)) == METASPACE.decode(token_ids, skip_special_tokens=True)


@given(texts, st.integers(0, 60))
def test_completion_text_continues_the_prompt(text: str, split: int) -> None:
    token_ids = BYTE_FALLBACK.encode("word " + text).ids
    split = min(max(split, 4), len(token_ids))
    tokenizer = Tokenizer(BYTE_FALLBACK, TokenizerConfig(), None)
    detokenizer = tokenizer.detokenizer(token_ids[:split])
    output = "".join([*(detokenizer.push(token_id) for token_id in token_ids[split:]), detokenizer.flush()])
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert whole.endswith(output)


def test_character_is_emitted_with_its_last_byte() -> None:
    token_ids = [token_id(token) for token in ("ð", "Ł", "ļ", "Ģ")]  # the bytes of 🚀
    assert pieces(BYTE_LEVEL, token_ids) == ["", "", "", "🚀", ""]


def test_incomplete_character_is_replaced_at_the_end() -> None:
    token_ids = [token_id(token) for token in ("ð", "Ł")]
    assert pieces(BYTE_LEVEL, token_ids) == ["", "", REPLACEMENT]


def test_invalid_bytes_do_not_delay_later_text() -> None:
    broken = token_id("ÿ")  # 0xFF is never part of UTF-8
    sent = pieces(BYTE_LEVEL, [broken] * 1000)
    assert sent[:-1] == [REPLACEMENT] * 1000


def test_special_tokens_have_no_text() -> None:
    ids = [token_id(token) for token in ("a", "<|end|>", "b", "<tool call>")]
    assert pieces(BYTE_LEVEL, ids) == ["a", "", "b", "<tool call>", ""]


def test_ids_of_a_padded_vocabulary_have_no_text() -> None:
    for backend in (BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE, METASPACE):
        assert "".join(pieces(backend, [backend.get_vocab_size() + 10])) == ""
