"""Tiny models of embeddings and reranking, in the form in which Qwen3-Embedding and Qwen3-Reranker are published."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tiny_models import edit_json, load_reference, make_model
from tiny_tokenizer import EOS, EOS_ID, VOCAB_SIZE
from tokenizers import Tokenizer, processors
from transformers import AutoModel, AutoTokenizer

QUERY_PROMPT: Final = "Instruct: find the boat\nQuery:"
RERANKER_TOKENS: Final = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no")


def write_embedding_files(
    directory: Path, *, mode: str = "lasttoken", normalize: bool = True, default_prompt: str | None = None
) -> None:
    """Write the files of sentence-transformers, which name pooling, normalization and prompts."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    pooling = {f"pooling_mode_{each}": each.removesuffix("_tokens") == mode for each in modes}
    (directory / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, **pooling, "include_prompt": True})
    )
    prompts = {"query": QUERY_PROMPT, "document": ""}
    (directory / "config_sentence_transformers.json").write_text(
        json.dumps(
            {"prompts": prompts, "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"}
        )
    )


def append_eos(directory: Path) -> None:
    """Make the tokenizer append the end of sequence to a text, as that of Qwen3-Embedding does."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, EOS_ID)]),
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def make_embedding_model(directory: Path, family: str = "qwen3", *, seed: int = 0, **files: Any) -> Path:
    """Write a decoder without an output head: the names of its tensors have no prefix, though its class has a head."""
    made = make_model(directory / "whole", family, seed=seed, tie_word_embeddings=False)
    architectures = json.loads((made / "config.json").read_text())["architectures"]
    model = directory / "model"
    AutoModel.from_pretrained(made, dtype=torch.float32).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((made / name).read_bytes())
    edit_json(model / "config.json", architectures=architectures)
    append_eos(model)
    write_embedding_files(model, **files)
    return model


def make_reranker(directory: Path, *, seed: int = 0) -> Path:
    """Write a model whose vocabulary has the tokens of Qwen3-Reranker's prompt and answers; its name tells what it is."""
    model = make_model(
        directory / "Tiny-Reranker", "qwen3", seed=seed, vocab_size=VOCAB_SIZE + len(RERANKER_TOKENS)
    )
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(list(RERANKER_TOKENS))
    tokenizer.save(str(model / "tokenizer.json"))
    return model


@torch.inference_mode()
def reference_embeddings(
    directory: Path, texts: Sequence[str | list[int]], *, mean: bool = False, normalize: bool = True
) -> torch.Tensor:
    """Compute the embeddings float32[N, size] of a decoder without a head with transformers, one text at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(directory), load_decoder(directory)
    vectors = []
    for text in texts:
        ids = tokenizer(text)["input_ids"] if isinstance(text, str) else text
        hidden = model(torch.tensor([ids])).last_hidden_state[0].float()
        vectors.append(hidden.mean(0) if mean else hidden[-1])
    stacked = torch.stack(vectors)
    return torch.nn.functional.normalize(stacked, dim=1) if normalize else stacked


def load_decoder(directory: Path) -> Any:
    return AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_scores(directory: Path, instruction: str, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Compute the scores as the model card of Qwen3-Reranker does: parts of the prompt are encoded by themselves."""
    tokenizer, model = AutoTokenizer.from_pretrained(directory), load_reference(directory)
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    answers = tokenizer.convert_tokens_to_ids(["no", "yes"])
    scores = []
    for query, document in pairs:
        pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = [
            token
            for part in (before, pair, after)
            for token in tokenizer(part, add_special_tokens=False)["input_ids"]
        ]
        logits = model(torch.tensor([ids])).logits[0, -1, answers].float()
        scores.append(float(logits.log_softmax(0)[1].exp()))
    return scores
