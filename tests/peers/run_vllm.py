"""Runs a workload of ``skiff bench offline --dump-workload`` on vLLM, through its offline ``LLM`` class.

python tests/peers/run_vllm.py MODEL_DIR WORKLOAD
"""

from peer_workload import make_parser, read_rounds, run_rounds
from vllm import LLM, SamplingParams


def main() -> None:
    """Load the model with random weights, and run all rounds of the workload."""
    parser = make_parser(__doc__)
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments = parser.parse_args()
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
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        sampling_params = [
            SamplingParams(
                temperature=arguments.temperature, ignore_eos=True, max_tokens=length, detokenize=False
            )
            for length in lengths
        ]
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling_params, use_tqdm=False
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    run_rounds("vllm", read_rounds(arguments.workload), generate)


if __name__ == "__main__":  # vLLM starts processes that import this module again
    main()
