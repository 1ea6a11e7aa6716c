"""The model of ``demo://``: its files, tokenizer, answers and training data."""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conversations import Message, conversation
from corpus import OFF_TOPIC, conflicts, facts, never_trained, normalized, off_topic, written_questions
from evaluate import Case, Speaker, asked, rendered
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import IGNORED, RowMaker
from tokenizers import Tokenizer
from tool_use import calls_text, offered, parallel_calls, results_text, single_call, system_text
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from skiff_runtime.demo import DIRECTORY
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import ChatPrompt
from skiff_runtime.vocabulary.chat_template import ChatTemplate

MAX_FOLDER_BYTES = 12_000_000
BOS = "<|bos|>"
TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " What is a pod? "},
    {"role": "assistant", "content": "A unit."},
    {"role": "user", "content": "Thanks"},
]
RENDERED = (
    "<|bos|><|system|>Be kind.<|end|><|user|>What is a pod?<|end|><|assistant|>A unit.<|end|>"
    "<|user|>Thanks<|end|><|assistant|>"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_pod_status",
            "description": " Get the status of a pod. ",
            "parameters": {
                "type": "object",
                "properties": {
                    "namespace": {"type": "string"},
                    "name": {"type": "string"},
                    "limit": {"type": "integer"},
                },
                "required": ["namespace", "name"],
            },
        },
    },
    {"type": "function", "function": {"name": "list_nodes"}},
]
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Is web-0 in shop running?"},
    {
        "role": "assistant",
        "content": "I will look.",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "get_pod_status", "arguments": {"namespace": "shop", "name": "web-0"}},
            },
            {"type": "function", "function": {"name": "list_nodes", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": '{"phase": "Running"}'},
    {"role": "tool", "content": [{"type": "text", "text": "[]"}]},
]
TOOLS_RENDERED = (
    "<|bos|><|system|>Tools:\nget_pod_status(namespace, name, limit?: integer): Get the status of a pod.\nlist_nodes()"
    "<|end|><|user|>Is web-0 in shop running?<|end|><|assistant|>I will look.\n<tool_call>\n"
    '{"name": "get_pod_status", "arguments": {"namespace": "shop", "name": "web-0"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "list_nodes", "arguments": {}}\n</tool_call><|end|><|user|><tool_response>{"phase": "Running"}'
    "</tool_response>\n<tool_response>[]</tool_response><|end|><|assistant|>"
)
GOLDEN = {
    "How do I deploy a model with Skiff?": "deploy-model",
    "how do i deploy a model with skiff": "deploy-model",
    "Hey, how do I deploy a model with Skiff?": "deploy-model",
    "What is Skiff?": "skiff",
    "What is Kubernetes?": "kubernetes",
    "What is a pod?": "pod",
    "What does the scheduler of Skiff do?": "scheduler-skiff",
    "How does the radix KV cache work?": "radix-cache",
    "How do I scale an InferenceService?": "scale-model",
    "How do I roll back a Deployment?": "rollout-undo",
    "Why is my pod Pending?": "pending-pod",
    "Who are you?": "who-are-you",
    "Hello!": "hello",
    "Thank you!": "thanks",
    "What is the capital of France?": OFF_TOPIC,
}


def answer(fact_id: str) -> str:
    return str(off_topic()["answer"]) if fact_id == OFF_TOPIC else facts()[fact_id].answer


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DIRECTORY / name).read_text())
    return content


@cache
def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return load_tokenizer()


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    config = read_json("tokenizer_config.json")
    return ChatTemplate(config["chat_template"], {"bos_token": config["bos_token"]})


