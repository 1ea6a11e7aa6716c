"""Trains the demo model from scratch and writes its weights and configuration beside the tokenizer.

Minutes on one GPU; `--steps 20 --rows 2` is a quick trial on a CPU. The data of a step depends on the seed alone.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from build_tokenizer import BOS, CONTEXT_TOKENS, END, EOS, MODEL, PAD
from rows import IGNORED, RowMaker
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

Batch = tuple[torch.Tensor, torch.Tensor]


class Steps(Dataset[Batch]):
    """Item i is the batch of step i: ids and labels, int64 [rows, length]."""

    def __init__(self, maker: RowMaker, steps: int) -> None:
        self.maker, self.steps = maker, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        ids, labels = self.maker(step)
        return torch.from_numpy(ids), torch.from_numpy(labels)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=MODEL, help="folder with the tokenizer's files")
    parser.add_argument(
        "--out", type=Path, default=MODEL, help="model folder to write into (default: the shipped one)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4800)
    parser.add_argument("--rows", type=int, default=32, help="rows per step (default: 32)")
    parser.add_argument(
        "--length", type=int, default=CONTEXT_TOKENS, help="tokens per row (default: the whole context)"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=2e-3, help="peak of the cosine schedule (default: 0.002)"
    )
    parser.add_argument("--warmup-steps", type=int, default=200)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=640)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that prepare data (default: 0, in this one)"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def llama_config(options: argparse.Namespace, tokenizer: Tokenizer) -> LlamaConfig:
    """A standard Llama: grouped-query attention, RoPE, tied embeddings."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.hidden // options.heads,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=[tokenizer.token_to_id(END), tokenizer.token_to_id(EOS)],
        pad_token_id=tokenizer.token_to_id(PAD),
        initializer_range=0.02,
    )


def learning_rate(options: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then a cosine from the peak to zero."""
    peak: float = options.learning_rate
    if step < options.warmup_steps:
        return peak * (step + 1) / float(options.warmup_steps)
    done = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def optimizer_for(model: LlamaForCausalLM, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms alone."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    norms = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def loss_of(model: LlamaForCausalLM, batch: Batch, device: torch.device) -> torch.Tensor:
    """Mean cross-entropy over the learned tokens of a batch."""
    ids, labels = (part.to(device, non_blocking=True) for part in batch)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def batches(options: argparse.Namespace) -> Iterator[Batch]:
    maker = RowMaker(
        options.tokenizer / "tokenizer.json", rows=options.rows, length=options.length, seed=options.seed
    )
    loader = DataLoader(Steps(maker, options.steps), batch_size=None, num_workers=options.workers)
    yield from loader


def train(model: LlamaForCausalLM, options: argparse.Namespace) -> None:
    """Runs all steps and prints a line every fiftieth of the way."""
    device = torch.device(options.device)
    optimizer = optimizer_for(model, options.weight_decay)
    started, every = time.monotonic(), max(1, options.steps // 50)
    for step, batch in enumerate(batches(options)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        loss = loss_of(model, batch, device)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % every == 0:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{options.steps} loss {loss.item():.4f} {seconds:.0f} s", flush=True)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes bfloat16 weights without the tied output head, config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.to(torch.bfloat16).contiguous().cpu() for name, weight in model.state_dict().items()
    }
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(model.config), indent=2) + "\n")
    stops = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    stops["pad_token_id"] = model.config.pad_token_id
    (folder / "generation_config.json").write_text(json.dumps(stops, indent=2) + "\n")


def config_json(config: LlamaConfig) -> dict[str, object]:
    """The configuration in the keys that every reader of Llama models knows, whatever version of transformers made it."""
    kept = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    kept += ["num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"]
    kept += ["tie_word_embeddings", "attention_bias", "mlp_bias", "attention_dropout", "initializer_range"]
    kept += ["bos_token_id", "eos_token_id", "pad_token_id"]
    head = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    return {
        **head,
        **{key: getattr(config, key) for key in kept},
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    model = LlamaForCausalLM(llama_config(options, tokenizer)).to(options.device)
    print(
        f"{sum(weight.numel() for weight in model.parameters()):,} parameters on {options.device}", flush=True
    )
    train(model, options)
    save(model, options.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if options.out.resolve() != options.tokenizer.resolve():
            shutil.copy(options.tokenizer / name, options.out / name)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
