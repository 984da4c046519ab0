"""--disk-kv: its options, their errors, and the lines that a node prints about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError

CPU = DeviceInfo("cpu", 0, "CPU", 8 << 30)
HOST = 64 << 20
SIZE = 1 << 30


def config_with(**options: object) -> NodeConfig:
    return resolve(NodeOptions(model=str(EMBEDDED_MODEL), **options), CPU)  # type: ignore[arg-type]


def test_directory_and_size_are_described(tmp_path: Path) -> None:
    config = config_with(host_kv_memory=HOST, disk_kv=str(tmp_path / "a/b"), disk_kv_size=SIZE)
    assert (config.disk_kv, config.options.disk_kv_size) == (str(tmp_path / "a/b"), SIZE)
    (choice,) = (choice for choice in config.choices if choice.startswith("disk_kv="))
    assert f"up to {SIZE // config.kv_layout.block_bytes} blocks" in choice
    assert not (tmp_path / "a").exists(), "to explain creates nothing"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"disk_kv_size": SIZE}, "needs disk_kv,"),
        ({"disk_kv": "d"}, "needs disk_kv_size"),
        ({"disk_kv": "d", "disk_kv_size": SIZE}, "needs host_kv_memory"),
        ({"disk_kv": "d", "disk_kv_size": HOST, "host_kv_memory": HOST}, "not more than host_kv_memory"),
        ({"disk_kv": "d", "disk_kv_size": SIZE, "host_kv_memory": HOST, "kv_checksum": "off"}, "kv_checksum on"),
        ({"disk_kv": "d", "disk_kv_size": SIZE, "host_kv_memory": HOST, "engine": "simulated"}, "simulated"),
        ({"disk_kv": "/proc/version", "disk_kv_size": SIZE, "host_kv_memory": HOST}, "is not a directory"),
    ],
)
def test_what_is_missing_is_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_with(**options)
