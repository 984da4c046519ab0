"""Find the class of an architecture."""

from __future__ import annotations

import importlib

from pdserve.model.families import FAMILIES
from runner.models.decoder import Decoder


def decoder_class(architecture: str) -> type[Decoder]:
    """Import the architecture's class from the module that its entry in ``FAMILIES`` names."""
    module = importlib.import_module(f"runner.models.families.{FAMILIES[architecture].module}")
    decoder: type[Decoder] = getattr(module, architecture)
    return decoder
