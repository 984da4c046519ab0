"""Changes of weights that fail: the old weights serve on, bit for bit, or no step can be launched."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config
from quantized_checkpoints import quantize
from safetensors.torch import load_file, save_file
from staged_node import StagedNode, generate
from stepper import Running, Stepper
from weight_patches import REQUESTS, Entries, data_of, patched, read_tensors, write_checkpoint, write_patch

import runner
from pdserve.checkpoint.safetensors_header import read_header
from pdserve.checkpoint.weight_digests import checkpoint_digests
from pdserve.config.compatibility import weights_hash
from pdserve.config.config_with_weights import with_reload
from pdserve.errors import CheckpointError, NodeError
from pdserve.protocols import ModelRunner
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange
from runner.base import BaseModelRunner
from runner.loading.patches import CheckedPatch

SAMPLING = SamplingParams(1, temperature=0.0, logprobs=20)
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
LAST = "model.layers.1.mlp.down_proj.weight"


class Serving(NamedTuple):
    """A runner that serves a checkpoint."""

    runner: ModelRunner
    stepper: Stepper
    directory: Path

    def answer(self) -> list[Running]:
        return self.stepper.generate([[(7 * index) % 120 + 3 for index in range(20)]], 3, SAMPLING)

    def assert_no_weights(self) -> None:
        assert not self.runner.has_weights
        with pytest.raises(NodeError, match="no weights"):
            Stepper(self.runner).generate([[1, 2, 3]], 1, SAMPLING)

    def refuse(self, change: WeightChange, reason: str) -> None:
        """Check that a change is refused for a reason, and that the old weights serve on."""
        before = self.answer()
        for call in (self.runner.check_weights, self.runner.change_weights):
            with pytest.raises(CheckpointError, match=reason):
                call(change)
        assert self.runner.has_weights
        assert [sequence.samples for sequence in self.answer()] == [sequence.samples for sequence in before]


def start(directory: Path, **options: Any) -> Serving:
    built = runner.build(node_config(directory, num_blocks=32, **options), lambda stage, fraction: None)
    return Serving(built, Stepper(built), directory)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    started = start(make_checkpoint(tmp_path_factory.mktemp("models") / "model", "llama", num_hidden_layers=2))
    yield started
    started.runner.close()


def indexed(name: str, indices: list[int], dtype: torch.dtype = torch.float32) -> Entries:
    return {f"{name}.indices": torch.tensor(indices), f"{name}.values": torch.zeros(len(indices), dtype=dtype)}


REFUSED: dict[str, tuple[Entries, str]] = {
    "unknown tensor": (indexed("model.layers.9.norm", [0]), "'model.layers.9.norm' is not in the checkpoint"),
    "unknown kind": ({"model.norm.weight": torch.zeros(64)}, "names end in .indices, .values or .rows.NUMBER"),
    "no values": ({f"{NORM}.indices": torch.tensor([0])}, "'model.norm.weight.indices' but no 'model.norm.weight.val"),
    "other lengths": ({f"{NORM}.indices": torch.arange(2), f"{NORM}.values": torch.zeros(3)}, "as many numbers"),
    "indices of floats": ({f"{NORM}.indices": torch.zeros(1), f"{NORM}.values": torch.zeros(1)}, "are I64 or I32"),
    "beyond the end": (indexed(NORM, [3, 64]), "index 64 is outside of the tensor's 64 values"),
    "negative": (indexed(NORM, [-1, 3]), "index -1 is outside"),
    "twice": (indexed(NORM, [3, 3]), "index 3 follows 3; sort them, each once"),
    "not sorted": (indexed(NORM, [3, 1]), "index 1 follows 3"),
    "other dtype": (indexed(NORM, [3], torch.bfloat16), "has dtype BF16, the checkpoint F32"),
    "too many rows": ({f"{EMBEDDING}.rows.127": torch.zeros(2, 64)}, r"of shape \(2, 64\) do not fit"),
    "other rows": ({f"{EMBEDDING}.rows.0": torch.zeros(2, 32)}, r"of shape \(2, 32\) do not fit"),
    "a row twice": (
        {f"{EMBEDDING}.rows.{first}": torch.zeros(3, 64) for first in (0, 2)},
        "that overlap, at 'model.embed_tokens.weight.rows.2'",
    ),
    "rows and indices": ({f"{EMBEDDING}.rows.7": torch.zeros(1, 64)} | indexed(EMBEDDING, [0]), "that overlap"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_entry_changes_nothing(serving: Serving, tmp_path: Path, case: str) -> None:
    """The right entries beside it are not written, either."""
    entries, reason = REFUSED[case]
    right = {f"{LAST}.rows.0": torch.ones(64, 96), "lm_head.weight.rows.3": torch.ones(9, 64)}
    patch = write_patch(tmp_path / "patch.safetensors", right | entries)
    serving.refuse(WeightChange(patch=str(patch)), reason)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def damage_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:20] + b"\xff" + data[21:])


def damage_last_value(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate: "the file is truncated",
    damage_header: "broken safetensors header",
    damage_last_value: "is damaged: its digest is another",
    Path.unlink: "cannot be read",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_patch_changes_nothing(serving: Serving, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    patch = write_patch(tmp_path / "patch.safetensors", {f"{EMBEDDING}.rows.0": torch.zeros(128, 64)})
    damage(patch)
    serving.refuse(WeightChange(patch=str(patch)), DAMAGES[damage])


def test_a_checkpoint_of_another_model_changes_nothing(serving: Serving, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", num_hidden_layers=1)
    serving.refuse(WeightChange(str(other)), "has num_layers 1, this node has 2; only weights of the same model")


def test_a_checkpoint_that_differs_between_hosts_changes_nothing(tmp_path: Path) -> None:
    """Rank 0 has found the weights of the first, this rank finds others."""
    first, second = (make_checkpoint(tmp_path / str(seed), "llama", num_hidden_layers=1, seed=seed) for seed in (1, 2))
    config = msgspec.structs.replace(node_config(first, num_blocks=32), compat_fields={"weights": "checkpoint"})
    built = runner.build(config, lambda stage, fraction: None)
    serving = Serving(built, Stepper(built), first)
    digest = weights_hash(with_reload(config, str(first)).compat_fields)
    serving.refuse(WeightChange(str(second), digest), "has other weights on .* than on the host of rank 0")
    serving.runner.check_weights(WeightChange(str(first), digest))


def test_a_checkpoint_whose_files_are_not_those_digested_changes_nothing(serving: Serving, tmp_path: Path) -> None:
    """A file of the same content may be another one: its digests are not known."""
    other = shutil.copytree(serving.directory, tmp_path / "other")
    digested = checkpoint_digests(other).files
    serving.runner.check_weights(WeightChange(str(other), weight_files=digested))
    shutil.copy(other / "model.safetensors", tmp_path / "new")
    os.replace(tmp_path / "new", other / "model.safetensors")
    serving.refuse(WeightChange(str(other), weight_files=digested), "'model.safetensors' in .* changed between")
    serving.runner.change_weights(WeightChange(str(other), weight_files=checkpoint_digests(other).files))


@pytest.mark.parametrize("damage", [truncate, damage_header, Path.unlink])
def test_a_damaged_checkpoint_changes_nothing(serving: Serving, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    other = shutil.copytree(serving.directory, tmp_path / "other")
    damage(other / "model.safetensors")
    serving.refuse(WeightChange(str(other)), "truncated|header|no .*safetensors")


def test_a_checkpoint_without_a_tensor_changes_nothing(serving: Serving, tmp_path: Path) -> None:
    tensors = read_tensors(serving.directory)
    del tensors[LAST]
    other = write_checkpoint(tmp_path / "other", serving.directory, tensors)
    serving.refuse(WeightChange(str(other)), f"lacks the tensors {LAST}")


def test_a_patch_in_memory_does_not_need_its_file_any_more(serving: Serving, tmp_path: Path) -> None:
    """A larger one does: it is read again, and an error says that it has changed."""
    assert isinstance(serving.runner, BaseModelRunner)
    model = serving.runner._model
    assert model.stored is not None
    entries: Entries = {f"{LAST}.rows.0": torch.ones(64, 96)}
    for keep, name in ((1 << 20, "kept"), (1000, "read again")):
        patch = write_patch(tmp_path / name, entries)
        checked = CheckedPatch(patch, model.stored, keep)
        patch.write_bytes(patch.read_bytes() + b"more")
        if keep > patch.stat().st_size:
            checked.apply(model.weights.groups())
        else:
            with pytest.raises(CheckpointError, match="changed since it was checked"):
                checked.apply(model.weights.groups())
    expected = patched(read_tensors(serving.directory), entries)
    fresh = start(write_checkpoint(tmp_path / "expected", serving.directory, expected))
    assert [sequence.samples for sequence in serving.answer()] == [sequence.samples for sequence in fresh.answer()]
    serving.runner.change_weights(WeightChange(str(serving.directory)))


def damaged_in_the_last_layer(tmp_path: Path) -> tuple[Path, Path]:
    """Return a checkpoint, and one whose last layer names a group of scales that does not exist."""
    plain = make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=2)
    good = quantize(plain, tmp_path / "good", "gptq desc_act")
    damaged = shutil.copytree(good, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.g_idx"][-1] = 1000
    tensors["model.layers.0.mlp.down_proj.qweight"].zero_()
    save_file(tensors, damaged / "model.safetensors")
    return good, damaged


@pytest.mark.slow
def test_a_reload_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """The first stage has loaded its layer when the second one fails: a patch is then refused on both."""
    good, damaged = damaged_in_the_last_layer(tmp_path)
    patch = WeightChange(patch=str(write_patch(tmp_path / "patch", {f"{EMBEDDING}.rows.0": torch.ones(128, 64)})))
    config = node_config(good, pp=2, num_blocks=8, max_num_seqs=4)
    with StagedNode(2) as node:
        expected = generate(node.started(config), config, REQUESTS)
        changes = (WeightChange(str(damaged)), patch, WeightChange(str(good)))
        assert generate(node.started(config, changes), config, REQUESTS) == expected
        assert generate(node.started(config, (patch,)), config, REQUESTS) != expected


def test_a_reload_that_fails_half_way_leaves_no_weights_until_one_succeeds(tmp_path: Path) -> None:
    good, damaged = damaged_in_the_last_layer(tmp_path)
    serving = start(good)
    expected = serving.answer()
    serving.runner.check_weights(WeightChange(str(damaged)))
    with pytest.raises(CheckpointError, match="names groups beyond"):
        serving.runner.change_weights(WeightChange(str(damaged)))
    assert not serving.runner.has_weights
    assert not serving.runner.offered_weights().parts
    with pytest.raises(NodeError, match=r"no weights: .* names groups beyond .*; reload a checkpoint"):
        serving.answer()
    patch = write_patch(tmp_path / "patch", {f"{NORM}.rows.0": torch.ones(64)})
    with pytest.raises(CheckpointError, match="no weights to patch; reload a checkpoint"):
        serving.runner.change_weights(WeightChange(patch=str(patch)))
    serving.runner.change_weights(WeightChange(str(good)))
    again = Serving(serving.runner, Stepper(serving.runner), good)
    again.stepper._next = 100  # the runner has seen the others
    assert [sequence.samples for sequence in again.answer()] == [sequence.samples for sequence in expected]
    assert serving.runner.has_weights


class FailingReads:
    """Replaces os.preadv: reads fail from a given one on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0  # reads so far
        self.first = sys.maxsize  # number of the first read that fails
        self.truncated = False
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, *args: Any) -> int:
        self.count += 1
        if self.count <= self.first:
            return self._preadv(*args)
        if self.truncated:
            return 0
        raise OSError(errno.EIO, "unreadable")


