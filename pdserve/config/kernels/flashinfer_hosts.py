"""Whether FlashInfer's kernels are compiled on the hosts of a node, and how a node starts where they are not.

FlashInfer compiles a kernel when a process first asks for it, for one to three minutes. So a node whose backend was
chosen automatically starts with Triton's attention, compiles the kernels while it serves
(``background_compile.py``), and uses FlashInfer from its next start on. Both have the same KV layout.

A file in FlashInfer's cache records each compiled kernel, with all that makes FlashInfer compile it anew. It is looked
up here without FlashInfer, whose import takes a second and torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from pdserve.config.attention_backends import FlashInferKernel
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import AUTO

_VARIABLES = ("CC", "CXX", "CUDA_HOME", "CUDA_PATH")  # parts of compile commands, beside FLASHINFER_…
_FOLDER_VARIABLE = "FLASHINFER_WORKSPACE_BASE"
_PREBUILT = "flashinfer_jit_cache"  # the package with compiled kernels


class _CompiledKernel(msgspec.Struct, frozen=True):
    """The content of a record."""

    identity: dict[str, str]
    library: str  # path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of our files in FlashInfer's cache."""
    return Path(environ.get(_FOLDER_VARIABLE) or os.path.expanduser("~"), ".cache", "flashinfer", "pdserve")


def missing_kernels(
    kernels: Collection[FlashInferKernel], capability: tuple[int, int], environ: Mapping[str, str] = os.environ
) -> tuple[FlashInferKernel, ...]:
    """Return the kernels that FlashInfer would have to compile for GPUs of this compute capability."""
    return tuple(kernel for kernel in kernels if not _is_compiled(kernel, capability, environ))


def record_compiled(
    kernel: FlashInferKernel, capability: tuple[int, int], library: Path, environ: Mapping[str, str] = os.environ
) -> None:
    """Record that FlashInfer has compiled a kernel, or has it prebuilt, as ``library``. Raises OSError."""
    if _is_compiled(kernel, capability, environ):
        return
    identity = _identity(kernel, capability, environ)
    record = _record(identity, environ)
    record.parent.mkdir(parents=True, exist_ok=True)
    new = record.with_suffix(f".{os.getpid()}")
    new.write_bytes(msgspec.json.encode(_CompiledKernel(identity, str(library))))
    new.replace(record)


def _is_compiled(kernel: FlashInferKernel, capability: tuple[int, int], environ: Mapping[str, str]) -> bool:
    if _is_prebuilt(kernel.library(capability)):
        return True
    identity = _identity(kernel, capability, environ)
    try:
        compiled = msgspec.json.decode(_record(identity, environ).read_bytes(), type=_CompiledKernel)
    except (OSError, msgspec.MsgspecError):
        return False
    return compiled.identity == identity and Path(compiled.library).is_file()


def _is_prebuilt(library: str) -> bool:
    package = importlib.util.find_spec(_PREBUILT)
    if package is None or package.origin is None:
        return False
    return Path(package.origin).with_name("jit_cache").joinpath(library, f"{library}.so").is_file()


def _record(identity: Mapping[str, str], environ: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:16]
    return cache_folder(environ) / f"{identity['kernel']}-{digest}.json"


def _identity(kernel: FlashInferKernel, capability: tuple[int, int], environ: Mapping[str, str]) -> dict[str, str]:
    """Return all that makes FlashInfer compile a kernel anew if it changes."""
    package = importlib.util.find_spec("flashinfer")
    installed = ""
    if package is not None and package.origin is not None:
        with suppress(OSError):
            installed = str(os.stat(package.origin).st_mtime_ns)
    variables = {
        name: value
        for name, value in environ.items()
        if name in _VARIABLES or (name.startswith("FLASHINFER_") and name != _FOLDER_VARIABLE)
    }
    return {
        "kernel": kernel.library(capability),
        "compute capability": ".".join(map(str, capability)),
        "flashinfer": _version("flashinfer-python"),
        "installed": installed,  # compilers compare the time of sources
        "torch": _version("torch"),
        "python": sys.prefix,
        "nvcc": os.path.realpath(_nvcc(environ)),
        **variables,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# ---------------------------------------------------------------- compilers


def search_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return PATH with the folder of this environment's programs, such as ninja."""
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    own = str(Path(sys.executable).parent)
    return os.pathsep.join(folders if own in folders else [*folders, own])


def compiler_problem(environ: Mapping[str, str] = os.environ) -> str:
    """Say which programs are missing to compile FlashInfer's kernels; empty if none is."""
    programs = {"nvcc": _nvcc(environ), "ninja": "ninja", "C++ compiler": environ.get("CXX") or "c++"}
    path = search_path(environ)
    missing = [name for name, program in programs.items() if shutil.which(program, path=path) is None]
    return f"no {', '.join(missing)}" if missing else ""


def _nvcc(environ: Mapping[str, str]) -> str:
    """Return the path of nvcc where FlashInfer expects it."""
    if named := environ.get("FLASHINFER_NVCC"):
        return named
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home is None and (on_path := shutil.which("nvcc", path=search_path(environ))) is not None:
        return on_path
    return str(Path(home or "/usr/local/cuda", "bin", "nvcc"))


# ---------------------------------------------------------------- the node


def describe_missing(problem: str) -> tuple[str, str]:
    """Return what is missing on a host without compiled kernels, and the remedy. ``problem``: why it cannot compile."""
    if problem:
        return (
            f"FlashInfer, the fastest on a GPU, is not compiled here and cannot be: {problem}",
            "install flashinfer-jit-cache or CUDA's compiler",
        )
    return (
        "FlashInfer, the fastest on a GPU, is not compiled here yet",
        "a node compiles it while it serves, for 1 to 3 minutes, and uses it from the next start on",
    )


def with_compiled_kernels(config: NodeConfig, missing: tuple[FlashInferKernel, ...], problem: str) -> NodeConfig:
    """Return the configuration for a start with the kernels that this host has.

    ``missing`` are the kernels of FlashInfer, the chosen backend, that are not compiled. ``problem`` says why they
    cannot be compiled here, and is empty if they can.
    """
    if not missing:
        return config
    state, remedy = describe_missing(problem)
    choices = (
        f"attention_backend=triton: {state}; {remedy}" if choice.startswith("attention_backend=") else choice
        for choice in config.choices
    )
    return msgspec.structs.replace(
        config,
        attention_backend="triton",
        choices=tuple(choices),
        uncompiled_kernels=() if problem else missing,
        flashinfer_problem=state,
    )


def without_flashinfer(config: NodeConfig, hosts: Collection[str]) -> NodeConfig:
    """Return the configuration for a node with ``hosts`` whose FlashInfer is not compiled: all ranks use Triton.

    A backend that the user has named stays, and its ranks wait for the compiler.
    """
    if not hosts or config.options.attention_backend != AUTO or config.attention_backend != "flashinfer":
        return config
    return msgspec.structs.replace(config, attention_backend="triton")
