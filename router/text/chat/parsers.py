"""The tool parsers and reasoning parsers by name: chosen by a flag, or detected in the model's chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from uuid import uuid4

import msgspec

from pdserve.errors import ConfigError
from router.text.chat.families.harmony_grammar import harmony_calls_grammar
from router.text.chat.families.harmony_parser import MARKERS, HarmonyParser
from router.text.chat.families.tagged_grammars import tagged_grammar
from router.text.chat.families.tagged_tool_parsers import (
    DEEPSEEK_V32,
    GLM45,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    DeepSeekV32ToolParser,
    Glm45ToolParser,
    MiniMaxM2ToolParser,
    Qwen3CoderToolParser,
    SeedOssToolParser,
)
from router.text.chat.strict_tools import (
    StrictGrammar,
    deepseek_grammar,
    deepseek_v31_grammar,
    hermes_grammar,
    llama_grammar,
    mistral_grammar,
)
from router.text.chat.tool_parsers import (
    DeepSeekToolParser,
    HermesToolParser,
    LlamaToolParser,
    MistralToolParser,
    ToolParser,
)

logger = logging.getLogger(__name__)

AUTO = "auto"
NONE = "none"


class ToolFormat(msgspec.Struct, frozen=True):
    """``markers`` are texts that the model writes as special tokens; ``signs`` identify templates of the family.

    ``parser`` is made with a mapping of the names of functions to the kinds of their arguments. ``grammar`` holds calls
    of strict functions to their schemas.
    """

    parser: type[ToolParser]
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    grammar: StrictGrammar
    channels: bool = False  # the parser reads reasoning, too, in outputs without calls, and forced calls
    short_ids: bool = False  # Mistral's templates accept only call ids of nine letters and digits


class ReasoningMarkers(msgspec.Struct, frozen=True):
    """The texts before and after reasoning."""

    start: str
    end: str
    channels: bool = False  # the markers are parts of messages in harmony's channels


class ReasoningState(msgspec.Struct, frozen=True):
    """Whether an output may begin with reasoning (None: it may not), and whether the prompt ``opened`` it."""

    markers: ReasoningMarkers | None = None
    opened: bool = False
    continued: bool = False  # the output continues the content of a message


_HERMES_TAGS = ("<tool_call>", "</tool_call>")
_GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_SEED_TAGS = ("<seed:tool_call>", "</seed:tool_call>")
_MINIMAX_TAGS = ("<minimax:tool_call>", "</minimax:tool_call>")
_DEEPSEEK_TAGS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
# Several families put another syntax into the tags of others, so their own signs are looked for first.
TOOL_PARSERS: Mapping[str, ToolFormat] = {
    "seed_oss": ToolFormat(SeedOssToolParser, _SEED_TAGS, ("<seed:tool_call>",), tagged_grammar(SEED_OSS)),
    "qwen3_coder": ToolFormat(
        Qwen3CoderToolParser, _HERMES_TAGS, ("<function=", "<parameter="), tagged_grammar(QWEN3_CODER)
    ),
    "glm45": ToolFormat(Glm45ToolParser, (*_HERMES_TAGS, *_GLM_TAGS), ("<arg_key>",), tagged_grammar(GLM45)),
    "minimax_m2": ToolFormat(MiniMaxM2ToolParser, _MINIMAX_TAGS, ("<minimax:tool_call>",), tagged_grammar(MINIMAX_M2)),
    "deepseek_v3": ToolFormat(
        DeepSeekToolParser, _DEEPSEEK_TAGS, ("<｜tool▁calls▁begin｜>", "```json"), deepseek_grammar
    ),
    "deepseek_v31": ToolFormat(DeepSeekToolParser, _DEEPSEEK_TAGS, ("<｜tool▁calls▁begin｜>",), deepseek_v31_grammar),
    "deepseek_v32": ToolFormat(
        DeepSeekV32ToolParser, (DEEPSEEK_V32.token,), (DEEPSEEK_V32.token,), tagged_grammar(DEEPSEEK_V32)
    ),
    "openai": ToolFormat(HarmonyParser, MARKERS, ("<|channel|>",), harmony_calls_grammar, channels=True),
    "hermes": ToolFormat(HermesToolParser, _HERMES_TAGS, ("<tool_call>",), hermes_grammar),
    "llama3_json": ToolFormat(LlamaToolParser, ("<|python_tag|>",), ("<|python_tag|>",), llama_grammar),
    "mistral": ToolFormat(
        MistralToolParser, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), ("[TOOL_CALLS]",), mistral_grammar, short_ids=True
    ),
}
REASONING_PARSERS: Mapping[str, ReasoningMarkers] = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "openai_gptoss": ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|>", channels=True),
}
# vLLM's and SGLang's names of equal formats, with underscores
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "--tool-call-parser": {
        **dict.fromkeys(("qwen", "qwen25"), "hermes"),
        **dict.fromkeys(("qwen3_xml", "qwen3_5"), "qwen3_coder"),
        **dict.fromkeys(("glm", "glm47"), "glm45"),
        **dict.fromkeys(("minimax", "minimax_m2_5"), "minimax_m2"),
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31",
        "deepseekv32": "deepseek_v32",
        "llama3": "llama3_json",
        "gpt_oss": "openai",
    },
    "--reasoning-parser": {"gpt_oss": "openai_gptoss"}
    | dict.fromkeys(
        (
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "glm45",
            "glm47",
            "minimax",
            "minimax_m2",
            "qwen3",
            "qwen3_thinking",
        ),
        "think",
    ),
}
# Texts of formats without a parser whose templates have the signs of one with a parser, by its name
_OTHER_FORMATS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<function=", "<tool_calls>"),  # Apriel 1.5 writes a list in <tool_calls>
    "llama3_json": ("<function=",),  # Functionary 3.1
}
# Text by which Llama 3's templates request calls, even templates without the tag
_LLAMA_WORDS = '{"name": function name, "parameters": dictionary'


class ModelParsers(msgspec.Struct, frozen=True):
    """The formats of a model's tool calls and reasoning; None: not parsed."""

    tools: ToolFormat | None = None
    reasoning: ReasoningMarkers | None = None

    def state_after(self, prompt: str, continued: str | None = None) -> ReasoningState:
        """Return the state after a rendered chat. ``continued``: content of a last message that the output continues.

        Templates of models that always reason end the prompt with the start marker; with reasoning switched off they
        write an empty, closed one. Markers elsewhere in the prompt are user text.
        """
        markers = self.reasoning
        if markers is None:
            return ReasoningState(continued=continued is not None)
        if continued is not None:
            opened = continued.rfind(markers.start) > continued.rfind(markers.end)
            return ReasoningState(markers, opened=True) if opened else ReasoningState(continued=True)
        end = prompt.rstrip()
        return ReasoningState() if end.endswith(markers.end) else ReasoningState(markers, end.endswith(markers.start))

    @property
    def use_channels(self) -> bool:
        """Whether outputs are messages in harmony's channels."""
        return bool((self.tools and self.tools.channels) or (self.reasoning and self.reasoning.channels))

    def new_call_id(self) -> str:
        short = self.tools is not None and self.tools.short_ids
        return uuid4().hex[:9] if short else "call_" + uuid4().hex[:24]


