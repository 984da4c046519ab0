"""A service with API keys for clients: a router, a prefill node and a decode node, all real processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet import MODEL_NAME, Fleet

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from router.gate.api_keys import key_entry, new_key

#: float32, because scores are compared with those of transformers.
REAL_NODES = ("--dtype", "float32")
#: For load tests: meaningless tokens at the speed of an 8B model on an H200.
SIMULATED_NODES = ("--engine", "simulated")


@dataclass(frozen=True)
class Service:
    url: str  # without /v1
    key: str
    limited_key: str  # allows one request per minute
    model: str = MODEL_NAME
    model_dir: Path = EMBEDDED_MODEL

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the programs in programs/."""
        return {
            "PDSERVE_URL": f"{self.url}/v1",
            "PDSERVE_KEY": self.key,
            "PDSERVE_LIMITED_KEY": self.limited_key,
            "PDSERVE_MODEL": self.model,
        }


@contextmanager
def serve(directory: Path, node_flags: Sequence[str], model_dir: Path = EMBEDDED_MODEL) -> Iterator[Service]:
    """Run a service while the context is open; the key file is written to ``directory``."""
    key = new_key()
    limited_key = new_key()
    key_file = directory / "keys.toml"
    key_file.write_text(key_entry("client", key) + key_entry("limited", limited_key) + "requests_per_minute = 1\n")
    with Fleet() as fleet:
        fleet.start_prefill(model_dir, node_flags)
        fleet.start_decode(model_dir, node_flags)
        flags = ["--api-keys", str(key_file), "--tool-call-parser", "hermes", "--response-store", "memory"]
        fleet.start_router(model_dir, flags)
        fleet.wait_ready()
        yield Service(fleet.url, key, limited_key, model_dir=model_dir)
