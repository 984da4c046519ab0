"""Images of sequences: which tokens of a step are of images, their embeddings and their positions.

    plan   dropped images ─► rows are free │ images ─► tower ─► rows     new sequences ─► spans
    step   chunk of a prompt that overlaps an image   rows and offsets by axis, eager      ImageInputs.begin
           text behind images, decodes, drafts        an offset per token, also in graphs  ImageInputs.offsets

The host knows how much of a prompt is computed when it plans a step, and decodes need the offset behind the last image
only. So the inputs of a step depend on no token of a step in flight. All of them are written on the stream of the
forward pass, behind the steps before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.config.node_config import NodeConfig
from pdserve.image_positions import rope_delta, rope_offsets
from pdserve.image_tokens import embedded_tokens
from pdserve.images import EncodedImage, ImageInput, Images, largest_image
from pdserve.records import NewSequence, ScheduledSequence, StepPlan
from runner.batch import LaterTokens
from runner.models.vision.embeddings import ImageEmbeddings, ImagePart
from runner.models.vision.inputs import ImageInputs
from runner.models.vision.towers import AnyVisionTower
from runner.pinned_memory import copied, copied_bytes
from runner.placement import TensorPlacement
from runner.step_parts import StepFeature, StepPart

IMAGE_COPIES = 5  # to the device, in a step: offsets, offsets by axis, rows and their places, later tokens


class _Sequence:
    """The images of a sequence, and the tokens that are computed while some of these are not."""

    def __init__(self, images: Images, num_computed: int, by_axis: bool) -> None:
        self.images = images
        self.delta = rope_delta(images) if by_axis else 0
        self._num_computed = num_computed

    @property
    def is_behind(self) -> bool:
        """Whether all images are computed."""
        return self._num_computed >= self.images[-1].end

    def compute(self, num_tokens: int) -> int:
        """Count tokens of a chunk, and return the index of the first."""
        start = self._num_computed
        self._num_computed += num_tokens
        return start


@dataclass
class _Rows:
    """Inputs of a step that images change, on the host."""

    accepted: ImageInput
    by_axis: bool  # positions of images differ by axis; else each token's position is its index
    offsets: NDArray[np.int64]  # [3 (time, height, width), tokens]
    later: NDArray[np.int32] | None  # [tokens]: see LaterTokens; None: the model's tokens see none
    rows: list[NDArray[np.int64]] = field(default_factory=list)  # tokens of the step, by part
    parts: list[ImagePart] = field(default_factory=list)

    def add(self, images: Images, start: int, end: int, row: int) -> None:
        """Add a chunk of a prompt: its tokens start … end - 1, which are the rows from ``row`` on."""
        if self.by_axis:
            self.offsets[:, row : row + end - start] = rope_offsets(images, start, end)
        for span in images:
            first = max(start, span.start) - span.start
            last = min(end, span.end) - span.start
            if self.later is not None and first < last:
                assert last == span.num_tokens, f"a step ends inside the image at token {span.start}"
                self.later[row + span.start - start + first :][: last - first] = np.arange(last - first)[::-1]
            tokens = embedded_tokens(self.accepted, span, first, last)
            if len(tokens):
                begin, behind = (self.accepted.embeddings_before(span, token) for token in (first, last))
                self.rows.append(tokens + (row + span.start - start))
                self.parts.append(ImagePart(span.digest, begin, behind))


class ImageEncoding(StepFeature[Any]):
    """Works for every runner: it needs the plan alone."""

    def __init__(
        self, config: NodeConfig, inputs: ImageInputs, tower: AnyVisionTower | None, placement: TensorPlacement
    ) -> None:
        """``tower`` is None on later stages, and on nodes that continue prompts of peers."""
        self._inputs = inputs
        self._tower = tower
        self._device = placement.device
        self._has_embedding = config.position.is_first
        capacity = 0 if tower is None else config.image_cache // config.image_token_bytes
        assert config.model.vision is not None
        assert config.image_input is not None
        self._accepted = config.image_input
        self._by_axis = config.model.vision.rope_sections is not None
        self._whole = config.model.whole_images
        largest = 0 if tower is None else largest_image(config.image_input, config.max_model_len)
        self._embeddings = ImageEmbeddings(config.model.vision, capacity, largest, placement)
        self._sequences: dict[int, _Sequence] = {}
        inputs.offsets.zero_()  # a feature before this one, of a trial run, may have left others
        self._num_written = 0  # tokens in ``inputs.offsets`` that may differ from 0
        self._written: tuple[ScheduledSequence, ...] = ()  # the step whose offsets are there, if the next has the same

    def add(self, new: NewSequence) -> None:
        if new.images:
            self._sequences[new.seq] = _Sequence(new.images, new.num_computed, self._by_axis)
            self._written = ()

    def remove(self, seq: int) -> None:
        if self._sequences.pop(seq, None) is not None:
            self._written = ()

    def part(self, plan: StepPlan) -> StepPart[Any] | None:
        for digest in plan.dropped_images:
            self._embeddings.drop(digest)
        rows = self._rows(plan) if plan.scheduled else None
        images = plan.images if self._tower is not None else ()
        return _ImageStep(self, images, rows, bool(plan.scheduled)) if images or rows is not None else None

    def weights_changed(self) -> None:
        self._embeddings.clear()

    def _rows(self, plan: StepPlan) -> _Rows | None:
        """Count the tokens of a step. Return what images change in its inputs; None if nothing, or as before."""
        if not (self._sequences or self._num_written) or plan.scheduled == self._written:
            return None
        later = np.zeros(plan.num_tokens, np.int32) if self._whole else None
        rows = _Rows(self._accepted, self._by_axis, np.zeros((3, plan.num_tokens), np.int64), later)
        all_behind = True
        row = 0
        for item in plan.scheduled:
            sequence = self._sequences.get(item.seq)
            if sequence is not None and sequence.is_behind:
                rows.offsets[:, row : row + item.num_tokens] = sequence.delta
            elif sequence is not None:
                all_behind = False
                start = sequence.compute(item.num_tokens)
                rows.add(sequence.images, start, start + item.num_tokens, row)
            row += item.num_tokens
        self._written = plan.scheduled if all_behind else ()
        return rows if rows.parts or self._num_written or rows.offsets[0].any() else None

    def encode(self, image: EncodedImage) -> None:
        """Encode an image, or a piece of it."""
        tower = self._tower
        assert tower is not None
        digest = image.digest
        embeddings = self._embeddings
        if image.begins:
            x = tower.begin(copied_bytes(image.pixels, self._device).view(image.height, image.width, -1))
            embeddings.reserve(digest, len(x) // tower.config.merge_size**2)
        else:
            x = embeddings.take_hidden(digest)
        last = tower.config.depth if image.ends else image.last
        keep = partial(self._keep_deepstack, digest)
        x = tower.run(x, image.height, image.width, image.first, last, keep)
        if image.ends:
            embeddings.put(digest, 0, tower.end(x))
        else:
            embeddings.keep_hidden(digest, x)

    def _keep_deepstack(self, digest: bytes, layer: int, rows: torch.Tensor) -> None:
        self._embeddings.put(digest, 1 + layer, rows)

    def begin(self, rows: _Rows) -> None:
        """Give the next forward pass its inputs."""
        times = rows.offsets[0]
        count = max(len(times), self._num_written)
        offsets = np.zeros(count, np.int64)
        offsets[: len(times)] = times
        self._inputs.offsets[:count] = copied(offsets, self._device)
        self._num_written = len(times) if times.any() else 0
        if not rows.parts:
            return
        axes = copied(rows.offsets, self._device) if self._by_axis else None
        later = None if rows.later is None else LaterTokens(rows.later, copied(rows.later, self._device))
        if not self._has_embedding:
            self._inputs.begin_positions(axes, later)
            return
        features = self._embeddings.gather(rows.parts)
        places = copied(np.concatenate(rows.rows), self._device)
        self._inputs.begin(axes, places, features.embeddings, features.deepstack, later)

    def end(self) -> None:
        self._inputs.end()


class _ImageStep(StepPart[Any]):
    def __init__(
        self, feature: ImageEncoding, images: tuple[EncodedImage, ...], rows: _Rows | None, has_forward: bool
    ) -> None:
        """``has_forward``: the step computes tokens. Pieces may come without."""
        self._has_forward = has_forward
        self._feature = feature
        self._images = images
        self._rows = rows

    def before_forward(self, batch: Any) -> None:
        for image in self._images:
            self._feature.encode(image)
        if self._rows is not None:
            self._feature.begin(self._rows)

    def after_forward(self, batch: Any, hidden: torch.Tensor) -> None:
        self._feature.end()

    def after_step(self) -> None:
        if not self._has_forward:
            self.before_forward(None)
