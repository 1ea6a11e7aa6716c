"""Runs workloads of ``skiff bench offline --dump-workload`` on vLLM, through its offline ``LLM`` class.

python tests/peers/run_vllm.py MODEL_DIR WORKLOAD ...
"""

from pathlib import Path
from typing import Any

from peer_workload import make_parser, read_rounds, run_rounds
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    """Load the model with random weights, and run all rounds of each workload."""
    parser = make_parser(__doc__)
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--lora", type=Path, metavar="DIR", help="directory of make_adapters.py")
    parser.add_argument("--max-loras", type=int, default=16)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--base-only", action="store_true", help="with --lora: no request chooses an adapter")
    arguments = parser.parse_args()
    options: dict[str, Any] = {}
    adapters: list[LoRARequest] = []
    if arguments.lora is not None:
        paths = sorted(arguments.lora.iterdir(), key=lambda path: int(path.name))
        adapters = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]
        options = {
            "enable_lora": True,
            "max_loras": arguments.max_loras,
            "max_cpu_loras": max(len(adapters), arguments.max_loras),
            "max_lora_rank": arguments.max_lora_rank,
        }
    llm = LLM(
        arguments.model,
        load_format="dummy",
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        max_model_len=arguments.max_model_len,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_num_seqs=arguments.max_running_requests,
        gpu_memory_utilization=0.9,
        tensor_parallel_size=arguments.tensor_parallel_size,
        enable_prefix_caching=True,
        disable_log_stats=True,
        **options,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        sampling_params = [
            SamplingParams(
                temperature=arguments.temperature, ignore_eos=True, max_tokens=length, detokenize=False
            )
            for length in lengths
        ]
        # Requests choose adapters in turn, as in `skiff bench offline`.
        chosen = [adapters[number % len(adapters)] for number in range(len(prompts))] if adapters else None
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling_params,
            lora_request=None if arguments.base_only else chosen,
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    for workload in arguments.workload:
        run_rounds("vllm", read_rounds(workload), generate)


if __name__ == "__main__":  # vLLM starts processes that import this module again
    main()
