"""Prefill nodes that pool: their vectors equal those of transformers' own forward, whatever is in a step.

python -m pytest -m slow tests/nodes/test_pooling_nodes.py      more kinds
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers
from checkpoints import make_checkpoint
from fleet import Fleet, NodeProcess
from machine import patience
from numpy.typing import NDArray

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import pack_tokens

FLAGS = (
    *("--block-size", "16", "--kv-cache-memory", "1MiB", "--max-model-len", "512"),
    *("--max-batch-tokens", "64", "--max-num-seqs", "8"),
)
NO = 7  # id of this token in the reranker's tokenizer.json
YES = 9  # id in the same file
LENGTHS = (1, 5, 8, 16, 63, 64, 65, 200, 511)


def write_embedder(directory: Path, mode: str, family: str = "qwen3") -> Path:
    """Write a checkpoint as sentence-transformers saves it: a body without head, and the modules behind it."""
    make_checkpoint(directory, family)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.model.save_pretrained(directory)
    modules = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(zip(modules, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (directory / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))
    return directory


def write_classifier(directory: Path, num_labels: int) -> Path:
    library: Any = transformers
    config = library.Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        num_labels=num_labels,
    )
    torch.manual_seed(num_labels)
    model: Any = library.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
    model.save_pretrained(directory)
    return directory


def write_reranker(directory: Path) -> Path:
    make_checkpoint(directory, "qwen3")
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": NO, "yes": YES}}}))
    return directory


def hidden_states(directory: Path, prompt: Sequence[int]) -> torch.Tensor:
    model: Any = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    return states


def expected_vector(kind: str, directory: Path, prompt: Sequence[int]) -> NDArray[np.float32]:
    library: Any = transformers
    if kind in ("last", "last, library", "mean"):
        states = hidden_states(directory, prompt)
        pooled = states.mean(0) if kind == "mean" else states[-1]
        vector = torch.nn.functional.normalize(pooled, dim=0)
    elif kind == "reranker":
        library_model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model = library_model.eval()
        with torch.inference_mode():
            vector = model(input_ids=torch.tensor([prompt])).logits[0, -1, [NO, YES]].softmax(0)[1:]
    else:
        classifier: Any = library.AutoModelForSequenceClassification
        classifier = classifier.from_pretrained(directory).eval()
        with torch.inference_mode():
            scores = classifier(input_ids=torch.tensor([prompt])).logits[0]
        vector = scores.sigmoid() if len(scores) == 1 else scores.softmax(0)
    return vector.numpy()


class Pooler:
    """A node of one kind, and calls to it."""

    def __init__(self, kind: str, directory: Path, node: NodeProcess) -> None:
        self.kind = kind
        self.directory = directory
        self.node = node

    def pool(self, prompts: Sequence[Sequence[int]], **fields: Any) -> pb.PoolReply:
        with grpc.insecure_channel(self.node.address) as channel:
            message = pb.PoolRequest(prompts=[pack_tokens(prompt) for prompt in prompts], **fields)
            return pb_grpc.PoolingNodeStub(channel).Pool(message, timeout=patience(60))

    def check(self, prompts: Sequence[Sequence[int]], reply: pb.PoolReply) -> None:
        assert len(reply.vectors) == len(prompts)
        for prompt, vector in zip(prompts, reply.vectors, strict=True):
            expected = expected_vector(self.kind, self.directory, prompt)
            assert np.abs(np.frombuffer(vector, "<f4") - expected).max() < 1e-4, f"{len(prompt)} tokens"


def prompts_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 128) for _ in range(length)] for length in lengths]


KINDS = ("last", "last, library", "mean", "reranker", "classifier", "3 labels")
SLOW = ("last, library", "classifier", "3 labels")
CPU = [pytest.param((kind, "cpu"), marks=[pytest.mark.slow] * (kind in SLOW), id=kind) for kind in KINDS]
GPU = [pytest.param((kind, "cuda"), marks=pytest.mark.gpu, id=f"{kind} on a GPU") for kind in KINDS]


@pytest.fixture(scope="module", params=[*CPU, *GPU])
def pooler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooler]:
    kind, device = request.param
    directory = tmp_path_factory.mktemp("pooling") / "model"
    flags: tuple[str, ...] = (*FLAGS, "--device", device)
    match kind:
        case "mean" | "last":
            write_embedder(directory, {"last": "lasttoken", "mean": "mean_tokens"}[kind])
        case "last, library":
            write_embedder(directory, "lasttoken")
            flags = (*flags, "--model-impl", "transformers")
        case "reranker":
            write_reranker(directory)
            flags = (*flags, "--task", "classify")
        case _:
            write_classifier(directory, 1 if kind == "classifier" else 3)
    with Fleet() as fleet:
        node = fleet.start_prefill(directory, flags)
        fleet.wait_ready()
        yield Pooler(kind, directory, node)


def test_vectors_equal_the_librarys(pooler: Pooler) -> None:
    prompts = prompts_of(LENGTHS, seed=1)
    pooler.check(prompts, pooler.pool(prompts))
    described = pooler.node.describe()
    assert described.task == ("classify" if pooler.kind in ("reranker", "classifier", "3 labels") else "embed")
    assert described.runner == "V1"
    assert any("runner type" in reason for reason in described.runner_reasons)


def test_simultaneous_calls_share_steps_and_cached_prefixes(pooler: Pooler) -> None:
    common = prompts_of([100], seed=2)[0]
    batches = [[common + tail for tail in prompts_of([3, 40, 90], seed)] for seed in range(3, 9)]
    with ThreadPoolExecutor(len(batches)) as threads:
        replies = list(threads.map(pooler.pool, batches))
    for prompts, reply in zip(batches, replies, strict=True):
        pooler.check(prompts, reply)
    again = pooler.pool(batches[0])
    pooler.check(batches[0], again)
    assert (sum(again.cached_tokens) > 0) == (pooler.kind != "mean"), "a mean needs all tokens"
    pooler.node.wait_idle()


def test_cancelled_calls_free_their_blocks(pooler: Pooler) -> None:
    with grpc.insecure_channel(pooler.node.address) as channel:
        message = pb.PoolRequest(prompts=[pack_tokens(prompt) for prompt in prompts_of([500] * 30, seed=10)])
        calls: list[Any] = [
            pb_grpc.PoolingNodeStub(channel).Pool.future(message, timeout=patience(60)) for _ in range(4)
        ]
        for call in calls:
            call.cancel()
    pooler.node.wait_idle()
    prompts = prompts_of([50], seed=11)
    pooler.check(prompts, pooler.pool(prompts))


@pytest.mark.parametrize(
    ("prompts", "fields", "words"),
    [
        ([], {}, "0 prompts"),
        ([[]], {}, "0 tokens"),
        ([[5] * 513], {}, "513"),
        ([[5], [128]], {}, "outside the vocabulary"),
        ([[5]], {"dimensions": 65}, "at most 64"),
    ],
)
def test_bad_calls_are_refused_in_words(pooler: Pooler, prompts: list[list[int]], fields: Any, words: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        pooler.pool(prompts, **fields)
    error: Any = raised.value
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details() or (fields and "dimensions" in error.details())


def test_shortened_embeddings_are_normalized_again(pooler: Pooler) -> None:
    if pooler.node.describe().task != "embed":
        return
    prompts = prompts_of([20, 30], seed=12)
    whole = pooler.pool(prompts)
    short = pooler.pool(prompts, dimensions=16)
    for vector, cut in zip(whole.vectors, short.vectors, strict=True):
        expected = np.frombuffer(vector, "<f4")[:16]
        assert np.allclose(np.frombuffer(cut, "<f4"), expected / np.linalg.norm(expected), atol=1e-6)


def test_decode_nodes_refuse_a_model_that_only_embeds(tmp_path: Path) -> None:
    directory = write_embedder(tmp_path / "model", "lasttoken")
    with Fleet() as fleet, pytest.raises(Exception, match="prefill nodes alone"):
        fleet.start_decode(directory, FLAGS)
