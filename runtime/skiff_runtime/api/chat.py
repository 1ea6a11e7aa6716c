"""POST /v1/chat/completions: from a body to a generation."""

from skiff_runtime.api.chat_format import ChatFormat
from skiff_runtime.api.generation import Generation, ServedModel, text_options
from skiff_runtime.api.response_format import answer_grammar, check_with_grammar
from skiff_runtime.api.schemas import ChatRequest, Message
from skiff_runtime.api.validation import parse
from skiff_runtime.messages import ChatPrompt

_ROLES = {"developer": "system"}


def prepare_chat(raw: bytes, model: ServedModel) -> Generation:
    """Validate a body. Raises ``RequestError``. Without a limit, the answer may fill the context."""
    body = parse(ChatRequest, raw)
    model.check_name(body.model)
    copies = body.n or 1
    return Generation(
        prompts=[chat_prompt(body)],
        sampling=model.sampling(body, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        text=text_options(body),
        reply=ChatFormat(model, body.stream_options, choices=copies),
        stream=bool(body.stream),
        copies=copies,
        priority=body.priority or 0,
        grammar=check_with_grammar(body, answer_grammar(body)),
        user=body.user,
    )


def chat_prompt(body: ChatRequest) -> ChatPrompt:
    goes_on = bool(body.continue_final_message)
    return ChatPrompt(
        [_message(each) for each in body.messages],
        add_generation_prompt=not goes_on
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=goes_on,
        template_options=body.chat_template_kwargs or {},
    )


def _message(message: Message) -> dict[str, str]:
    content = "".join(part.text for part in message.content)
    return {"role": _ROLES.get(message.role, message.role), "content": content}
