"""From a request body to tokenized prompts."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import RequestError, RequestTooLong
from pdserve.rpc.protobuf import unpack_tokens
from router.completions_api.jobs import check_vocabulary
from router.fleet.fleet import ModelLimits
from router.fleet.policy import EMBED
from router.pooling.request_bodies import EmbeddingBody, PairBody
from router.text.chat.template import RenderRequest
from router.text.prompt import Prompt
from router.text.prompt_encoder import PromptEncoder

MAX_PAIR_CHARS = 32 << 20  # characters in all pairs of a request; each pair repeats its query

# Prompt of https://huggingface.co/Qwen/Qwen3-Reranker-0.6B; its chat template lacks the prompt.
RERANKER_PROMPT = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


async def embedding_prompts(body: EmbeddingBody, encoder: PromptEncoder, limits: ModelLimits) -> list[Prompt]:
    """Raises RequestError for inputs or dimensions that the model cannot take."""
    _check_dimensions(body.dimensions, limits)
    prompts = await encoder.encode_all(body.pack_inputs(), body.add_special_tokens, "input")
    most = limits.length_beyond(1) if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    if most is not None:
        prompts = [Prompt(prompt.last(most)) for prompt in prompts]
    return _checked(prompts, "input", limits)


def _check_dimensions(dimensions: int | None, limits: ModelLimits) -> None:
    if dimensions is None or dimensions in limits.vector_sizes:
        return
    size = max(limits.vector_sizes)
    if not limits.matryoshka:
        text = f"dimensions is {dimensions}; embeddings of this model have {size} and cannot be shortened: leave it out"
        raise RequestError(text, "dimensions")
    if dimensions > size:
        raise RequestError(f"dimensions is {dimensions}; embeddings of this model have at most {size}", "dimensions")


async def pair_prompts(body: PairBody, encoder: PromptEncoder, limits: ModelLimits) -> list[Prompt]:
    """Return a prompt per pair for a cross-encoder; for an embedding model the queries, then the documents.

    Raises RequestError for texts that the model cannot take.
    """
    queries, documents = body.pairs
    if body.max_tokens_per_doc is not None:
        documents = await _cut(documents, body.max_tokens_per_doc, encoder)
    if limits.task == EMBED:
        _refuse_instruction(body)
        return _checked(await encoder.encode_all([*queries, *documents], True, "documents"), "documents", limits)
    pairs = list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))
    _check_size(pairs)
    if _has_pair_template(encoder.template):
        requests = [_render_request(query, document, body.instruction) for query, document in pairs]
        prompts = [await encoder.encode_chat(request, False) for request in requests]
    elif limits.yes_or_no:
        texts = [_reranker_prompt(query, document, body.instruction) for query, document in pairs]
        prompts = await encoder.encode_all(texts, True, "documents")
    else:
        _refuse_instruction(body)
        prompts = await encoder.encode_all(pairs, True, "documents")
    return _checked(prompts, "documents", limits)


async def _cut(documents: Sequence[str], most: int, encoder: PromptEncoder) -> list[str]:
    """Return the texts of the first ``most`` tokens of each document."""
    prompts = await encoder.encode_all(documents, False, "documents")
    long = [at for at, prompt in enumerate(prompts) if prompt.num_tokens > most]
    texts = await encoder.decode_all([unpack_tokens(prompts[at].first(most)) for at in long])
    cut = dict(zip(long, texts, strict=True))
    return [cut.get(at, document) for at, document in enumerate(documents)]


def _check_size(pairs: Sequence[tuple[str, str]]) -> None:
    num_chars = sum(len(query) + len(document) for query, document in pairs)
    if num_chars > MAX_PAIR_CHARS:
        text = f"the pairs have {num_chars} characters; the limit is {MAX_PAIR_CHARS}, send fewer or shorter ones"
        raise RequestError(text, "documents")


def _has_pair_template(template: str) -> bool:
    """Whether a chat template renders a query and a document, as templates of rerankers do; chats have other roles."""
    return all(f"'{role}'" in template or f'"{role}"' in template for role in ("query", "document"))


def _render_request(query: str, document: str, instruction: str | None) -> RenderRequest:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return RenderRequest([{"role": "system", "content": instruction}, *messages] if instruction else messages)


def _reranker_prompt(query: str, document: str, instruction: str | None) -> str:
    return RERANKER_PROMPT.format(instruction=instruction or DEFAULT_INSTRUCTION, query=query, document=document)


def _refuse_instruction(body: PairBody) -> None:
    if body.instruction:
        raise RequestError("the prompts of this model have no instruction; leave it out", "instruction")


def _checked(prompts: list[Prompt], field: str, limits: ModelLimits) -> list[Prompt]:
    for index, prompt in enumerate(prompts):
        wrong = prompt.first_outside(limits.vocab_size)
        check_vocabulary(field, [] if wrong is None else [wrong], limits)
        if not prompt.num_tokens:
            raise RequestError(f"text {index} has 0 tokens; give at least one", field)
        if prompt.num_tokens > limits.max_model_len:
            text = f"text {index} has {prompt.num_tokens} tokens; the limit is {limits.max_model_len}, shorten it"
            raise RequestTooLong(text, field, "context_length_exceeded")
    return prompts
