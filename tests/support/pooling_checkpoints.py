"""Random checkpoints of embedding models and rerankers, in the format that sentence-transformers reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import small_tokenizers
import torch
import transformers
from checkpoints import make_checkpoint
from tokenizers import AddedToken, Tokenizer, processors

_END = "<|endoftext|>"
_KIND = "sentence_transformers.models."
_CAUSAL_MODEL = "sentence_transformers.base.modules.transformer.Transformer"
_LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
# Like the templates of rerankers in the format of sentence-transformers 6.
_PAIR_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% if m.role == 'query' %}<|im_start|>user\n{{ m.content }}{% endif %}"
    "{% if m.role == 'document' %} | {{ m.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)


def make_embedder(path: Path, **overrides: Any) -> Path:
    """Like Qwen3-Embedding: a text ends with a token whose last hidden state is its embedding, normalised."""
    backend = _tokenizer()
    token = (_END, backend.token_to_id(_END))
    ending = processors.TemplateProcessing(single=f"$A {_END}", pair=f"$A $B {_END}", special_tokens=[token])
    backend.post_processor = processors.Sequence([backend.post_processor, ending])
    _write_model(path, backend, **overrides)
    size = transformers.AutoConfig.from_pretrained(path).hidden_size
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    _write_modules(path, [(_KIND + kind, place) for kind, place in paths.items()])
    _write(path / "1_Pooling" / "config.json", {"word_embedding_dimension": size, "pooling_mode_lasttoken": True})
    (path / "2_Normalize").mkdir()
    return path


def make_reranker(path: Path, template: bool, **overrides: Any) -> Path:
    """Like Qwen3-Reranker: a causal model whose next token is "yes" or "no". ``template``: it has one for pairs."""
    backend = _tokenizer()
    _write_model(path, backend, **({"chat_template": _PAIR_TEMPLATE} if template else {}), **overrides)
    if template:
        modality = {"method": "forward", "method_output_name": "logits"}
        config = {
            "transformer_task": "text-generation",
            "modality_config": {"text": modality, "message": {**modality, "format": "flat"}},
            "module_output_name": "causal_logits",
        }
        _write(path / "sentence_bert_config.json", config)
        _write_modules(path, [(_CAUSAL_MODEL, ""), (_LOGIT_SCORE, "1_Score")])
        yes, no = (backend.token_to_id(word) for word in ("yes", "no"))
        _write(path / "1_Score" / "config.json", {"true_token_id": yes, "false_token_id": no})
        _write(path / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    return path


def make_classifier(path: Path, **overrides: Any) -> Path:
    """Like a Qwen3-Reranker that was converted: a linear layer scores the last token of a pair."""
    whole = make_reranker(path.with_name(f"{path.name}-causal"), template=False, **overrides)
    config = transformers.AutoConfig.from_pretrained(whole)
    config.num_labels = 1
    config.pad_token_id = config.vocab_size - 1
    library: Any = transformers
    model = library.AutoModelForSequenceClassification.from_config(config)
    model.model.load_state_dict(transformers.AutoModel.from_pretrained(whole).state_dict())
    torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(whole / name, path)
    return path


def _tokenizer() -> Tokenizer:
    """Return a tokenizer whose last token is the end of a text."""
    backend = small_tokenizers.byte_level([*small_tokenizers.CORPUS, *["yes", "no"] * 100])
    backend.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    return backend


def _write_model(path: Path, backend: Tokenizer, chat_template: str | None = None, **overrides: Any) -> None:
    template = {} if chat_template is None else {"chat_template": chat_template}
    small_tokenizers.write(path, backend, eos_token=_END, pad_token=_END, padding_side="left", **template)
    make_checkpoint(path, "qwen3", vocab_size=backend.get_vocab_size(), **overrides)


def _write_modules(path: Path, modules: list[tuple[str, str]]) -> None:
    entries = [{"idx": i, "name": str(i), "path": place, "type": kind} for i, (kind, place) in enumerate(modules)]
    _write(path / "modules.json", entries)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
