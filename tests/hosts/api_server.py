"""The API server for EndpointSlices (tests/support/fake_cluster.py) as a process: python api_server.py PORT FOLDER

FOLDER has the certificate ``tls.pem`` and the list ``slices.json``, which the server polls for changes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fake_cluster import FakeCluster

_POLL_SECONDS = 0.05


async def main(port: int, folder: Path) -> None:
    cluster = FakeCluster()
    config = uvicorn.Config(cluster, "0.0.0.0", port, lifespan="off", ssl_certfile=folder / "tls.pem")
    serving = asyncio.create_task(uvicorn.Server(config).serve())
    text = ""
    while not serving.done():
        if (newest := (folder / "slices.json").read_text()) != text:
            text = newest
            for item in json.loads(text):
                await cluster.put(item)
        await asyncio.sleep(_POLL_SECONDS)
    await serving


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
