"""Drafts of the model's own layer are those of a plain loop, and change no answer.

python -m pytest -m slow tests/runner/test_model_drafts.py     a trained model; V2, in Triton's interpreter on CPUs
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import add_mtp, add_predictor, make_checkpoint, make_mimo, node_config, reference_model
from drafted_node import DraftedNode, Request, WatchedNode, run, token_ids_of
from predictor_training import PlainMiMo, plain_acceptance, train
from safetensors.torch import load_file

from engine.speculation.draft_source import ModelDrafts
from pdserve.sampling_params import SamplingParams

VOCAB = 128

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mimo(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def config_of(checkpoint: Path, version: str, **options: Any) -> Any:
    of_v2: dict[str, Any] = {"attention_backend": "triton", "device": DEVICE} if version == "V2" else {}
    return functools.partial(node_config, checkpoint, runner=version, **of_v2, **options)


REQUESTS = [
    (prompt_of(length, length), SamplingParams(most, temperature=temperature, seed=length, ignore_eos=True))
    for length, most, temperature in ((1, 30, 0.0), (15, 20, 0.8), (16, 33, 0.0), (70, 20, 1.0))
]


def check(checkpoint: Path, version: str, requests: Sequence[Request], graphs: bool = False, **options: Any) -> None:
    expected = run(DraftedNode(config_of(checkpoint, "V1")()), requests)
    config = config_of(checkpoint, version, draft_layers=1)(**options)
    node = WatchedNode(msgspec.structs.replace(config, cuda_graphs=graphs), 3)
    answers = run(node, requests)
    assert token_ids_of(answers) == token_ids_of(expected)
    plain = PlainMiMo.read(checkpoint)
    assert len(node.made) > 10
    assert [list(drafts) for _, drafts in node.made] == [plain.drafts(tokens, 3) for tokens, _ in node.made]


def test_drafts_are_those_of_a_plain_loop(checkpoint: Path) -> None:
    """With chunks of prompts beside decodes, and drafts that cross blocks. They are hardly ever right."""
    check(checkpoint, "V1", REQUESTS, max_batch_tokens=40, max_num_seqs=4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # attention of padding is unspecified
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("graphs", [False, True])
def test_v2_drafts_are_those_of_a_plain_loop(checkpoint: Path, graphs: bool) -> None:
    """With the padding of graphs, and without. On a CPU their calls run one by one."""
    requests = [(prompt, SamplingParams(12, seed=3, ignore_eos=True)) for prompt, _ in REQUESTS[1:3]]
    check(checkpoint, "V2", requests, graphs, max_batch_tokens=24, max_num_seqs=3)


def test_answers_stay_the_same_with_few_blocks(checkpoint: Path) -> None:
    """Sequences are preempted, and lack blocks for drafts."""
    expected = run(DraftedNode(config_of(checkpoint, "V1")()), REQUESTS)
    node = DraftedNode(config_of(checkpoint, "V1", draft_layers=1)(num_blocks=9, max_num_seqs=4), 3, ModelDrafts)
    answers = run(node, REQUESTS)
    assert node.scheduler.totals.preemptions > 0
    assert token_ids_of(answers) == token_ids_of(expected)


NEXTN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 2},
    "glm4_moe": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize(
    ("family", "version"),
    [
        ("glm4_moe", "V1"),
        *(pytest.param(family, "V1", marks=pytest.mark.slow) for family in ("deepseek_v3", "glm4_moe_lite")),
        pytest.param("deepseek_v3", "V2", marks=pytest.mark.slow),
    ],
)
def test_a_layer_behind_the_model_makes_drafts(family: str, version: str, tmp_path: Path) -> None:
    """The layer predicts the token that the model predicts at its position, which is the newest one."""
    fields = NEXTN[family]
    path = add_predictor(make_checkpoint(tmp_path / "m", family, **fields), family, **fields)
    requests = [(prompt_of(length, length), SamplingParams(8, temperature=0.0, ignore_eos=True)) for length in (15, 40)]
    expected = run(DraftedNode(config_of(path, "V1")()), requests)
    node = WatchedNode(config_of(path, version, draft_layers=1)(), 2)
    answers = run(node, requests)
    assert token_ids_of(answers) == token_ids_of(expected)
    assert len(node.made) > 6
    assert all(drafts == (tokens[-1],) * 2 for tokens, drafts in node.made)


class PlainQwen:
    """Drafts by the library's layers, without a cache."""

    def __init__(self, path: Path, predictor: Path) -> None:
        self._model = reference_model(path)
        self._predictor = reference_model(predictor)
        weights = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        self._fc = weights["mtp.fc.weight"]
        self._scales = [1.0 + weights[f"mtp.pre_fc_norm_{name}.weight"] for name in ("embedding", "hidden")]

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> tuple[int, ...]:
        hidden = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        ids = tokens[1:]
        for _ in range(count):
            inputs = self._model.model.embed_tokens(torch.tensor(ids)), hidden
            normed = [self._norm(rows, scale) for rows, scale in zip(inputs, self._scales, strict=True)]
            start = torch.cat(normed, dim=1) @ self._fc.T
            result = self._predictor.model(inputs_embeds=start[None]).last_hidden_state[0]
            ids = [*ids, int(self._model.lm_head(result[-1]).argmax())]
            hidden = torch.cat((hidden, result[-1:]))
        return tuple(ids[-count:])

    @staticmethod
    def _norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