def test_a_reload_that_fails_at_any_read_leaves_no_weights_until_one_succeeds(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", num_hidden_layers=2, seed=1)
    old = serving.answer()
    reads = FailingReads(monkeypatch)
    serving.runner.change_weights(WeightChange(str(other)))
    num_reads = reads.count
    new = serving.answer()
    assert num_reads > 2 * 7, "each tensor of a layer is read"
    for first in range(num_reads):
        serving.runner.change_weights(WeightChange(str(serving.directory)))
        reads.count = 0
        reads.first = first
        reads.truncated = bool(first % 2)
        with pytest.raises(CheckpointError, match="truncated" if first % 2 else "cannot be read"):
            serving.runner.change_weights(WeightChange(str(other)))
        reads.first = sys.maxsize
        serving.assert_no_weights()
        again, expected = ((other, new), (serving.directory, old))[first % 2]
        serving.runner.change_weights(WeightChange(str(again)))
        assert [sequence.samples for sequence in serving.answer()] == [sequence.samples for sequence in expected]
    serving.runner.change_weights(WeightChange(str(serving.directory)))


def write_other_shape(path: Path) -> None:
    tensors = load_file(path)
    save_file(tensors | {LAST: tensors[LAST][:, :-1].contiguous()}, path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGED_LATE: dict[Callable[[Path], None], str] = {
    write_other_shape: "has shape",
    truncate: "truncated",
    append: "header|bytes",
    Path.unlink: "no .*safetensors",
}


@pytest.mark.parametrize("change", CHANGED_LATE)
def test_a_checkpoint_that_changes_after_its_check_leaves_no_weights(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """All ranks have accepted it when another program writes to it."""
    other = shutil.copytree(serving.directory, tmp_path / "other")
    old = serving.answer()
    assert isinstance(serving.runner, BaseModelRunner)
    with monkeypatch.context() as patch:
        patch.setattr(serving.runner._model, "synchronize", lambda: change(other / "model.safetensors"))
        with pytest.raises(CheckpointError, match=CHANGED_LATE[change]):
            serving.runner.change_weights(WeightChange(str(other)))
    serving.assert_no_weights()
    serving.runner.change_weights(WeightChange(str(serving.directory)))
    assert [sequence.samples for sequence in serving.answer()] == [sequence.samples for sequence in old]


def test_quantized_tensors_cannot_be_patched(tmp_path: Path) -> None:
    """The unquantized tensors of such a checkpoint can be patched."""
    good = quantize(make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=1), tmp_path / "fp8", "fp8 blocks")
    serving = start(good)
    name = "model.layers.0.mlp.down_proj.weight"
    patch = write_patch(tmp_path / "patch", {f"{name}.rows.0": torch.zeros(1, 96), f"{NORM}.rows.0": torch.ones(64)})
    serving.refuse(WeightChange(patch=str(patch)), f"tensor '{name}' is quantized; patches change F32, BF16, F16 only")
    before = serving.answer()
    serving.runner.change_weights(WeightChange(patch=str(write_patch(patch, {f"{NORM}.rows.0": torch.ones(64)}))))
    assert [sequence.samples for sequence in serving.answer()] != [sequence.samples for sequence in before]


def test_peers_are_offered_what_is_in_memory(tmp_path: Path) -> None:
    """A patched tensor is that of no checkpoint."""
    directories = [make_checkpoint(tmp_path / str(seed), "qwen3_moe", seed=seed) for seed in range(2)]
    serving = start(directories[0])
    first = serving.runner.offered_weights()
    serving.runner.change_weights(WeightChange(str(directories[1])))
    assert serving.runner.offered_weights() == first
    part = next(part for part in first.parts if ".experts.0.down_proj" in part.name)
    stored = read_tensors(directories[1])[part.name]
    assert part.num_bytes == len(data_of(stored))
    assert read_header(directories[1] / "model.safetensors").keys() >= {part.name for part in first.parts}
    patch = write_patch(tmp_path / "patch", {f"{NORM}.rows.0": torch.ones(64)})
    serving.runner.change_weights(WeightChange(patch=str(patch)))
    assert not serving.runner.offered_weights().parts


@pytest.mark.slow
def test_models_of_the_library_are_reloaded_but_not_patched(tmp_path: Path) -> None:
    first, second = (make_checkpoint(tmp_path / str(seed), "llama", seed=seed, num_hidden_layers=1) for seed in (0, 1))
    serving = start(first, impl="transformers")
    expected = start(second, impl="transformers").answer()
    patch = write_patch(tmp_path / "patch", {f"{NORM}.rows.0": torch.ones(64)})
    serving.refuse(
        WeightChange(patch=str(patch)), "LlamaForCausalLM runs through transformers, whose weights cannot be"
    )
    serving.runner.change_weights(WeightChange(str(second)))
    assert [sequence.samples for sequence in serving.answer()] == [sequence.samples for sequence in expected]


def test_random_weights_are_reloaded_but_not_patched(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    serving = start(directory, load_format="dummy")
    expected = start(directory).answer()
    patch = write_patch(tmp_path / "patch", {f"{NORM}.rows.0": torch.ones(64)})
    serving.refuse(WeightChange(patch=str(patch)), "the weights are random")
    serving.runner.change_weights(WeightChange(str(directory)))
    assert [sequence.samples for sequence in serving.answer()] == [sequence.samples for sequence in expected]
