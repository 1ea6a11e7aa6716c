import json
from pathlib import Path

import scenarios as skiff

DOCUMENTS = [{"question": "Hello! I am the Skiff demo", "choices": [" model.", " mode"], "answer": 0}] * 3
CHOICE_TASK = """
task: pods_choice
dataset_path: json
dataset_kwargs: {data_files: {test: documents.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
CHAT_TASK = """
task: pods_chat
dataset_path: json
dataset_kwargs: {data_files: {test: documents.json}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "pod"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
"""


def evaluate(model: str, task: str, arguments: str, *flags: str) -> dict[str, float]:
    Path("documents.json").write_text("\n".join(json.dumps(document) for document in DOCUMENTS))
    Path("tasks").mkdir(exist_ok=True)
    Path("tasks/choice.yaml").write_text(CHOICE_TASK)
    Path("tasks/chat.yaml").write_text(CHAT_TASK)
    command = ["lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", task]
    skiff.run_command([*command, "--include_path", "tasks", "--output_path", f"results-{task}", *flags])
    [report] = Path(f"results-{task}").rglob("results_*.json")
    found: dict[str, float] = json.loads(report.read_text())["results"][task]
    return found


def loglikelihood() -> None:
    arguments = f"model={skiff.DEMO},base_url={skiff.DEMO_URL}/v1/completions,tokenizer_backend=remote"
    results = evaluate("local-completions", "pods_choice", f"{arguments},num_concurrent=1,max_retries=1")
    skiff.check(results["acc,none"] == 1.0, results)


def chat_completions() -> None:
    arguments = f"model={skiff.DEMO},base_url={skiff.DEMO_URL}/v1/chat/completions"
    flags = ("--apply_chat_template", "--log_samples")
    results = evaluate("local-chat-completions", "pods_chat", f"{arguments},max_retries=1", *flags)
    skiff.check(results["exact_match,none"] == 0.0, results)
    [samples] = Path("results-pods_chat").rglob("samples_*.jsonl")
    answers = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    skiff.check(len(answers) == len(DOCUMENTS) and all(answers), answers)


skiff.run_scenarios(loglikelihood, chat_completions)
