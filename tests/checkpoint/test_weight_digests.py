"""Digests of weights: they cover every byte, name the tensor group, and a cache never yields those of other bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import change_weight, make_checkpoint
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st

from pdserve.checkpoint import digest_cache, weight_digests
from pdserve.checkpoint.digest_cache import NAME
from pdserve.checkpoint.hub import resolve_model
from pdserve.checkpoint.safetensors_header import read_header
from pdserve.checkpoint.weight_digests import Stopped, checkpoint_digests, fold_digests, group_of, known_digests
from pdserve.errors import CheckpointError

SETTLED = 0.03  # seconds; digests of a file that has just changed are not cached


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("weights") / "model", "llama")


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model", ignore=shutil.ignore_patterns(NAME)))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose tensors were read, not taken from the cache."""
    files: list[Path] = []
    digest = weight_digests._digest_tensors

    def counted(path: Path, *args: object) -> object:
        files.append(path)
        return digest(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_digests, "_digest_tensors", counted)
    return files


def group_digests(checkpoint: Path, stop: threading.Event | None = None) -> dict[str, str]:
    return fold_digests(checkpoint_digests(checkpoint, stop).tensors)


def settled(checkpoint: Path) -> dict[str, str]:
    time.sleep(SETTLED)
    return group_digests(checkpoint)


def without_cache(checkpoint: Path) -> dict[str, str]:
    """Return the digests of a fresh copy."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(shutil.copytree(checkpoint, Path(directory, "copy"), ignore=shutil.ignore_patterns(NAME)))
        return group_digests(copy)


def test_a_changed_element_changes_the_digest_of_its_group_alone(checkpoint: Path) -> None:
    before = group_digests(checkpoint)
    change_weight(checkpoint, "model.layers.0.self_attn.k_proj.weight")
    after = group_digests(checkpoint)
    assert {group for group in before if before[group] != after[group]} == {"layers.0.self_attn"}
    assert before.keys() == after.keys() > {"embed_tokens", "lm_head", "norm", "layers.2.mlp"}


def test_every_byte_of_every_tensor_counts(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    tensors = read_header(path)
    before = group_digests(checkpoint)
    for name, tensor in tensors.items():
        for at in (tensor.begin, tensor.end - 1):
            with path.open("r+b") as file:
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1]))
            after = group_digests(checkpoint)
            assert {group for group in before if before[group] != after[group]} == {group_of(name)}
            before = after


def test_digests_do_not_depend_on_the_files(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "whole", "llama", seed=1)
    shards = make_checkpoint(tmp_path / "shards", "llama", seed=1, max_shard_size="60KB")
    other = make_checkpoint(tmp_path / "other", "llama", seed=2)
    assert group_digests(whole) == group_digests(shards)
    assert group_digests(whole).items().isdisjoint(group_digests(other).items())


@pytest.mark.parametrize(
    ("tensor", "group"),
    [
        ("model.layers.11.mlp.experts.127.up_proj.weight", "layers.11.mlp"),
        ("model.layers.0.self_attn.q_norm.weight", "layers.0.self_attn"),
        ("model.layers.0.input_layernorm.weight", "layers.0.input_layernorm"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("model.norm.weight", "norm"),
    ],
)
def test_groups_fold_experts_and_parameters(tensor: str, group: str) -> None:
    assert group_of(tensor) == group


def test_the_second_start_reads_no_tensor(checkpoint: Path, read: list[Path]) -> None:
    first = settled(checkpoint)
    assert (checkpoint / NAME).exists()
    assert group_digests(checkpoint) == first
    assert len(read) == 1


def test_one_changed_file_of_many_is_read_again(tmp_path: Path, read: list[Path]) -> None:
    shards = make_checkpoint(tmp_path / "shards", "llama", max_shard_size="60KB")
    settled(shards)
    count = len(read)
    assert count > 3
    read[-1].touch()
    group_digests(shards)
    assert read[count:] == [read[count - 1]]


def forge_times(path: Path) -> None:
    """Change a byte of the last tensor and set the times back, as a copy with ``cp -p`` does."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path) -> None:
    (other := path.with_suffix(".new")).write_bytes(path.read_bytes()[:-1] + b"\1")
    shutil.copystat(path, other)
    other.replace(path)


def add_zeros(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))


def spoil_cache(path: Path) -> None:
    """Change a digest in the cache, so that it is still valid JSON."""
    cache = path.parent / NAME
    if cache.exists():
        line, _, payload = cache.read_bytes().partition(b"\n")
        content = json.loads(payload)
        for file in content["files"].values():
            file["tensors"] = dict.fromkeys(file["tensors"], "0" * 32)
        cache.write_bytes(line + b"\n" + json.dumps(content).encode())


