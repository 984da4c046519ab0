"""Vectors and scores of pdserve equal those of sentence-transformers."""

from __future__ import annotations

import os
import random
import unittest
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import openai
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = os.environ["PDSERVE_MODEL"]
DIRECTORY = os.environ["PDSERVE_MODEL_DIR"]
CPU: dict[str, Any] = {"device": "cpu", "model_kwargs": {"dtype": "float32"}}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "naïve",
    "café",
    "日本語",
    "🙂",
    "tokens",
    "per",
    "second",
    "1234",
    "über",
    "def",
    "main",
    "return",
    "déjà",
    "vu",
]
#: Prompt prefix and suffix from https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
PREFIX = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

client = openai.OpenAI(base_url=os.environ["PDSERVE_URL"], api_key="none", max_retries=0, timeout=240)


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.choice((1, 3, 12, 60)))) for _ in range(count)]


class Embeddings(unittest.TestCase):
    @staticmethod
    @cache
    def model() -> SentenceTransformer:
        return SentenceTransformer(DIRECTORY, **CPU)

    def check(self, given: Any, expected: Sequence[str], **fields: Any) -> None:
        reply = client.embeddings.create(model=MODEL, input=given, **fields)
        vectors = self.model().encode(list(expected), batch_size=16, show_progress_bar=False)
        difference = np.abs(np.array([embedding.embedding for embedding in reply.data]) - vectors).max()
        self.assertLess(float(difference), 1e-4)

    def test_a_thousand_texts_in_mixed_batches(self) -> None:
        given = texts(1000, seed=1)
        start = 0
        for size in (1, 2, 29, 300, 668):
            part = given[start : start + size]
            self.check(part, part)  # the SDK asks for base64
            start += size
        self.assertEqual(start, 1000)

    def test_floats_and_token_ids(self) -> None:
        given = texts(20, seed=2)
        self.check(given, given, encoding_format="float")
        self.check([self.model().tokenizer(text)["input_ids"] for text in given], given, encoding_format="float")

    def test_rankings_are_those_of_cosine_similarities(self) -> None:
        query, *documents = texts(40, seed=3)
        model = self.model()
        check_ranking(self, query, documents, model.similarity(model.encode([query]), model.encode(documents))[0])


class Classifier(unittest.TestCase):
    def test_rankings_are_those_of_a_cross_encoder(self) -> None:
        query, *documents = texts(40, seed=4)
        scores = CrossEncoder(DIRECTORY, **CPU).predict([(query, document) for document in documents])
        check_ranking(self, query, documents, scores)


class RerankerWithTemplate(unittest.TestCase):
    def test_rankings_are_those_of_a_cross_encoder_with_the_template(self) -> None:
        query, *documents = texts(40, seed=5)
        model = CrossEncoder(DIRECTORY, **CPU)
        scores = model.predict([(query, document) for document in documents], activation_fn=torch.nn.Sigmoid())
        check_ranking(self, query, documents, scores)


class OriginalReranker(unittest.TestCase):
    def test_rankings_are_those_of_the_model_card(self) -> None:
        query, *documents = texts(20, seed=6)
        tokenizer: Any = AutoTokenizer.from_pretrained(DIRECTORY)
        model: Any = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
        no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
        scores = []
        for document in documents:
            pair = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
            ids = [token for part in (PREFIX, pair, SUFFIX) for token in tokenizer(part)["input_ids"]]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1, [no, yes]]
            scores.append(float(logits.softmax(-1)[1]))
        check_ranking(self, query, documents, scores)


def check_ranking(case: unittest.TestCase, query: str, documents: Sequence[str], scores: Any) -> None:
    expected = [float(score) for score in scores]
    ranking: Any = client.post(
        "/rerank", body={"model": MODEL, "query": query, "documents": documents, "top_n": 15}, cast_to=object
    )
    results = ranking["results"]
    case.assertEqual(len(results), 15)
    for result, best in zip(results, sorted(expected, reverse=True), strict=False):
        case.assertAlmostEqual(result["relevance_score"], best, delta=1e-4)
        case.assertAlmostEqual(expected[result["index"]], best, delta=1e-4)
        case.assertEqual(result["document"]["text"], documents[result["index"]])


if __name__ == "__main__":
    unittest.main()
