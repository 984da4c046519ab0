"""Small tokenizers of the kinds found in checkpoints, trained on the fly and written in a checkpoint's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps for a while.",
    "Tokens per second: 1234567890. Prices: $5, 7 € and 100 ¥!",
    "naïve café déjà vu — über straße, español, português, čeština",
    "日本語のテキストと漢字、ひらがな、カタカナ。 中文文本。 한국어 텍스트",
    "Emoji 🙂🚀👩‍👩‍👧 and maths ∑∫√ and Привет, мир!",
    "def main():\n    return {'a': [1, 2, 3]}\n\n\tif x:\n        pass\n",
] * 4

SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(corpus: Sequence[str] = CORPUS) -> Tokenizer:
    """Train a byte-level BPE tokenizer, as in Llama 3 and Qwen; every byte is in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("ünïcode⁂", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Train a BPE tokenizer with byte fallback, as in Llama 2 and Mistral 7B.

    Spaces are SentencePiece's; unknown characters become <0x..> tokens.
    """
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=90, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    # The trainer makes the byte tokens added tokens; in checkpoints they are ordinary vocabulary.
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [entry for entry in description["added_tokens"] if entry["id"] < 3]
    return Tokenizer.from_str(json.dumps(description))


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
