"""Choose what a node does with images, and the memory of their embeddings.

Nothing of it is in ``compat_fields``: text is computed alike with and without a tower, and the KV of images is exact
without them. Each block that an image overlaps has in its hash the digest of the pixels, which begins with the image
processor's fingerprint. So unequal processors share no such block, and a node without a tower finds all of them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import OFF, ON, NodeOptions
from pdserve.config.parallel import ParallelConfig, active_parameters
from pdserve.config.resolution.resolved import Resolved
from pdserve.errors import CheckpointError, ConfigError
from pdserve.images import EncodingCost, ImageInput, ImageMode, largest_image, most_tokens
from pdserve.kv.layout import DTYPE_BYTES
from pdserve.model.image_processor import FILE, ImageProcessor, read_image_processor, token_count
from pdserve.model.model_config import TRANSFORMERS, ModelConfig, vision_problem
from pdserve.model.pooling import PoolingConfig
from pdserve.model.towers.vision_config import VisionConfig
from pdserve.model.vision import AnyVision

SCREEN = (1080, 1920)  # pixels of an image whose tokens and costs are named
_CACHED_IMAGES = 2  # largest images: a prompt needs one while another one is encoded
#: FLOPs of a prompt in the time of one of a tower: 0.7 and 0.47 of the rate of a large product, Qwen3-VL 8B on an H200.
_SLOWNESS = 1.5
_PLAIN = ("F32", "F16", "BF16")


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of NodeConfig that concern images."""

    mode: ImageMode = ImageMode.NONE
    problem: str = ""
    accepted: ImageInput | None = None
    processor: ImageProcessor | None = None
    cache: int = 0
    token_bytes: int = 0
    token_cost: EncodingCost = EncodingCost()
    tower_bytes: int = 0  # weights
    hidden_bytes: int = 0  # hidden states of the largest image between two pieces of its encoding

    @property
    def memory(self) -> int:
        """Bytes that images take on a device of the first stage between steps."""
        return self.tower_bytes + self.cache + self.hidden_bytes

    def within(self, config: NodeConfig) -> NodeConfig:
        """Return a configuration with these settings."""
        return msgspec.structs.replace(
            config,
            images=self.mode,
            image_problem=self.problem,
            image_input=self.accepted,
            image_processor=self.processor,
            image_cache=self.cache,
            image_token_bytes=self.token_bytes,
            image_token_cost=self.token_cost,
        )


def choose_images(
    options: NodeOptions,
    model_dir: Path,
    model: ModelConfig,
    pooling: PoolingConfig | None,
    parallel: ParallelConfig,
    dtype: str,
    encodes: bool,
) -> Resolved[ImageSettings]:
    """Choose the mode and the sizes. ``encodes``: the node's role computes prompts.

    Raises ConfigError and CheckpointError if ``images`` is on and cannot be; ConfigError for too small a cache.
    """
    is_on = options.images == ON
    if options.images == OFF:
        return _refused("--images off" if model.multimodal else "")
    problem = _model_problem(model_dir, model, pooling, parallel)
    processor = None
    if not problem and model.vision is not None:
        try:
            processor = read_image_processor(model_dir, model.vision)
            problem = _checkpoint_problem(options, model_dir, model.vision, processor)
        except CheckpointError as exc:
            if is_on:
                raise
            problem = str(exc)
    if problem and is_on:
        raise ConfigError(f"images on: {problem}; leave --images out, for text only")
    if problem or model.vision is None or processor is None:
        return _refused(problem if model.multimodal else "")
    accepted = processor.image_input(model.vision.image_token_id)
    if not (encodes or is_on):
        reason = "prefill nodes encode images, this one continues their prompts"
        return Resolved(ImageSettings(mode=ImageMode.POSITIONS, accepted=accepted), reason, ImageMode.POSITIONS)
    settings = _with_tower(options, model, model.vision, processor, accepted, parallel, dtype)
    return Resolved(settings, "the checkpoint has a vision tower and an image processor", ImageMode.TOWER)


def _refused(problem: str) -> Resolved[ImageSettings]:
    return Resolved(ImageSettings(problem=problem), problem and f"images are refused: {problem}", ImageMode.NONE)