def select_parsers(template: str, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> ModelParsers:
    """Return the parsers of the model with this chat template. Names are checked ones (parser_name)."""
    tools = _select("--tool-call-parser", tool_parser, _detect_tool_parser(template))
    reasoning = _select("--reasoning-parser", reasoning_parser, _detect_reasoning_parser(template))
    return ModelParsers(TOOL_PARSERS.get(tools), REASONING_PARSERS.get(reasoning))


def parser_names(flag: str) -> list[str]:
    """Return the values of a flag, "--tool-call-parser" or "--reasoning-parser"."""
    return [AUTO, NONE, *(TOOL_PARSERS if flag == "--tool-call-parser" else REASONING_PARSERS)]


def parser_name(flag: str, text: str) -> str:
    """Check a flag's value; names of peers are translated. Raises ConfigError for an unknown name."""
    names = parser_names(flag)
    name = text.replace("-", "_")
    name = name if name in names else _ALIASES[flag].get(name, name)
    if name not in names:
        raise ConfigError(f"{flag} {text!r} is not known; choose one of {', '.join(names)}")
    return name


def _select(flag: str, requested: str, detected: str) -> str:
    if requested != AUTO:
        name = requested
        why = "as requested"
    else:
        name = detected
        why = "the chat template has none" if detected == NONE else "from the chat template"
    logger.info("%s: %s (%s)", flag, name, why)
    return name


def _detect_tool_parser(template: str) -> str:
    for name, form in TOOL_PARSERS.items():
        others = _OTHER_FORMATS.get(name, ())
        if all(sign in template for sign in form.signs) and not any(other in template for other in others):
            return name
    return "llama3_json" if _LLAMA_WORDS in template else NONE


def _detect_reasoning_parser(template: str) -> str:
    for name, markers in REASONING_PARSERS.items():
        if (markers.start if markers.channels else markers.end) in template:
            return name
    return NONE