def replace_cache_by_pipe(path: Path) -> None:
    (path.parent / NAME).unlink()
    os.mkfifo(path.parent / NAME)


CHANGES: dict[str, Callable[[Path], object]] = {
    "byte with the old time": forge_times,
    "replaced with the old times": replace,
    "zeros": add_zeros,
    "touched": lambda path: path.touch(),
    "nothing": lambda path: None,
    "cache truncated": lambda path: os.truncate(path.parent / NAME, 100),
    "cache empty": lambda path: (path.parent / NAME).write_bytes(b""),
    "cache changed": spoil_cache,
    "cache of another version": lambda path: (path.parent / NAME).write_bytes(b"{}"),
    "cache is a pipe": replace_cache_by_pipe,
    "cache gone": lambda path: (path.parent / NAME).unlink(),
}


@examples(25)
@given(changes=st.lists(st.sampled_from(list(CHANGES)), max_size=5))
def test_digests_are_always_those_of_the_bytes(original: Path, changes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(shutil.copytree(original, Path(directory, "model")))
        for change in changes:
            settled(checkpoint)
            CHANGES[change](checkpoint / "model.safetensors")
            assert group_digests(checkpoint) == without_cache(checkpoint), change


@examples(60)
@given(data=st.data())
def test_a_damaged_cache_is_never_used(original: Path, data: st.DataObject) -> None:
    expected = settled(original)
    cache = bytearray((original / NAME).read_bytes())
    at = data.draw(st.integers(0, len(cache) - 1))
    if data.draw(st.booleans()):
        cache[at] ^= data.draw(st.integers(1, 255))
    else:
        del cache[at:]
    (original / NAME).write_bytes(cache)
    assert group_digests(original) == expected


def test_a_model_that_is_not_writable_is_cached_for_the_user(
    checkpoint: Path, cache_home: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / NAME).mkdir()  # no file can replace it, even as root
    first = settled(checkpoint)
    assert len(list((cache_home / "pdserve").iterdir())) == 1
    assert group_digests(checkpoint) == first
    assert len(read) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert group_digests(checkpoint) == first  # computed, and cached nowhere
    assert len(read) == 2


def test_a_stale_cache_beside_a_read_only_model_does_not_hide_the_users(
    checkpoint: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(checkpoint)
    change_weight(checkpoint, "model.norm.weight")
    monkeypatch.setattr(digest_cache, "_write", only_for_the_user(digest_cache._write))
    first = settled(checkpoint)
    assert group_digests(checkpoint) == first
    assert len(read) == 2


def only_for_the_user(write: Callable[[Path, bytes], None]) -> Callable[[Path, bytes], None]:
    def written(path: Path, data: bytes) -> None:
        if path.name == NAME:
            raise PermissionError(errno.EROFS, "Read-only file system")
        write(path, data)

    return written


def test_links_of_the_hub_cache_resolve_to_blobs(checkpoint: Path, tmp_path: Path, read: list[Path]) -> None:
    blobs = [tmp_path / "blob0", tmp_path / "blob1"]
    (checkpoint / "model.safetensors").rename(blobs[0])
    shutil.copy(*blobs)
    with blobs[1].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    (link := checkpoint / "model.safetensors").symlink_to(blobs[0])
    first = settled(checkpoint)
    assert group_digests(checkpoint) == first
    assert len(read) == 1
    link.unlink()
    link.symlink_to(blobs[1])
    assert group_digests(checkpoint) != first


def test_digests_stop_soon_when_they_are_not_needed(checkpoint: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        group_digests(checkpoint, stop)
    assert not (checkpoint / NAME).exists()


def test_a_file_that_changes_while_it_is_read_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = weight_digests._digest_tensors

    def touched(path: Path, *args: object) -> object:
        digests = digest(path, *args)  # type: ignore[arg-type]
        os.utime(path, (1, 1))
        return digests

    monkeypatch.setattr(weight_digests, "_digest_tensors", touched)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        group_digests(checkpoint)


@pytest.mark.parametrize("name", ["loop", "x" * 5000, "x/" * 3000], ids=["loop", "long name", "long path"])
def test_a_directory_that_cannot_be_read_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for use in (checkpoint_digests, known_digests, lambda path: resolve_model(str(path))):
        with pytest.raises(CheckpointError) as caught:
            use(tmp_path / name)
        assert len(str(caught.value)) < 500
