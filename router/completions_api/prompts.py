"""From a request body to tokenized prompts."""

from __future__ import annotations

from router.completions_api.request_bodies import ChatBody, CompletionBody, GenerateBody
from router.fleet.fleet import ModelLimits
from router.text.prompt import Prompt
from router.text.prompt_echo import with_echo
from router.text.prompt_encoder import PromptEncoder
from router.text.tokenizer import Tokenizer


async def encode_prompts(body: GenerateBody, encoder: PromptEncoder, limits: ModelLimits) -> list[Prompt]:
    """Render and tokenize, then truncate. Raises RequestError for messages that cannot be rendered."""
    if isinstance(body, ChatBody):
        prompts = [await encoder.encode_chat(body.render_request, body.add_special_tokens)]
    else:
        assert isinstance(body, CompletionBody)
        prompts = await encoder.encode_completion(body.pack_prompts(), body.add_special_tokens)
    return [_truncated(prompt, body, limits) for prompt in prompts]


def _truncated(prompt: Prompt, body: GenerateBody, limits: ModelLimits) -> Prompt:
    """Keep the last ``truncate_prompt_tokens`` tokens; -1 leaves room for ``max_tokens``, or for one token."""
    most = body.truncate_prompt_tokens
    if most == -1:
        most = max(1, limits.max_model_len - (body.output_limit or 1))
    if most is None or prompt.num_tokens <= most:
        return prompt
    # A chat keeps its text: the end of it says whether the prompt opens reasoning.
    return Prompt(prompt.last(most), prompt.text if isinstance(body, ChatBody) else None)


async def add_echo(prompts: list[Prompt], body: GenerateBody, tokenizer: Tokenizer) -> list[Prompt]:
    """Add the texts and offsets that ``echo`` sends."""
    if not (isinstance(body, CompletionBody) and body.echo):
        return prompts
    return await with_echo(prompts, body.num_logprobs >= 0, body.add_special_tokens, tokenizer)
