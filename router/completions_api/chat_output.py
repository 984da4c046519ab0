"""The output of a chat: its grammar, the budget of its reasoning, and its parsing into reasoning and tool calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from pdserve.errors import RequestError
from router.completions_api.request_bodies import ChatBody
from router.completions_api.token_params import NO_THINKING_BUDGET, ThinkingParams, thinking_params
from router.service import ServedModel
from router.text.chat.families.harmony_grammar import harmony_grammar
from router.text.chat.messages import final_text
from router.text.chat.output_parsing import OutputParsing, select_parsing
from router.text.chat.parsers import ReasoningState
from router.text.chat.strict_tools import Frame, Reasoning, calls_or_answer, has_strict
from router.text.chat.tool_grammar import Marker, after_reasoning, parameters_grammar, tool_call_grammar
from router.text.chat.tools import ToolUse
from router.text.prompt import Prompt
from router.text.structured.structured_outputs import OutputGrammar, in_field
from router.text.structured.work_budget import Budget, WorkExceeded


class ChatOutput:
    """The output of one chat. Its prompt says whether it begins with reasoning."""

    def __init__(self, model: ServedModel, body: ChatBody, prompt: Prompt) -> None:
        self._model = model
        self._body = body
        self._use = self._held_use = body.tool_use
        self._conversion = model.grammars.conversion()
        self._answer = OutputGrammar()  # grammar of the request's own fields, without tools
        continued = final_text(body.messages[-1].get("content")) if body.continue_final_message else None
        self._warnings: list[str] = []
        self._state: ReasoningState = model.parsers.state_after(prompt.text or "", continued)

    async def grammar(self) -> OutputGrammar:
        """Return the grammar of the request's fields, of tools, or the union of both, compiled once as a check.

        Reasoning may come first. Schemas of strict functions that cannot be held are left out with a warning, unless
        calls are forced. Raises RequestError that names the field, and the tool.
        """
        use = self._use
        grammars = self._model.grammars
        self._answer = await grammars.translated(await self._conversion.run(self._body.structure.grammar))
        try:
            return await self._checked(use)
        except WorkExceeded:
            raise
        except RequestError:
            problems = await self._problems(use)
            if not problems:
                raise
            if use.must_call:
                raise RequestError(next(iter(problems.values())), "tools") from None
        self._warnings = [f"{problem}; its arguments are any object" for problem in problems.values()]
        self._held_use = use.without_strict(problems)
        return await self._checked(self._held_use)

    async def _problems(self, use: ToolUse) -> dict[str, str]:
        """Return the problems of schemas that the grammar holds, by function; the first one if calls are forced."""
        problems: dict[str, str] = {}
        usable = frozenset(use.names)
        for index, tool in enumerate(self._body.tools):
            function = tool["function"]
            name = function["name"]
            held = name == use.named if use.named else use.required or function.get("strict")
            if not held or name not in usable or (problems and use.must_call):
                continue
            where = f"tools[{index}] ({name})"
            makes = [partial(parameters_grammar, function, where)]
            if not use.must_call:
                makes.append(partial(self._calls_grammar, tool, where))
            try:
                for make in makes:
                    await self._model.grammars.check(await self._conversion.run(make))
            except WorkExceeded:
                raise
            except RequestError as exc:
                problems[name] = str(exc)
        return problems

    def _calls_grammar(self, tool: dict[str, Any], field: str, budget: Budget) -> OutputGrammar:
        """Return the grammar of calls of one function. Raises RequestError that begins with ``field``."""
        form = self._model.parsers.tools
        assert form is not None
        with in_field(field):
            calls = form.grammar(ToolUse((tool,)), partial(_marker, self._model), Frame(alone=True), budget)
            return OutputGrammar(calls, field)

    async def _checked(self, use: ToolUse) -> OutputGrammar:
        grammar = await self._conversion.run(partial(self._grammar, use))
        await self._model.grammars.check(grammar)
        return grammar

    def _grammar(self, use: ToolUse, budget: Budget) -> OutputGrammar:
        model = self._model
        grammar = self._answer
        if model.parsers.use_channels:
            return self._channels_grammar(use, budget)
        form = model.parsers.tools
        marker = partial(_marker, model)
        markers = self._state.markers
        reasoning = None
        if markers is not None:
            reasoning = Reasoning(marker(markers.start), marker(markers.end), self._state.opened)
        if form is not None and self._holds_calls(use):
            frame = Frame(alone=self._may_call, or_answer=self._may_call, reasoning=reasoning)
            text = form.grammar(use, marker, frame, budget)
            if self._may_call:
                grammar = OutputGrammar(calls_or_answer(text, grammar.text), grammar.field)
            else:
                grammar = OutputGrammar(text, "tools")
            grammar.check_size()
            return grammar
        if use.must_call:
            grammar = OutputGrammar(tool_call_grammar(use, budget), "tools")
        grammar.check_size()
        if not grammar.text or reasoning is None:
            return grammar
        text = after_reasoning(grammar.text, reasoning.start, reasoning.end, opened=reasoning.opened)
        return OutputGrammar(text, grammar.field)

    def _holds_calls(self, use: ToolUse) -> bool:
        """Whether a grammar holds the calls that an output may have, in the model's format."""
        return self._may_call or (has_strict(use) and not self._answer.text)

    def _channels_grammar(self, use: ToolUse, budget: Budget) -> OutputGrammar:
        """Return the grammar of messages in channels: reasoning, and then a call or an answer."""
        answer = self._answer
        marker = partial(_marker, self._model)
        if self._state.continued or not (answer.text or use.must_call or has_strict(use)):
            return answer
        if use.must_call:
            return OutputGrammar(harmony_grammar(use, marker, None, budget), "tools")
        calls = use if self._may_call or not answer.text else ToolUse()
        return OutputGrammar(harmony_grammar(calls, marker, answer.text, budget), answer.field or "tools")

    @property
    def _may_call(self) -> bool:
        """Whether the output follows a response format or is calls. Output under other grammars holds no calls."""
        is_json = self._body.response_format.get("type") in ("json_object", "json_schema")
        use = self._use
        return is_json and bool(use.tools) and not use.must_call and self._model.parsers.tools is not None

    @property
    def _calls_in_reasoning(self) -> tuple[str, ...]:
        """The markers of calls that end the reasoning. A forced call has none."""
        form = self._model.parsers.tools
        use = self._use
        return form.parser.call_markers if form and use.tools and not use.must_call else ()

    def thinking(self) -> ThinkingParams:
        """Return the budget of reasoning. Raises RequestError."""
        model = self._model
        budget = self._body.thinking_token_budget
        if budget is None or budget == -1:
            return NO_THINKING_BUDGET
        state = self._state if model.parsers.reasoning else None
        return thinking_params(budget, model.tokenizer, state, self._calls_in_reasoning)

    def parsing(self) -> OutputParsing | None:
        """Return the parsing of reasoning and tool calls, once there is a grammar; None for plain text.

        Raises RequestError.
        """
        body = self._body
        use = self._use
        if self._answer.text and not (use.must_call or self._may_call):
            use = ToolUse()
        parsers = self._model.parsers
        parsing = select_parsing(
            use,
            parsers,
            self._state,
            include_reasoning=body.include_reasoning,
            separate_reasoning=body.separate_reasoning,
            held=self._holds_calls(self._held_use),
        )
        if parsing is None or not self._warnings:
            return parsing
        return msgspec.structs.replace(parsing, warnings=self._warnings)


def _marker(model: ServedModel, text: str) -> Marker:
    return Marker(text, model.tokenizer.added_token_id(text))
