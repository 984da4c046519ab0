"""/v1/completions."""

from __future__ import annotations

from pdserve.rpc.protobuf import unpack_tokens
from router.completions_api.jobs import encode_completion, make_job, prepared_request
from router.completions_api.request_bodies import CompletionBody, parse_completion
from router.completions_api.response_encoders import CompletionEncoder
from router.completions_api.response_objects import Completion
from router.completions_api.response_writers import FullResponse, StreamedResponse, make_encoder
from router.completions_api.token_params import (
    NO_THINKING_BUDGET,
    ThinkingParams,
    check_logprobs,
    named_tokens,
    thinking_params,
)
from router.dialect.dialect import GenerateDialect, Prepared
from router.dialect.operation import COMPUTES, Operation
from router.dialect.responses import Response
from router.fleet.policy import GENERATE
from router.generation.job import GenerationOptions
from router.service import ServedModel
from router.text.prompt import Prompt

_MARKER_TOKENS = 16  # at the end of a prompt, among which a marker of reasoning may be


class CompletionsDialect(GenerateDialect[CompletionBody]):
    name = "completions"
    trace_name = "text_completion"
    paths = ("/v1/completions",)
    operation = Operation(
        summary="Complete a prompt",
        response=Completion,
        statuses=COMPUTES,
        body=CompletionBody,
        streams=True,
    )

    def parse(self, data: bytes) -> CompletionBody:
        return parse_completion(data)

    async def prepare(self, body: CompletionBody, model: ServedModel) -> Prepared:
        limits = model.fleet.limits((GENERATE,))
        check_logprobs(body, limits.vocab_size, model.options.max_logprobs)
        prompts = await encode_completion(body, model.encoder, limits)
        structure = await model.grammars.conversion().run(body.structure.grammar)
        grammar = await model.grammars.translated(structure)
        await model.grammars.check(grammar)
        named = await named_tokens(body, model.encoder)
        if body.echo:
            prompts = await model.encoder.add_echo(prompts, body.num_logprobs >= 0, body.add_special_tokens)
        jobs = [
            make_job(
                prompt,
                body,
                limits,
                grammar=grammar.text,
                named=named,
                thinking=_thinking(model, body, prompt),
                defaults=model.defaults,
            )
            for prompt in prompts
        ]
        return await prepared_request(body, jobs, parsing=None)

    def respond(
        self, body: CompletionBody, prepared: Prepared, model: ServedModel, options: GenerationOptions
    ) -> Response:
        response = StreamedResponse if body.stream else FullResponse
        encoder = make_encoder(CompletionEncoder, body, prepared.jobs, model=model, request_id=options.request_id)
        return response(encoder, body, prepared.jobs)


def _thinking(model: ServedModel, body: CompletionBody, prompt: Prompt) -> ThinkingParams:
    """Return the budget of reasoning. Raises RequestError."""
    budget = body.thinking_token_budget
    state = None
    if budget is None or budget == -1:
        return NO_THINKING_BUDGET
    if model.parsers.reasoning is not None:
        state = model.parsers.state_after(model.tokenizer.decode(unpack_tokens(prompt.last(_MARKER_TOKENS))))
    return thinking_params(budget, model.tokenizer, state)
