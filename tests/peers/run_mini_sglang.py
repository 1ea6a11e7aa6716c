"""Runs workloads of ``skiff bench offline --dump-workload`` on Mini-SGLang, through its offline ``LLM`` class.

python tests/peers/run_mini_sglang.py MODEL_DIR WORKLOAD ...
"""

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from peer_workload import make_parser, read_rounds, run_rounds


def main() -> None:
    """Load the model with random weights, and run all rounds of each workload."""
    parser = make_parser(__doc__)
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--attention-backend", default="fi,fi", help="prefill,decode (default: %(default)s)")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        use_dummy_weight=True,
        max_seq_len_override=arguments.max_model_len,
        max_extend_tokens=arguments.max_num_batched_tokens,
        max_running_req=arguments.max_running_requests,
        cuda_graph_max_bs=arguments.max_running_requests,
        page_size=arguments.page_size,
        attention_backend=arguments.attention_backend,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        sampling_params = [
            SamplingParams(temperature=arguments.temperature, ignore_eos=True, max_tokens=length)
            for length in lengths
        ]
        return [len(output["token_ids"]) for output in llm.generate(prompts, sampling_params)]

    for workload in arguments.workload:
        run_rounds("mini-sglang", read_rounds(workload), generate)


if __name__ == "__main__":
    main()
