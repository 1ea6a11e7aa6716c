"""POST /v1/completions: from a body to a generation."""

from skiff_runtime.api.formats.completions import CompletionResponseFormatter, Echo
from skiff_runtime.api.formats.request_spec import Generation, ServedModel, text_options
from skiff_runtime.api.parsing.structured_outputs import build_response_grammar, check_grammar_conflicts
from skiff_runtime.api.schemas.request_bodies import CompletionRequest
from skiff_runtime.api.schemas.validation import parse


def prepare_completion(raw: bytes, model: ServedModel) -> Generation:
    """Validate a body. Raises ``RequestError``."""
    body = parse(CompletionRequest, raw)
    model.check_model_name(body.model)
    copies = body.n or 1
    return Generation(
        prompts=body.prompt,
        sampling=model.sampling(body, logprobs=body.logprobs, prompt_logprobs=_of_prompt(body)),
        text=text_options(body),
        reply=CompletionResponseFormatter(
            model,
            body.stream_options,
            choices=copies * len(body.prompt),
            copies=copies,
            logprobs=body.logprobs is not None,
            echo=_echo(body),
        ),
        stream=bool(body.stream),
        copies=copies,
        priority=body.priority or 0,
        grammar=check_grammar_conflicts(body, build_response_grammar(body)),
        user=body.user,
        cache_salt=body.cache_salt,
    )


def _of_prompt(body: CompletionRequest) -> int | None:
    """How many log-probabilities of the prompt's tokens are needed; what ids write is known from them, too."""
    if not body.echo:
        return None
    given_as_ids = any(isinstance(prompt, list) for prompt in body.prompt)
    return 0 if body.logprobs is None and given_as_ids else body.logprobs


def _echo(body: CompletionRequest) -> Echo | None:
    if not body.echo:
        return None
    texts = [prompt if isinstance(prompt, str) else None for prompt in body.prompt]
    return Echo(texts, alone=body.max_tokens == 0)
