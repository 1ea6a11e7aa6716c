"""POST /v1/chat/completions: from a body to a generation."""

from msgspec.structs import replace

from skiff_runtime.api.answers import offered_tools, plan_answer
from skiff_runtime.api.chat_format import ChatFormat
from skiff_runtime.api.generation import Generation, ServedModel, text_options
from skiff_runtime.api.response_format import answer_grammar, check_with_grammar
from skiff_runtime.api.schemas import ChatRequest
from skiff_runtime.api.validation import parse
from skiff_runtime.messages import ChatPrompt


def prepare_chat(raw: bytes, model: ServedModel) -> Generation:
    """Validate a body. Raises ``RequestError``. Without a limit, the answer may fill the context."""
    body = parse(ChatRequest, raw)
    model.check_name(body.model)
    copies = body.n or 1
    prompt = chat_prompt(body)
    plan = plan_answer(body, prompt, answer_grammar(body), model.formats)
    text = text_options(body)
    return Generation(
        prompts=[prompt],
        sampling=model.sampling(body, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        text=replace(text, skip_special_tokens=False) if plan.shows_special else text,
        reply=ChatFormat(model, body.stream_options, choices=copies, parsing=plan.parsing),
        stream=bool(body.stream),
        copies=copies,
        priority=body.priority or 0,
        grammar=check_with_grammar(body, plan.grammar),
        user=body.user,
        cache_salt=body.cache_salt,
    )


def chat_prompt(body: ChatRequest) -> ChatPrompt:
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
