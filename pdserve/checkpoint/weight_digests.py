"""Digests of a checkpoint's weights: every byte of every tensor, folded into one digest per tensor group.

    tensor  model.layers.0.mlp.experts.7.up_proj.weight      XXH3 of dtype, shape and bytes, 128 bits
    group   layers.0.mlp                                      SHA-256 of the names and digests of its tensors

They depend neither on the ranks of a node nor on how tensors are spread over files. A host of a node on several hosts
digests the layers of its pipeline stages, and all tensors outside the layers. Threads read the files while the
engine loads them, so the page cache serves both; ``digest_cache.py`` keeps the result for the next start. XXH3 takes a
fifth of the CPU time of SHA-256, which a node with few cores would lose while it loads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import xxhash

from pdserve.checkpoint.digest_cache import DigestCache, TensorDigests
from pdserve.checkpoint.file_states import check_unchanged, open_settled, state_of
from pdserve.checkpoint.files import open_regular
from pdserve.checkpoint.safetensors_header import Tensor, header_of
from pdserve.checkpoint.weight_files import weight_files
from pdserve.errors import CheckpointError
from pdserve.host.cpus import usable_cpus
from pdserve.weights.change import FileStates

_log = logging.getLogger(__name__)

_MAX_THREADS = 8
_CHUNK = 1 << 20  # bytes; a buffer that stays in a core's cache
_BATCH = 8 << 20  # bytes of a job
_MAX_BATCH = 1024  # tensors of a job
_GROUP_DIGITS = 16
_LAYER = re.compile(r"(?:^|\.)(layers\.(\d+)\.[^.]+)")


class Stopped(Exception):
    """The digests are not needed any more."""


class Digests(NamedTuple):
    """The digests of all tensors, and the states of the files in which they were taken."""

    tensors: TensorDigests
    files: FileStates


def checkpoint_digests(
    model_dir: Path, stop: threading.Event | None = None, has_layer: Callable[[int], bool] = lambda layer: True
) -> Digests:
    """Return the digests of a checkpoint's tensors; read those that are not cached.

    Tensors of a layer are left out unless ``has_layer``; the states are those of all files.
    Raises CheckpointError; Stopped soon after ``stop`` was set.
    """
    started = time.monotonic()
    stop = stop or threading.Event()
    cache = DigestCache(model_dir)
    result = Digests({}, {})
    num_read = 0
    with ThreadPoolExecutor(min(_MAX_THREADS, usable_cpus()), "digest") as pool:
        for path in weight_files(model_dir):
            with open_settled(path) as (fd, state):
                wanted = {name: tensor for name, tensor in header_of(path, fd).items() if _is_in(name, has_layer)}
                cached = cache.get(path.name, state)
                unknown = {name: tensor for name, tensor in wanted.items() if name not in cached}
                if unknown:
                    cached |= _digest_tensors(path, fd, unknown, pool, stop)
                    check_unchanged(path, state)
                    cache.put(path.name, state, cached)
                    num_read += sum(tensor.end - tensor.begin for tensor in unknown.values())
            result.tensors.update((name, cached[name]) for name in wanted)
            result.files[path.name] = state
    cache.save()
    _log.debug("weight digests: read %.2f GiB in %.2f s", num_read / 2**30, time.monotonic() - started)
    return result


def known_digests(model_dir: Path) -> Digests | None:
    """Return the digests of all tensors if they are cached for the files as they are now. Reads no weights.

    Raises CheckpointError.
    """
    cache = DigestCache(model_dir)
    result = Digests({}, {})
    for path in weight_files(model_dir):
        with open_regular(path) as (fd, status):
            state = state_of(status)
            names = header_of(path, fd).keys()
        digests = cache.get(path.name, state)
        if digests.keys() != names:
            return None
        result.tensors.update(digests)
        result.files[path.name] = state
    return result


def fold_digests(tensors: TensorDigests) -> dict[str, str]:
    """Return 16 hex digits for each tensor group of a checkpoint, such as "layers.0.self_attn"."""
    groups: defaultdict[str, hashlib._Hash] = defaultdict(hashlib.sha256)
    for name in sorted(tensors):
        groups[group_of(name)].update(f"{name}\n{tensors[name]}\n".encode())
    return {group: digest.hexdigest()[:_GROUP_DIGITS] for group, digest in groups.items()}


def tensor_digest(dtype: str, shape: tuple[int, ...], pieces: Iterable[bytes | memoryview]) -> str:
    """Return the digest of a tensor, given its dtype's name in safetensors and its bytes in consecutive pieces."""
    digest = _begin(dtype, shape)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def group_of(tensor: str) -> str:
    """Return the group of a tensor: its layer and module, all experts together; else the module outside the layers."""
    if match := _LAYER.search(tensor):
        return match[1]
    return tensor.removeprefix("model.").partition(".")[0]


def _is_in(tensor: str, has_layer: Callable[[int], bool]) -> bool:
    match = _LAYER.search(tensor)
    return match is None or has_layer(int(match[2]))


def _digest_tensors(
    path: Path, fd: int, tensors: Mapping[str, Tensor], pool: ThreadPoolExecutor, stop: threading.Event
) -> TensorDigests:
    jobs = [pool.submit(_digest_batch, path, fd, batch, stop) for batch in _batches(tensors)]
    try:
        return {name: digest for job in jobs for name, digest in job.result().items()}
    except BaseException:
        stop.set()
        wait(jobs)  # the jobs use fd
        raise


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield tensors in the order of their bytes, small ones together: a job costs more than a small tensor."""
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        batch[name] = tensor
        size += tensor.end - tensor.begin
        if size >= _BATCH or len(batch) == _MAX_BATCH:
            yield batch
            batch = {}
            size = 0
    yield batch


def _digest_batch(path: Path, fd: int, tensors: Mapping[str, Tensor], stop: threading.Event) -> TensorDigests:
    buffer = memoryview(bytearray(_CHUNK))
    return {name: _digest_tensor(path, fd, tensor, buffer, stop) for name, tensor in tensors.items()}


def _digest_tensor(path: Path, fd: int, tensor: Tensor, buffer: memoryview, stop: threading.Event) -> str:
    digest = _begin(tensor.dtype, tensor.shape)
    at = tensor.begin
    while at < tensor.end:
        if stop.is_set():
            raise Stopped
        size = os.preadv(fd, [buffer[: tensor.end - at]], at)  # both this and update() release the GIL
        if size == 0:
            raise CheckpointError(f"{path} was truncated at byte {at} while it was read; download it again")
        digest.update(buffer[:size])
        at += size
    return digest.hexdigest()


def _begin(dtype: str, shape: tuple[int, ...]) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{dtype} {shape}\n".encode())