def with_whole_images(
    settings: ImageSettings,
    options: NodeOptions,
    model: ModelConfig,
    max_batch_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> Resolved[ImageSettings]:
    """Return the settings, or those of text only if a step may lack room for the tokens of an image.

    That is for models that compute these tokens together. Raises ConfigError if ``images`` is on.
    """
    if settings.mode is not ImageMode.TOWER or settings.accepted is None or not model.whole_images:
        return Resolved(settings)
    tokens = largest_image(settings.accepted, max_model_len)
    decodes = (max_num_seqs - 1) * (1 + options.max_drafts)
    if tokens + decodes <= max_batch_tokens:
        return Resolved(settings)
    problem = (
        f"max_batch_tokens {max_batch_tokens} has no room for an image of {tokens} tokens, which a step of this model "
        f"computes together, beside {decodes} decodes; give at least {tokens + decodes}"
    )
    if options.images == ON:
        raise ConfigError(f"images on: {problem}, or leave --images out, for text only")
    return _refused(problem)


def describe_images(config: NodeConfig) -> str:
    """Describe what a node does with images; empty for a checkpoint of a text model."""
    accepted = config.image_input
    if accepted is None:
        return f"refused: {config.image_problem}" if config.image_problem else ""
    height, width = SCREEN
    tokens = token_count(accepted, height, width)
    most = most_tokens(accepted, config.max_model_len)
    sizes = f"{width} × {height} pixels are {tokens} tokens, the largest image {most}"
    if config.images is ImageMode.POSITIONS:
        return f"encoded by prefill nodes; {sizes}"
    held = config.image_cache // config.image_token_bytes
    cache = f"{config.image_cache / 2**20:.0f} MiB of embeddings ({held} tokens)"
    return f"a vision tower of {config.tower_bytes / 2**20:.0f} MiB, {cache}; {sizes}"


def _model_problem(model_dir: Path, model: ModelConfig, pooling: PoolingConfig | None, parallel: ParallelConfig) -> str:
    """Return why the model cannot take images; empty if it can."""
    if not model.multimodal:
        return f"{model.architecture} is a text model"
    if pooling is not None:
        return f"task {pooling.task} takes text"
    if model.impl == TRANSFORMERS:
        return "transformers' layers serve its text model alone"
    if model.vision is None:
        return vision_problem(model_dir, model)
    needed = len(model.vision.deepstack) + 1
    first = parallel.stage_layers[0]
    if model.vision.deepstack and first < needed:
        return f"the first pipeline stage has {first} layers, and images need {needed} there; use --stage-layers"
    return ""


def _checkpoint_problem(
    options: NodeOptions, model_dir: Path, vision: VisionConfig, processor: ImageProcessor | None
) -> str:
    """Return why the files do not suffice for images; empty if they do. Reads the headers of the weights."""
    if processor is None:
        return f"{model_dir} has no {FILE}"
    if not options.reads_weights:
        return ""
    tensors = [
        (name, tensor)
        for tensors in read_headers(model_dir).values()
        for name, tensor in tensors.items()
        if name.removeprefix("model.").startswith(vision.tensors)
    ]
    if not tensors:
        return f"{model_dir} has no tensors of a vision tower"
    packed = next((f"{name} has dtype {tensor.dtype}" for name, tensor in tensors if tensor.dtype not in _PLAIN), "")
    return packed and f"the vision tower is quantized: {packed}"


def _with_tower(
    options: NodeOptions,
    model: ModelConfig,
    vision: AnyVision,
    processor: ImageProcessor,
    accepted: ImageInput,
    parallel: ParallelConfig,
    dtype: str,
) -> ImageSettings:
    token_bytes = model.hidden_size * DTYPE_BYTES[dtype] * (1 + len(vision.deepstack))
    tokens = largest_image(accepted, options.max_model_len or model.max_position_embeddings)
    least = tokens * token_bytes
    cache = options.image_cache or _CACHED_IMAGES * least
    if cache < least:
        raise ConfigError(
            f"image_cache {cache} has no room for the largest image, {tokens} embeddings of {token_bytes} bytes; give "
            f"at least {least}, or lower --max-model-len"
        )
    return ImageSettings(
        mode=ImageMode.TOWER,
        accepted=accepted,
        processor=processor,
        cache=cache,
        token_bytes=token_bytes,
        token_cost=_token_cost(model, vision, parallel),
        tower_bytes=0 if options.simulated else vision.num_weights * DTYPE_BYTES[dtype],
        hidden_bytes=0 if options.simulated else tokens * vision.merged_size * DTYPE_BYTES[dtype],
    )


def _token_cost(model: ModelConfig, vision: AnyVision, parallel: ParallelConfig) -> EncodingCost:
    """Return the tower's time per token over that of a prompt token on a rank of the first stage.

    It follows from FLOPs. A prompt token takes two per active weight of the rank. Every shard runs the whole tower.
    """
    token = 2 * active_parameters(model, parallel.position(0)) / _SLOWNESS
    alone = vision.token_flops(0)
    return EncodingCost(alone / token, (vision.token_flops(vision.merge_size**2) - alone) / token)
