"""Settings of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

gc.disable()  # until all tests are collected

import fast_set  # noqa: E402
import pytest  # noqa: E402
import pytest_timeout  # type: ignore[import-untyped]  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from machine import patience  # noqa: E402
from process_marks import starts_processes  # noqa: E402
from triton_interpreter import make_interpreter_faster  # noqa: E402
from xdist.scheduler import LoadFileScheduling  # noqa: E402

#: Variables that change how the product behaves. Tests set the variables that they need.
_BEHAVIOUR = ("PDSERVE_", "OTEL_", "OMP_", "GOMP_", "TRITON_INTERPRET")
#: Folders, and files of a folder, whose tests share one set of processes that is costly to start.
_ON_ONE_WORKER = ("tests/hosts", "tests/dashboard")
_OF_NODES = ("decode_node", "handoff_faults", "metrics", "moved_streams", "prefill_node", "resumed")
_OF_A_PAIR = ("garbage", "streamed_handoff")
_OF_A_SMALL_MODEL = ("openai_api", "prompt_logprobs")
_TOGETHER = {f"tests/nodes/test_{name}.py": "tests/nodes with shared nodes" for name in _OF_NODES}
_TOGETHER |= {f"tests/nodes/test_{name}.py": "tests/nodes with a shared pair" for name in _OF_A_PAIR}
_TOGETHER |= {f"tests/router/test_{name}.py": "tests/router with a small model" for name in _OF_A_SMALL_MODEL}

torch.set_num_threads(1)  # the processes under test need the cores
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        fast_set.share = 1 / 5


@pytest.hookimpl(tryfirst=True)  # slow tests are still among the items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    moved = fast_set.moved_to_slow((item.nodeid, item.get_closest_marker("slow") is not None) for item in items)
    if moved and "not slow" in config.option.markexpr:
        raise pytest.UsageError(
            f"NEVER_SLOW (tests/support/fast_set.py) has tests without a fast cell: {'; '.join(moved)}"
        )
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker("processes")


def pytest_collection_finish() -> None:
    """Enable the garbage collector, which never searches the objects of torch, transformers and the collected tests."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report objects that are alive at the end


class _Folder(pytest.Package):
    """A folder with tests, whose fixtures of scope "package" end after its last test.

    Without it they would be fixtures of the session, since the folders have no ``__init__.py``: nodes would run on.
    """

    def setup(self) -> None:
        pass


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector:
    return _Folder.from_parent(parent, path=path)


class _Scheduler(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Keep all tests of a file, of a folder of ``_ON_ONE_WORKER``, or of files of ``_TOGETHER``, on one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in _ON_ONE_WORKER else _TOGETHER.get(file, file)


@pytest.hookimpl(optionalhook=True)  # pytest may run without pytest-xdist's plugin
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Return the scheduler of ``--dist loadfile``."""
    return _Scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Give a test more time on a busy machine."""
    longer = settings._replace(timeout=patience(settings.timeout))
    return bool(pytest_timeout.pytest_timeout_set_timer(item, longer))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test what the processes of its fleets printed, and their stacks."""
    report = yield
    if report.when == "call" and report.failed:
        from fleet import open_fleets

        for fleet in open_fleets:
            report.sections += [(f"Output of {name}", text) for name, text in fleet.stacks().items()]
    return report


def _clear_shell_variables() -> None:
    """Remove what the shell set, so that neither tests nor the processes that they start depend on it."""
    for name in [name for name in os.environ if name.startswith(_BEHAVIOUR)]:
        del os.environ[name]


def _interpret_triton_kernels() -> None:
    """Let this process run Triton kernels on CPU tensors, but no process that tests start.

    Triton reads the variable while it is imported, for its own library, and again for each kernel. transformers imports
    it, so this cannot wait for the tests that need it. Nodes must not inherit the variable: it changes their runner.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]
    make_interpreter_faster()


def _disable_grpc_fork_support() -> None:
    """Load gRPC as a router does: its fork handlers may abort the processes that uvloop starts.

    gRPC reads the variable while it is imported. The processes that tests start must set it themselves.
    """
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    import grpc  # noqa: F401

    del os.environ["GRPC_ENABLE_FORK_SUPPORT"]


_clear_shell_variables()
_disable_grpc_fork_support()
if not torch.cuda.is_available():
    _interpret_triton_kernels()