@pytest.mark.parametrize(
    ("family", "version"),
    [
        ("qwen3_5_text", "V1"),
        pytest.param("qwen3_next", "V1", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe_text", "V1", marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", "V2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # attention of padding is unspecified
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_drafts_beside_recurrent_layers_are_those_of_a_plain_loop(family: str, version: str, tmp_path: Path) -> None:
    """Answers equal answers without drafts; drafts are hardly ever right."""
    path = make_checkpoint(tmp_path / "m", family)
    plain = PlainQwen(path, add_mtp(path, family))
    requests = [
        (prompt_of(length, length), SamplingParams(12, temperature=0.8, seed=length, ignore_eos=True))
        for length in (3, 22)
    ]
    expected = run(DraftedNode(config_of(path, "V1")()), requests)
    config = config_of(path, version, draft_layers=1)(max_batch_tokens=24, max_num_seqs=3)
    node = WatchedNode(msgspec.structs.replace(config, cuda_graphs=version == "V2"), 3)
    assert token_ids_of(run(node, requests)) == token_ids_of(expected)
    assert len(node.made) > 15
    assert [drafts for _, drafts in node.made] == [plain.drafts(tokens, 3) for tokens, _ in node.made]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "glm4_moe_lite", "qwen3_5_text"])
def test_drafts_of_cuda_graphs_are_those_without_graphs(family: str, count: int, tmp_path: Path) -> None:
    """In float32, with rows of padding (17), prompts that join, and answers that end at different steps.

    Products of padded sizes may round otherwise, so that a draft of two equally likely ones may differ.
    """
    if family == "mimo":
        path = make_mimo(tmp_path / "m", num_hidden_layers=2)
    elif family not in NEXTN:
        path = make_checkpoint(tmp_path / "m", family, predicts=True)
    else:
        fields = NEXTN[family]
        path = add_predictor(make_checkpoint(tmp_path / "m", family, **fields), family, **fields)
    requests = [
        (prompt_of(15 + rid, rid), SamplingParams(30 + rid, temperature=0.7, seed=rid, ignore_eos=True))
        for rid in range(count)
    ]
    config = config_of(path, "V2", draft_layers=1)(max_num_seqs=20, state_slots=64)
    made: list[dict[tuple[int, ...], tuple[int, ...]]] = []  # drafts behind tokens
    answers: list[dict[tuple[int, int], list[int]]] = []
    for graphs in (True, False):
        node = WatchedNode(msgspec.structs.replace(config, cuda_graphs=graphs), 3)
        answers.append(token_ids_of(run(node, requests)))
        made.append({tuple(tokens): drafts for tokens, drafts in node.made})
    assert answers[0] == answers[1] == token_ids_of(run(DraftedNode(config_of(path, "V2")()), requests))
    both = made[0].keys() & made[1].keys()
    assert len(both) > 20 * count
    assert sum(made[0][tokens] == made[1][tokens] for tokens in both) >= 0.99 * len(both)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    train(directory, steps=120)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_acceptance_is_that_of_a_plain_loop(trained: Path) -> None:
    plain = PlainMiMo.read(trained)
    requests = [
        (prompt, SamplingParams(60, temperature=0.6, seed=index, ignore_eos=True))
        for index, prompt in enumerate(held_out_prompts(trained, 12))
    ]
    node = DraftedNode(config_of(trained, "V1", draft_layers=1)(), 1, ModelDrafts)
    answers = run(node, requests)
    loops = [plain_acceptance(plain, prompt, answers[rid, 0].token_ids) for rid, (prompt, _) in enumerate(requests)]
    made, accepted = (sum(counts) for counts in zip(*loops, strict=True))
    assert accepted > 0.1 * made, "the model has learned too little to tell"
    assert node.num_accepted / node.num_drafts == pytest.approx(accepted / made, abs=0.01)


def held_out_prompts(directory: Path, count: int) -> list[list[int]]:
    from training.batches import Generator

    batch = Generator(directory / "tokenizer.json", 990_001, evaluating=True).batch([(count, 320)])
    return [row[:64].tolist() for row in batch.tokens.reshape(count, 320)]
