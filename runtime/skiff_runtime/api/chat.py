"""POST /v1/chat/completions: from a body to a generation."""

from msgspec.structs import replace

from skiff_runtime.api.formats.chat_completions import ChatResponseFormatter
from skiff_runtime.api.formats.request_spec import Generation, ServedModel, text_options
from skiff_runtime.api.parsing.output_parser import offered_tools, plan_output
from skiff_runtime.api.parsing.structured_outputs import build_response_grammar, check_grammar_conflicts
from skiff_runtime.api.schemas.request_bodies import ChatCompletionRequest
from skiff_runtime.api.schemas.validation import parse
from skiff_runtime.messages import ChatPrompt


def prepare_chat(raw: bytes, model: ServedModel) -> Generation:
    """Validate a body. Raises ``RequestError``. Without a limit, the answer may fill the context."""
    body = parse(ChatCompletionRequest, raw)
    model.check_model_name(body.model)
    copies = body.n or 1
    prompt = build_chat_prompt(body)
    plan = plan_output(body, prompt, build_response_grammar(body), model.formats)
    text = text_options(body)
    return Generation(
        prompts=[prompt],
        sampling=model.sampling(body, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        text=replace(text, skip_special_tokens=False) if plan.keeps_special_tokens else text,
        reply=ChatResponseFormatter(model, body.stream_options, choices=copies, parsing=plan.parsing),
        stream=bool(body.stream),
        copies=copies,
        priority=body.priority or 0,
        grammar=check_grammar_conflicts(body, plan.grammar),
        user=body.user,
        cache_salt=body.cache_salt,
    )


def build_chat_prompt(body: ChatCompletionRequest) -> ChatPrompt:
    """What is rendered for ``body``."""
    goes_on = bool(body.continue_final_message)
    return ChatPrompt(
        [message.told() for message in body.messages],
        add_generation_prompt=not goes_on
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=goes_on,
        tools=[tool.offered() for tool in offered_tools(body)] or None,
        template_options=body.chat_template_kwargs or {},
    )
