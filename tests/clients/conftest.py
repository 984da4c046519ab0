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
def simulated_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("simulated"), SIMULATED_NODES) as service:
        yield service
