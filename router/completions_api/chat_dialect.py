"""/v1/chat/completions, and the jobs of every protocol whose body becomes a chat."""

from __future__ import annotations

import msgspec

from router.completions_api.chat_output import ChatOutput
from router.completions_api.jobs import encode_chat, make_job, prepared_request
from router.completions_api.parsed_chat import FullParsedChat, ParsedChatEncoder, StreamedParsedChat
from router.completions_api.request_bodies import ChatBody, parse_chat
from router.completions_api.response_encoders import ChatEncoder
from router.completions_api.response_objects import ChatCompletion
from router.completions_api.response_writers import FullResponse, StreamedResponse, make_encoder
from router.completions_api.token_params import NO_THINKING_BUDGET, check_logprobs, named_tokens
from router.dialect.dialect import GenerateDialect, Prepared
from router.dialect.operation import COMPUTES, Operation
from router.dialect.responses import Response
from router.fleet.policy import GENERATE
from router.generation.job import GenerationOptions
from router.service import ServedModel
from router.text.chat.output_parsing import plain_text_parsing


class ChatDialect(GenerateDialect[ChatBody]):
    name = "chat"
    trace_name = "chat"
    paths = ("/v1/chat/completions",)
    operation = Operation(
        summary="Complete a chat",
        response=ChatCompletion,
        statuses=COMPUTES,
        body=ChatBody,
        streams=True,
    )

    def parse(self, data: bytes) -> ChatBody:
        return parse_chat(data)

    async def prepare(self, body: ChatBody, model: ServedModel) -> Prepared:
        return await prepare_chat(body, model)

    def respond(self, body: ChatBody, prepared: Prepared, model: ServedModel, options: GenerationOptions) -> Response:
        jobs = prepared.jobs
        parsing = prepared.parsing
        if parsing is None:
            encoder = make_encoder(ChatEncoder, body, jobs, model=model, request_id=options.request_id)
            plain = StreamedResponse if body.stream else FullResponse
            return plain(encoder, body, jobs)
        encoder = make_encoder(ParsedChatEncoder, body, jobs, model=model, request_id=options.request_id)
        encoder.warnings = parsing.warnings
        parsed = StreamedParsedChat if body.stream else FullParsedChat
        return parsed(encoder, body, jobs, parsing=parsing)


async def prepare_chat(
    body: ChatBody,
    model: ServedModel,
    *,
    always_parsed: bool = False,
    thinking_is_optional: bool = False,
) -> Prepared:
    """Return the one job of a chat. Raises RequestError, or Overloaded when no node is ready.

    ``always_parsed``: plain text has a parsing, too. ``thinking_is_optional``: a budget of reasoning has no effect on a
    model without reasoning; otherwise it is an error.
    """
    limits = model.fleet.limits((GENERATE,))
    check_logprobs(body, limits.vocab_size, model.options.max_logprobs)
    chat = await encode_chat(body, model, limits)
    output = ChatOutput(model, body, chat.prompt)
    grammar = await output.grammar()
    thinking = NO_THINKING_BUDGET
    if model.parsers.reasoning is not None or not thinking_is_optional:
        thinking = output.thinking()
    job = make_job(
        chat.prompt,
        body,
        limits,
        grammar=grammar.text,
        named=await named_tokens(body, model.encoder),
        thinking=thinking,
        defaults=model.defaults,
        pictures=chat.pictures,
    )
    parsing = output.parsing()
    if parsing is None and always_parsed:
        parsing = plain_text_parsing(model.parsers)
    if parsing is not None and chat.warnings:
        parsing = msgspec.structs.replace(parsing, warnings=[*parsing.warnings, *chat.warnings])
    return await prepared_request(body, [job], parsing)
