"""A model that this router serves: its tokenizer, chat template, output parsers and nodes."""

from __future__ import annotations

from router.fleet.fleet import Fleet
from router.options import RouterOptions
from router.text.chat.parsers import select_parsers
from router.text.prompt_encoder import PromptEncoder
from router.text.structured.grammar_checker import GrammarChecker
from router.text.tokenizer import Tokenizer


class ServedModel:
    """``root`` is the directory or hub id of the tokenizer."""

    def __init__(self, name: str, root: str, tokenizer: Tokenizer, fleet: Fleet, options: RouterOptions) -> None:
        self.name = name
        self.root = root
        self.tokenizer = tokenizer
        self.fleet = fleet
        self.encoder = PromptEncoder(tokenizer, lambda: fleet.limits().max_model_len)
        self.grammars = GrammarChecker(tokenizer.to_json)
        template = tokenizer.chat_template.source if tokenizer.chat_template else ""
        self.parsers = select_parsers(template, options.tool_call_parser, options.reasoning_parser)

    async def close(self) -> None:
        await self.encoder.close()
        await self.grammars.close()