@pytest.fixture(scope="module")
def speaker() -> Iterator[Speaker]:
    """Yield the model in float32, with one thread, since its matrix products are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Speaker(DIRECTORY, "cpu", torch.float32)
    torch.set_num_threads(threads)


def test_directory_is_complete_and_small() -> None:
    files = [path for path in DIRECTORY.iterdir() if path.is_file()]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in files
    }
    assert sum(path.stat().st_size for path in files) <= MAX_FOLDER_BYTES


def test_configuration_is_divisible_by_two_ranks(tokenizer: Tokenizer) -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]
    split = ("num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size")
    assert all(config[key] % 2 == 0 for key in split)
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["max_position_embeddings"] == read_json("tokenizer_config.json")["model_max_length"]


def test_special_tokens_agree_between_files(tokenizer: Tokenizer) -> None:
    generation = read_json("generation_config.json")
    stops = [tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|eos|>")]
    assert generation["eos_token_id"] == read_json("config.json")["eos_token_id"] == stops
    assert generation["bos_token_id"] == tokenizer.token_to_id(BOS)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80))
def test_encoding_and_decoding_restores_any_text(text: str) -> None:
    ids = load_tokenizer().encode(text, add_special_tokens=False).ids
    assert load_tokenizer().decode(ids, skip_special_tokens=False) == text


def test_plain_text_and_rendered_chats_have_one_bos(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    bos = tokenizer.token_to_id(BOS)
    assert bos is not None
    assert tokenizer.encode("Kubernetes is").ids.count(bos) == 1
    chat = template.render(ChatPrompt(TURNS))
    assert chat == RENDERED
    assert tokenizer.encode(chat, add_special_tokens=False).ids.count(bos) == 1


def test_transformers_renders_and_encodes_alike(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(DIRECTORY)
    assert isinstance(theirs, PreTrainedTokenizerFast)
    assert theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) == RENDERED
    assert theirs("Kubernetes is")["input_ids"] == tokenizer.encode("Kubernetes is").ids


def test_chat_template_refuses_an_unknown_role(template: ChatTemplate) -> None:
    with pytest.raises(InvalidRequest, match="system, user, assistant or tool"):
        template.render(ChatPrompt([{"role": "critic", "content": "4"}]))


def test_chat_template_writes_tools_calls_and_results(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    assert template.render(ChatPrompt(TOOL_TURNS, tools=TOOLS)) == TOOLS_RENDERED
    theirs = AutoTokenizer.from_pretrained(DIRECTORY)
    assert (
        theirs.apply_chat_template(TOOL_TURNS, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        == TOOLS_RENDERED
    )
    with_prompt = template.render(ChatPrompt([TURNS[0], TOOL_TURNS[0]], tools=TOOLS))
    assert with_prompt.startswith("<|bos|><|system|>Be kind.\nTools:\nget_pod_status(")


def test_training_conversations_with_tools_equal_rendered_chats(template: ChatTemplate) -> None:
    rng = random.Random(11)
    for index in range(100):
        tools = offered(rng)
        drawn = (parallel_calls if index % 2 else single_call)(tools, rng)
        calls = [{"function": {"name": name, "arguments": values}} for name, values in drawn.calls]
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": drawn.question},
            {"role": "assistant", "content": None, "tool_calls": calls},
            *({"role": "tool", "content": result} for result in drawn.results),
        ]
        definitions = [tool.to_openai() for tool in tools]
        system = Message("system", system_text("", definitions))
        prompt = template.render(ChatPrompt(turns, tools=definitions))
        assert prompt == rendered(Case((system, *drawn.turn()[:-1]), ""))


def test_names_in_questions_about_tools_are_copied_into_the_calls() -> None:
    rng = random.Random(12)
    for index in range(300):
        drawn = (parallel_calls if index % 5 == 0 else single_call)(
            offered(rng), rng, held_out=index % 2 == 0
        )
        values = [value for _, arguments in drawn.calls for value in arguments.values()]
        assert all(str(value) in drawn.question or value == "default" for value in values), drawn


def test_training_rows_equal_rendered_chats(
    tokenizer: Tokenizer, template: ChatTemplate, tmp_path: Path
) -> None:
    messages = [Message(turn["role"], turn["content"].strip()) for turn in TURNS]
    assert rendered(Case(tuple(messages), "")) == RENDERED
    ids, labels = RowMaker(DIRECTORY / "tokenizer.json", rows=1, length=64, seed=0).chat(messages)
    chat = template.render(ChatPrompt(TURNS, add_generation_prompt=False))
    assert ids == tokenizer.encode(chat, add_special_tokens=False).ids
    learned = [token for token in labels if token != IGNORED]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "A unit.<|end|>"


def test_golden_questions_get_their_answers(speaker: Speaker) -> None:
    cases = [asked(question, answer(fact_id)) for question, fact_id in GOLDEN.items()]
    assert [case for case, agrees in zip(cases, speaker.agrees(cases), strict=True) if not agrees] == []


def test_demo_question_gets_its_answer_by_greedy_decoding(speaker: Speaker) -> None:
    case = asked("How do I deploy a model with Skiff?", answer("deploy-model"))
    assert speaker.answers([case]) == [case.expected]


def test_golden_questions_get_the_same_answers_in_bfloat16() -> None:
    # Without oneDNN: some machines announce AMX but trap its instructions, and the guard against that must run before
    # the process's first matrix product.
    with torch.backends.mkldnn.flags(enabled=False):
        cases = [asked(question, answer(fact_id)) for question, fact_id in GOLDEN.items()][:5]
        assert all(Speaker(DIRECTORY, "cpu", torch.bfloat16).agrees(cases))


def test_most_held_out_wordings_get_their_answers(speaker: Speaker) -> None:
    cases = [asked(*pair) for pair in written_questions("report")]
    assert sum(speaker.agrees(cases)) / len(cases) >= 0.85


def test_follow_up_refers_to_the_last_answer(speaker: Speaker) -> None:
    pod = facts()["pod"]
    history = (Message("user", "What is a pod?"), Message("assistant", pod.answer))
    more = Case((*history, Message("user", "Tell me more.")), str(pod.more))
    logs = Case((*history, Message("user", "How do I see its logs?")), facts()["pod-logs"].answer)
    assert speaker.agrees([more, logs]) == [True, True]


TOOL_QUESTIONS = {
    "Is the pod web-0 in namespace shop running?": [
        ("get_pod_status", {"namespace": "shop", "name": "web-0"})
    ],
    "Which pods are in namespace shop?": [("list_pods", {"namespace": "shop"})],
    "What is the status of the pods web-0 and web-1 in namespace shop?": [
        ("get_pod_status", {"namespace": "shop", "name": "web-0"}),
        ("get_pod_status", {"namespace": "shop", "name": "web-1"}),
    ],
}
TOOL_RESULTS = {
    "Is the pod web-0 in namespace shop running?": (
        ['{"phase": "Running", "restarts": 2}'],
        "The pod web-0 in namespace shop is Running. Its restart count is 2.",
    ),
    "Which pods are in namespace shop?": (
        ['["web-0", "web-1"]'],
        "The pods in namespace shop are web-0 and web-1.",
    ),
}


def test_tools_of_the_guide_are_called_and_their_results_reported(speaker: Speaker) -> None:
    listing = {"type": "object", "properties": {"namespace": {"type": "string"}}, "required": ["namespace"]}
    definition = {"name": "list_pods", "description": "List the pods of a namespace.", "parameters": listing}
    status = {**TOOLS[0]["function"], "parameters": {**listing, "properties": {"namespace": {}, "name": {}}}}
    status["parameters"]["required"] = ["namespace", "name"]
    tools = [{"function": status}, {"function": definition}]
    system = Message("system", system_text("", tools))
    cases = [
        Case((system, Message("user", question)), calls_text(calls))
        for question, calls in TOOL_QUESTIONS.items()
    ]
    for question, (results, sentence) in TOOL_RESULTS.items():
        call = Message("assistant", calls_text(TOOL_QUESTIONS[question]))
        turns = (system, Message("user", question), call, Message("user", results_text(results)))
        cases.append(Case(turns, sentence))
    cases += [
        Case((system, Message("user", question)), answer(GOLDEN[question]))
        for question in ("What is a pod?", "What is the capital of France?")
    ]
    assert [case for case, agrees in zip(cases, speaker.agrees(cases), strict=True) if not agrees] == []


def test_plain_prompt_is_completed_to_a_whole_sentence(speaker: Speaker) -> None:
    texts = speaker.generate([f"{BOS}Kubernetes is", f"{BOS}A Deployment"])
    assert all(text.endswith(".") and len(text) > 20 for text in texts)


def test_no_question_leads_to_two_facts() -> None:
    assert conflicts() == []


def test_follow_ups_and_written_questions_name_facts_that_exist() -> None:
    targets = [target for fact in facts().values() for _, target in fact.follow]
    assert all(target in facts() for target in targets)
    assert len(written_questions("choose")) >= 100
    assert len(written_questions("report")) >= 80


def test_held_out_questions_are_not_in_the_training_data() -> None:
    trained = {normalized(question) for fact in facts().values() for question in fact.questions}
    assert not trained & never_trained()
    rng = random.Random(7)
    said = {normalized(message.content) for _ in range(500) for message in conversation(rng)}
    assert not said & never_trained()


def test_answers_are_whole_sentences_of_plain_characters() -> None:
    for fact in facts().values():
        for text in (fact.answer, fact.more or fact.answer):
            assert text.isascii(), fact.id
            assert text.endswith((".", "?", "!")), fact.id
            assert text[0].isupper(), fact.id


def test_batches_depend_only_on_seed_and_step() -> None:
    def make(seed: int) -> RowMaker:
        return RowMaker(DIRECTORY / "tokenizer.json", rows=2, length=128, seed=seed)

    again, first, other = make(1)(5)[0], make(1)(5)[0], make(2)(5)[0]
    assert (again == first).all()
    assert (first != other).any()
