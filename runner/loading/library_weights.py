"""The weights of a model of the library transformers: the library places them, and a self-test follows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError, PdserveError
from pdserve.kv.layout import KVLayout
from runner.loading.model_weights import ModelWeights, Progress
from runner.loading.weights import OpenWeights
from runner.models.from_transformers.decoder import TransformersDecoder
from runner.models.from_transformers.self_test import check_exactness
from runner.models.from_transformers.unread_decoder import check_before_reading
from runner.placement import TensorPlacement

_log = logging.getLogger(__name__)


class LibraryWeights(ModelWeights):
    def __init__(self, decoder: TransformersDecoder, layout: KVLayout, placement: TensorPlacement) -> None:
        """``layout`` describes the KV cache of the self-test."""
        self._decoder = decoder
        self._layout = layout
        self._placement = placement

    def check(self, model_dir: Path, weights: OpenWeights) -> None:
        self._check(model_dir, weights)

    def load(self, model_dir: Path, weights: OpenWeights, progress: Progress | None, at_once: int) -> None:
        self._load(model_dir, weights)

    def load_random(self, model_dir: Path) -> None:
        self._load(model_dir, None)

    def _check(self, model_dir: Path, weights: Mapping[str, Any] | None) -> None:
        decoder = self._decoder
        check_before_reading(
            decoder.config, model_dir, weights, self._placement.dtype, decoder.parallel.position.parallel
        )

    def _load(self, model_dir: Path, weights: Mapping[str, Any] | None) -> None:
        """Load this rank's part, and test all ranks together. Every rank refuses a model that one rank refuses."""
        decoder = self._decoder
        decoder.unload()
        refusal: PdserveError | None = None
        try:
            self._check(model_dir, weights)  # before gigabytes are read
            decoder.load(model_dir, weights)
        except PdserveError as exc:
            refusal = exc
        problem = decoder.parallel.first_problem("" if refusal is None else str(refusal))
        if problem:
            raise refusal or ConfigError(problem)
        reference = partial(decoder.eager_logits, model_dir, weights)
        error = check_exactness(decoder, reference, self._layout, self._placement)
        _log.info("%s of transformers equals its eager forward within %.1e", decoder.config.architecture, error)
