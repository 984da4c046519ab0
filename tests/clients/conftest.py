from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import REAL_NODES, SIMULATED_NODES, Service, serve


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Real nodes with the embedded model in float32."""
    with serve(tmp_path_factory.mktemp("real"), REAL_NODES) as service:
        yield service


@pytest.fixture(scope="session")
def seeing_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Real nodes with a small random model that sees; the decode node encodes no images."""
    from image_checkpoints import make_image_checkpoint

    model = make_image_checkpoint(tmp_path_factory.mktemp("sees") / "model", "qwen3_vl")
    with serve(tmp_path_factory.mktemp("seeing"), REAL_NODES, model) as service:
        yield service


@pytest.fixture(scope="session")
def simulated_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("simulated"), SIMULATED_NODES) as service:
        yield service
