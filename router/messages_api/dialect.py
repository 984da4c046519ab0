"""/v1/messages: Anthropic's protocol."""

from __future__ import annotations

from router.completions_api.chat_dialect import prepare_chat
from router.completions_api.field_names import named_as
from router.dialect.dialect import GenerateDialect, Prepared
from router.dialect.operation import COMPUTES, Operation
from router.dialect.responses import Response
from router.generation.job import GenerationOptions
from router.messages_api.errors import MESSAGES_ERRORS, MessagesErrorResponse
from router.messages_api.message_writers import FullMessage, StreamedMessage
from router.messages_api.request import EXTENSIONS, FIELD_NAMES, MessagesBody, MessagesRequest, parse_messages
from router.messages_api.response_objects import Message
from router.service import ServedModel


class MessagesDialect(GenerateDialect[MessagesBody]):
    name = "messages"
    trace_name = "chat"
    paths = ("/v1/messages",)
    errors = MESSAGES_ERRORS
    operation = Operation(
        summary="Create a message (Anthropic's protocol)",
        response=Message,
        statuses=COMPUTES,
        body=MessagesRequest,
        chat_fields=EXTENSIONS,
        streams=True,
        error=MessagesErrorResponse,
    )

    def parse(self, data: bytes) -> MessagesBody:
        return parse_messages(data)

    async def prepare(self, body: MessagesBody, model: ServedModel) -> Prepared:
        # Agents ask all models to think.
        with named_as(FIELD_NAMES):
            return await prepare_chat(body, model, always_parsed=True, thinking_is_optional=True)

    def respond(
        self, body: MessagesBody, prepared: Prepared, model: ServedModel, options: GenerationOptions
    ) -> Response:
        assert prepared.parsing is not None
        response = StreamedMessage if body.stream else FullMessage
        return response(body, model.name, options.request_id, jobs=prepared.jobs, parsing=prepared.parsing)
