"""Tuned numbers of the GPU kernels, and of the thresholds that choose between them, keyed by device.

Each number stands beside the measurement that chose it. Unless a comment says otherwise, a measurement was made on one
NVIDIA H200 with Triton 3.6, in a CUDA graph, over inputs that no cache holds. ``skiff tune`` measures the candidates on
the GPU at hand and prints an entry for ``TUNINGS``.

The key is the compute capability and not the name of the GPU: ``skiff prebuild`` compiles kernels on machines that have
no GPU, where the capability is all that is known, and a start must find exactly what was compiled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

WIDE_HEAD_DIM: Final = 128
"""Heads with more dimensions than this take smaller attention tiles: the usual ones exceed the shared memory."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The KV tokens of one loop iteration, the warps of a program and the stages of its software pipeline."""

    tokens: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionTuning:
    """Numbers of ``triton.attention.decode_attention``."""

    target_programs: int
    """The programs of a launch, from which the number of splits of each row follows."""
    max_splits: int
    min_split_tokens: int
    """The tokens of the longest possible context that justify one more split."""
    max_group_heads: int
    """The query heads of one KV head that read a shared prefix together."""
    few_group_heads: int
    """Groups of at most this many query heads take a smaller tile."""
    max_fused_rows: int
    fused_tile: AttentionTile
    """Up to ``max_fused_rows`` rows, QK norm, RoPE and the store of K and V are a part of the launch of attention."""
    few_rows: int
    few_splits: int
    """A launch with more than ``few_rows`` rows in at most ``few_splits`` splits takes ``throughput_tile``."""
    throughput_tile: AttentionTile
    latency_tile: AttentionTile
    fp8_latency_tile: AttentionTile
    wide_tile: AttentionTile
    """For heads of more than ``WIDE_HEAD_DIM`` dimensions."""
    prefix_tile: AttentionTile
    wide_prefix_tile: AttentionTile


@dataclass(frozen=True, slots=True)
class PrefillAttentionTile:
    """The query tokens of a program, and what an ``AttentionTile`` has."""

    queries: int
    tokens: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The columns of one loop iteration, for one row of the weight or for two adjacent ones, and the warps."""

    columns: int
    pair: bool = False
    warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvTuning:
    """Numbers of ``triton.linear.gemv``."""

    max_outputs: int
    """Weights with more rows (output heads) are left to the library."""
    short_inputs: int
    long_inputs: int
    edge_tile: GemvTile
    """For weights of at most ``short_inputs`` or more than ``long_inputs`` columns."""
    tile: GemvTile
    """For those between, where its columns divide the weight's."""
    uneven_tile: GemvTile
    """For those between, where they do not."""
    fuse_silu_and_mul: bool
    """True: one kernel computes the product with gate and up and applies SwiGLU."""
    uneven_silu_tile: GemvTile
    """Takes the place of ``uneven_tile`` there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvAllReduceTuning:
    """Numbers of ``triton.all_reduce.gemv_all_reduce``."""

    short_inputs: int
    tile: GemvTile
    """For weights of at most ``short_inputs`` columns."""
    long_tile: GemvTile
    prefetch_bytes: int
    """The bytes of the next product's weight that are prefetched beside the norm, at most; 0 for none."""
    prefetch_programs: int
    prefetch_row_stride: int
    """Distance from one prefetched row to the next, in rows."""


@dataclass(frozen=True, slots=True)
class FP8GemvTile:
    """The columns of one loop iteration, for two adjacent rows of the weight, and the warps."""

    columns: int
    warps: int = 1


@dataclass(frozen=True, slots=True)
class PreloadingGemvTile:
    """A GEMV in FP8 that loads all its weights before the kernel ahead has ended.

    ``columns`` are those of one run. A program has at least ``warps`` warps and ``rows`` rows of the weight; of gate and up
    half as many each, but at least one.
    """

    columns: int
    warps: int
    rows: int


@dataclass(frozen=True, slots=True)
class NormGemvTile:
    """A GEMV in FP8 that normalizes its token: the rows of a program, a power of two, and the inputs of each of its warps.

    What a thread keeps in registers follows from both: the rows, the token, the residual and the norm's weight.
    """

    rows: int
    inputs_per_warp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8GemvTuning:
    """Numbers of ``triton.fp8.fp8_gemv``."""

    short_inputs: int
    tile: FP8GemvTile
    """For weights of at most ``short_inputs`` columns."""
    long_tile: FP8GemvTile
    fuse_silu_and_mul: bool
    """True: one kernel computes the product with gate and up and applies SwiGLU."""
    preloading_tile: PreloadingGemvTile
    max_preloaded_weights: int
    """The largest weight, in numbers, that is loaded as a whole before the kernel ahead has ended; 0 for none.

    The GEMV of such a weight quantizes its token itself, if no kernel ahead does.
    """
    norm_tile: NormGemvTile
    max_normed_weights: int
    """The largest weight, in numbers, whose GEMV adds the residual and normalizes its token, too; 0 for none."""


@dataclass(frozen=True, slots=True)
class StreamKTile:
    """The inputs of one loop iteration, the stages of its pipeline, the programs of a launch and their warps.

    ``programs`` None is one for each multiprocessor.
    """

    inputs: int
    stages: int
    programs: int | None = None
    warps: int = 4


@dataclass(frozen=True, slots=True)
class StreamKRule:
    """A tile for products of at most ``max_tokens`` tokens and, where given, at most ``max_inputs`` inputs."""

    max_tokens: int
    max_inputs: int | None
    tile: StreamKTile


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKTuning:
    """Numbers of ``triton.fp8.stream_k_gemm``."""

    max_tokens: int
    """The library's product is faster with more tokens than this."""
    max_tokens_of_tall: int
    """The same for weights with more than twice as many inputs as outputs, of which the library makes few tiles."""
    rules: tuple[StreamKRule, ...]
    """The first rule applies whose tile divides the inputs."""


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """The tokens and outputs of a tile, the warps of its program and the stages of its software pipeline."""

    tokens: int
    outputs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFP8Tuning:
    """Numbers of ``triton.fp8.block_fp8_gemv`` and ``triton.fp8.block_fp8_gemm``."""

    short_inputs: int
    gemv_tile: FP8GemvTile
    """For weights of at most ``short_inputs`` columns."""
    long_gemv_tile: FP8GemvTile
    max_tokens: int
    """With more tokens than this, the library's product is taken, or that in tiles."""
    rules: tuple[StreamKRule, ...]
    """The first rule applies whose tile divides the inputs."""
    matrix_tile: MatrixTile


@dataclass(frozen=True, slots=True)
class Int4GemvTile:
    """The words of one loop iteration, each of eight inputs, for two adjacent rows of the weight, and the warps."""

    words: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A16Tuning:
    """Numbers of ``triton.w4a16``."""

    gemv_tile: Int4GemvTile
    max_tokens: int
    """With more tokens than this, the weight is dequantized and multiplied by the library."""
    rules: tuple[StreamKRule, ...]
    """The first rule applies whose tile divides the inputs, padded to a multiple of 128."""
    dequantize_rows: int
    """The rows of a program that dequantizes 128 inputs of them."""


@dataclass(frozen=True, slots=True)
class GroupedGemmTile:
    """The outputs and inputs of one loop iteration, the row blocks of a group, the warps and the stages.

    A tile of gate·up has ``outputs`` columns of gate and as many of up. The programs of ``group`` row blocks take turns
    at the outputs, so that the row blocks of one expert read its weights from the L2 cache. With ``swap`` the weights
    are the first operand of the tensor cores, of which Hopper's take 64 rows at a time, and the tokens the second, of
    which they take 8.
    """

    outputs: int
    inputs: int
    group: int
    warps: int
    stages: int
    swap: bool = False


@dataclass(frozen=True, slots=True)
class GroupedGemmRule:
    """Tiles for at most ``max_rows`` rows of each expert, on average; ``rows`` of one expert are a row block.

    ``max_rows`` None is any number.
    """

    max_rows: float | None
    rows: int
    gate_up: GroupedGemmTile
    down: GroupedGemmTile


@dataclass(frozen=True, slots=True)
class ExpertGemvTile:
    """The columns of one loop iteration, the warps, and the outputs of a program, which are ``rows`` of a weight.

    Of gate and up a program takes ``rows`` each. In the model's type it always takes one of each, and two of down.
    """

    columns: int
    warps: int
    rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGemvTuning:
    """Numbers of ``triton.moe.expert_gemv`` and ``triton.moe.fp8_expert_gemv``."""

    gate_up: ExpertGemvTile
    short_inputs: int
    down: ExpertGemvTile
    """For experts of at most ``short_inputs`` intermediate values."""
    long_down: ExpertGemvTile
    preload_down: bool
    """Whether a down-projection of at most ``short_inputs`` loads its weights before gate and up are computed.

    In FP8 it does so only where it quantizes.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MoETuning:
    """Numbers of ``triton.moe``."""

    routing_warps: int
    """The tokens that one program of ``fused_topk`` routes, each in one warp."""
    max_router_topk_tokens: int
    """The most tokens of a step whose experts are selected in the launch of the router's product; 0 for none."""
    router_topk_rows: int
    """The experts whose logits one program of ``router_topk`` computes."""
    fuse_router_norm: bool
    """True: that launch also adds the residual and normalizes, unless an all-reduce has done both."""
    experts_per_pair: int
    """Steps with at least this many experts for each pair of a token and an expert are computed without sorting."""
    max_chunk: int
    """The pairs that ``moe_align_block_size`` counts at a time; with more of them, counting is a launch of its own."""
    gemv: ExpertGemvTuning
    fp8_gemv: ExpertGemvTuning
    quantizing_gate_up_tokens: int
    """The most tokens of a step whose FP8 GEMV for gate and up quantizes them itself; more need a launch for that."""
    quantizing_down_tokens: int
    """The same for the intermediate values of a token and the FP8 GEMV of the down-projection."""
    rules: tuple[GroupedGemmRule, ...]
    """The first rule with enough rows applies; the last one has no bound."""
    fp8_rules: tuple[GroupedGemmRule, ...]
    """For weights with one scale for each output."""
    block_fp8_rules: tuple[GroupedGemmRule, ...]
    """For weights with one scale for each block of 128 x 128: 128 inputs, and outputs that divide 128."""
    sum_block: int
    sum_warps: int
    """The outputs of a token that one program of ``moe_sum`` adds up, and its warps."""


@dataclass(frozen=True, slots=True)
class LoraTile:
    """Tile sizes of ``triton.lora.add_lora``, whose programs have ``warps`` warps.

    A row block has ``rows`` tokens of one adapter: 16 or more, for the tensor cores, or 1, without them. A program adds up at least
    ``chunk`` inputs of A x, ``inputs`` at a time in ``stages`` stages, and computes ``outputs`` outputs of B at a time.
    """

    rows: int
    chunk: int
    inputs: int
    outputs: int
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True, slots=True)
class LoraRule:
    """A tile for steps of at most ``max_tokens`` tokens, padding included; None is any number."""

    max_tokens: int | None
    tile: LoraTile


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedLoraTuning:
    """Limits within which A of all LoRA slots is appended to the rows of the base matrix (``triton.lora.expand``)."""

    max_rows: int
    """The largest number of slots times their rank, for which A is appended."""
    max_rank: int
    """The largest rank of slots whose A is appended: the kernels behind read a row's B without reuse."""
    max_elements: int
    """The largest number of tokens times rank in a step that multiplies by the appended rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTuning:
    """Numbers of ``triton.lora``."""

    appended: AppendedLoraTuning
    early_outputs: int
    """The most outputs of a layer for which ``add_lora``, in a step of one token, reads x while the GEMV still runs."""

    rules: tuple[LoraRule, ...]
    """The first rule with enough tokens applies; the last one has no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKTopPTuning:
    """Numbers of ``triton.sampling.top_k_top_p``."""

    chunk: int
    """The logits of a row that one iteration of a program counts and sums up."""
    block: int
    """The logits of a chunk that are in registers at a time."""
    max_programs: int
    """The programs of a launch: more fill the GPU no better and take longer to start for rows without a search."""
    min_programs_of_row: int
    max_candidates: int
    """The logits of a row that are gathered; where more are left by the first pass, the whole row is searched again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixTuning:
    """Thresholds from which ``engine.shared_prefix`` reads a prefix once for several rows."""

    min_rows: int
    """The smallest step that is captured with shared prefixes."""
    min_saved_tokens: int
    min_saved_fraction: float
    """The reads of KV tokens that a step must save: this many, and this fraction of all."""
    min_split_tokens: int
    """The tokens of a prefix that justify one more split."""
    long_tokens: int
    long_fraction: float
    long_means: int
    """A row is split like a shared prefix where it reads at least ``long_tokens`` alone, ``long_fraction`` of all
    tokens, and ``long_means`` times the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoiceTuning:
    """Numbers that choose between FlashInfer's prefill and ``triton.attention.prefill_attention``.

    FlashInfer's takes the host longer to launch, and the GPU less time where there are many tokens.
    """

    launch_seconds: float
    """Host time for one layer of a step with prompts, most of it FlashInfer's launch."""
    bytes_per_second: float
    """The rate at which weights are read."""
    flops_per_second: float
    """The rate of products with two-byte weights; those with one-byte weights have twice that."""
    max_tokens: int
    """With more tokens our kernel loses more time on the GPU than it saves on the host."""
    long_context: int
    """From this many tokens of context on, attention is slow on the GPU whatever the number of queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceLimits:
    """The largest messages, in bytes, that up to ``ranks`` ranks sum by each algorithm of ``distributed.all_reduce``."""

    ranks: int
    low_latency: int
    """By one-shot with LL words."""
    fused_low_latency: int
    """By the same, fused with the norm."""
    one_shot: int
    fused_one_shot: int
    """By one-shot behind flags, fused with the norm; beyond it, up to ``one_shot``, the norm is a launch of its own."""
    two_shot: int
    """Copy engines or NCCL sum larger ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyExchangeTuning:
    """Numbers of ``distributed.copy_exchange``, and by which ``layers.linear`` divides the rows of a product for it."""

    max_bytes: int
    """NCCL sums larger messages."""
    max_chunks: int
    """With 1, no product is divided."""
    min_chunk_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All tuned numbers of one kind of GPU."""

    measured_on: str
    decode_attention: DecodeAttentionTuning
    prefill_tile: PrefillAttentionTile
    wide_prefill_tile: PrefillAttentionTile
    """For heads of more than ``WIDE_HEAD_DIM`` dimensions, and for float32."""
    qk_norm_rope_heads: int
    """The heads of a token that one program normalizes, rotates and stores."""
    gemv: GemvTuning
    fp8_gemv: FP8GemvTuning
    stream_k: StreamKTuning
    block_fp8: BlockFP8Tuning
    w4a16: W4A16Tuning
    single_row_chunk: int
    single_row_warps: int
    """The elements of a single row that one program of ``silu_and_mul_quantize`` takes, and its warps."""
    single_row_max_block: int
    """A single row of more elements is quantized by many programs, ``single_row_chunk`` elements each."""
    sampling_block: int
    sampling_warps: int
    """The logits of a row that one program of ``sample_tokens`` takes, and its warps."""
    row_exchange_min_rows: int
    """With tensor parallelism, rows that need whole logits are divided among the ranks from this many on; fewer are
    gathered on every rank."""
    moe: MoETuning
    lora: LoraTuning
    top_k_top_p: TopKTopPTuning
    shared_prefix: SharedPrefixTuning
    prefill_choice: PrefillChoiceTuning
    all_reduce: tuple[AllReduceLimits, ...]
    """By ascending numbers of ranks."""
    copy_exchange: CopyExchangeTuning
    gemv_all_reduce: GemvAllReduceTuning


_FP8_SMALL: Final = GroupedGemmTile(outputs=64, inputs=128, group=1, warps=4, stages=4, swap=True)
_BLOCK_FP8_MIDDLE: Final = GroupedGemmTile(outputs=64, inputs=128, group=16, warps=4, stages=4)

HOPPER_MOE: Final = MoETuning(
    # untuned: a warp for each token needs no exchange between warps.
    routing_warps=4,
    # us for norm, router, top-k and experts of 1, 2 and 4 tokens in FP8: 18.0, 31.3 and 48.1 by three launches ahead of the
    # experts', 18.3, 27.6 and 44.5 by two, 17.5, 26.8 and 43.8 by one; in bfloat16 24.5, 45.0 and 77.3; 24.7, 40.7 and
    # 73.5; 24.3, 40.6 and 73.0.
    max_router_topk_tokens=4,
    fuse_router_norm=True,
    # untuned: 128 experts are 128 programs, fewer than a GPU has multiprocessors.
    router_topk_rows=1,
    # untuned: the bound that vLLM takes. At it, one expert in four is read, and few are read twice.
    experts_per_pair=4,
    # untuned.
    max_chunk=4096,
    gemv=ExpertGemvTuning(
        # 8 experts of 768 outputs by 2,048 inputs, 1 token: 12.9 us; other tiles up to 17.4, 4 tokens: 44.5 to 61.
        gate_up=ExpertGemvTile(columns=1024, warps=4),
        short_inputs=4096,
        # A warp for each of 8 experts of 768 inputs, 1 token: 7.54 us; 4 warps 8.71, 2 warps 9.03; 512 columns 9.50.
        # 4 tokens: 23.1, 24.3, 25.5 and 31.9 us.
        down=ExpertGemvTile(columns=256, warps=8),
        # untuned: ``gemv.tile``.
        long_down=ExpertGemvTile(columns=2048, warps=4),
        # Norm, router and experts of 1, 2 and 4 tokens: 24.9, 41.4 and 73.8 us without, 24.2, 41.2 and 73.3 with it.
        preload_down=True,
    ),
    fp8_gemv=ExpertGemvTuning(
        # 1 and 2 tokens, which programs quantize: 7.9 us, 13.5 us; one row 8.2, 16.0; four by two warps 9.0, 15.2.
        gate_up=ExpertGemvTile(columns=1024, warps=1, rows=2),
        short_inputs=8192,
        # Behind gate and up, 1, 2 and 4 tokens, both products: 13.5, 23.0 and 39.5 us; 2 rows by 4 warps 13.8, 22.7 and
        # 39.9, 8 rows 14.4, 24.7 and 40.6, one row 14.5, 25.2 and 45.4.
        down=ExpertGemvTile(columns=256, warps=8, rows=4),
        # untuned: ``fp8_gemv.long_tile``.
        long_down=ExpertGemvTile(columns=2048, warps=2, rows=2),
        # The same of 1, 2 and 4 tokens: 17.6, 26.9 and 43.5 us without, 16.6, 26.4 and 43.2 with it.
        preload_down=True,
    ),
    # Both products of 1, 2 and 4 tokens, launches quantize: 18.7, 26.3 and 44.7 us; the products do: 13.7, 23.8 and 42.0.
    # Block FP8, which is not quantized so: 16.2 against 18.5 us for 1 token, 42.9 against 49.8 for 4.
    quantizing_gate_up_tokens=4,
    quantizing_down_tokens=4,
    # untuned: the tiles that vLLM publishes for the H200 (128 experts of 768, 8 for each token), where gate and up
    # count as one matrix, so that half of their outputs are of each.
    rules=(
        GroupedGemmRule(
            0.5,
            rows=16,
            gate_up=GroupedGemmTile(outputs=32, inputs=128, group=1, warps=4, stages=3),
            down=GroupedGemmTile(outputs=64, inputs=128, group=1, warps=4, stages=3),
        ),
        GroupedGemmRule(
            1,
            rows=16,
            gate_up=GroupedGemmTile(outputs=32, inputs=256, group=1, warps=4, stages=2),
            down=GroupedGemmTile(outputs=64, inputs=256, group=1, warps=4, stages=2),
        ),
        GroupedGemmRule(
            2,
            rows=16,
            gate_up=GroupedGemmTile(outputs=32, inputs=128, group=16, warps=4, stages=2),
            down=GroupedGemmTile(outputs=64, inputs=128, group=16, warps=4, stages=2),
        ),
        GroupedGemmRule(
            4,
            rows=16,
            gate_up=GroupedGemmTile(outputs=128, inputs=128, group=1, warps=8, stages=2),
            down=GroupedGemmTile(outputs=256, inputs=128, group=1, warps=8, stages=2),
        ),
        GroupedGemmRule(
            8,
            rows=16,
            gate_up=GroupedGemmTile(outputs=64, inputs=128, group=1, warps=4, stages=2),
            down=GroupedGemmTile(outputs=128, inputs=128, group=1, warps=4, stages=2),
        ),
        GroupedGemmRule(
            16,
            rows=32,
            gate_up=GroupedGemmTile(outputs=128, inputs=128, group=16, warps=8, stages=2),
            down=GroupedGemmTile(outputs=256, inputs=128, group=16, warps=8, stages=2),
        ),
        GroupedGemmRule(
            32,
            rows=64,
            gate_up=GroupedGemmTile(outputs=64, inputs=64, group=1, warps=4, stages=3),
            down=GroupedGemmTile(outputs=128, inputs=64, group=1, warps=4, stages=3),
        ),
        GroupedGemmRule(
            None,
            rows=128,
            gate_up=GroupedGemmTile(outputs=128, inputs=64, group=16, warps=8, stages=4),
            down=GroupedGemmTile(outputs=256, inputs=64, group=16, warps=8, stages=4),
        ),
    ),
    # untuned: weights first below 64 rows, as vLLM found; the outputs and inputs of a tile are guesses.
    fp8_rules=(
        GroupedGemmRule(4, rows=16, gate_up=_FP8_SMALL, down=_FP8_SMALL),
        GroupedGemmRule(
            16,
            rows=32,
            gate_up=replace(_FP8_SMALL, group=16, stages=3),
            down=replace(_FP8_SMALL, outputs=128, group=16, stages=3),
        ),
        GroupedGemmRule(
            32,
            rows=64,
            gate_up=GroupedGemmTile(outputs=64, inputs=128, group=16, warps=4, stages=3),
            down=GroupedGemmTile(outputs=128, inputs=128, group=16, warps=4, stages=3),
        ),
        GroupedGemmRule(
            None,
            rows=128,
            gate_up=GroupedGemmTile(outputs=128, inputs=128, group=16, warps=8, stages=3),
            down=GroupedGemmTile(outputs=256, inputs=128, group=16, warps=8, stages=3),
        ),
    ),
    # untuned, likewise.
    block_fp8_rules=(
        GroupedGemmRule(4, rows=16, gate_up=_FP8_SMALL, down=_FP8_SMALL),
        GroupedGemmRule(
            16,
            rows=32,
            gate_up=replace(_FP8_SMALL, group=16, stages=3),
            down=replace(_FP8_SMALL, group=16, stages=3),
        ),
        GroupedGemmRule(32, rows=64, gate_up=_BLOCK_FP8_MIDDLE, down=replace(_BLOCK_FP8_MIDDLE, outputs=128)),
        GroupedGemmRule(
            None,
            rows=128,
            gate_up=replace(_BLOCK_FP8_MIDDLE, warps=8),
            down=replace(_BLOCK_FP8_MIDDLE, outputs=128, warps=8),
        ),
    ),
    # untuned.
    sum_block=1024,
    sum_warps=4,
)
"""Of mixture of experts on compute capability 9.0."""

HOPPER: Final = Tuning(
    measured_on="NVIDIA H200",
    decode_attention=DecodeAttentionTuning(
        # µs a layer by splits, longest contexts first, merge included: 40/8 heads, 137 rows of 100 to 1,700 tokens:
        # 128.9 with one, 136.4 with two, 138.8 with three; 48 rows: 56.4 with two, 59.6 with six; 16 rows: 24.3 with
        # three or six, 26.2 with sixteen. 700 programs are the best, or within 3% of it, for 16 to 160 rows; 2,200
        # were used before.
        target_programs=700,
        # With 64 splits instead of 16 (--max-model-len 131072) a step of Llama-3.1-8B at batch 1 takes 4.00 instead
        # of 3.99 ms.
        max_splits=64,
        # One row of 450 tokens: 16 splits 1.206 ms a step of eight layers of Llama-3.1-8B, 8 splits 1.206, 4 splits
        # 1.216.
        min_split_tokens=256,
        # µs a layer over 256 rows that share 2,048 tokens and have 192 of their own, by the query heads of a tile,
        # 32/8 heads: 16 groups of 16 rows: 16 heads 169, 32 170, 64 140, 128 173; 1 group of 256: 161, 163, 133.
        max_group_heads=64,
        # The same with 64 groups of 4 rows: 16 heads 207, 32 233, 64 252.
        few_group_heads=16,
        # Output tokens/s, two launches and one: Qwen3-30B-A3B with 2 rows 578, 588, 4 rows 788, 793, 8 rows 980, 986;
        # Llama-3.1-8B 428, 432; 874, 847; 1,717, 1,702.
        max_fused_rows=2,
        # Output tokens/s at batch 1, two launches, 64 tokens by 4 warps, and 32: Qwen3-30B-A3B 416, 449, 453, in FP8 548,
        # 589, 591; Llama-3.1-8B 264, 262, 265; Qwen3-14B in FP8 230.4, 228.9, 231.0. 32 tokens by 2 warps are 1% behind.
        fused_tile=AttentionTile(tokens=32, warps=4, stages=2),
        # The bounds between the cases that the next three tiles were measured for.
        few_rows=4,
        few_splits=4,
        # 16/8, 32/8 and 40/8 heads, 256 rows of 100 to 2,048 tokens: the best of ten tiles, 4.2 TB/s; 64 tokens by 2
        # or 4 warps are 2% to 5% behind, 8 warps 7%. FP8, 256 rows: 96.7 µs, 64 by 2 98.1, 128 by 8 129.5.
        throughput_tile=AttentionTile(tokens=128, warps=4, stages=3),
        # For more rows than ``max_fused_rows``, and where attention is a launch of its own for other reasons. Chosen by
        # whole steps of batch 1 before there was ``fused_tile``: 1.180 ms for eight layers of Llama-3.1-8B; 1.230 of
        # Qwen3-14B in FP8.
        # 64 tokens by 2 warps in 3 stages is faster by itself (5.1 instead of 5.4 µs) and slower in a step (1.206;
        # 1.271), because its 96 KiB of shared memory are not free beside the kernel ahead.
        latency_tile=AttentionTile(tokens=64, warps=4, stages=2),
        # FP8 cache, 40/8 heads, 32 rows of 600 to 2,000 tokens: 34.9 µs, 128 tokens by 4 warps 36.8; one row: 4.7 and
        # 5.4.
        fp8_latency_tile=AttentionTile(tokens=64, warps=2, stages=3),
        # No measurement is on record.
        wide_tile=AttentionTile(tokens=32, warps=4, stages=3),
        # The fastest tile for each number of query heads in the table of max_group_heads.
        prefix_tile=AttentionTile(tokens=64, warps=4, stages=3),
        wide_prefix_tile=AttentionTile(tokens=32, warps=4, stages=2),
    ),
    # No measurement is on record; FlashInfer's kernels take long prompts.
    prefill_tile=PrefillAttentionTile(queries=128, tokens=64, warps=4, stages=3),
    wide_prefill_tile=PrefillAttentionTile(queries=32, tokens=32, warps=4, stages=2),
    # µs by 4, 8, 16, 32 heads: 40/8 heads, 16,384 tokens: 279, 143, 144, 184; 256 rows: 5.4, 3.9, 4.0 (not measured
    # with 32).
    qk_norm_rope_heads=8,
    gemv=GemvTuning(
        # 151,936 outputs: the library reads at the rate of copies, too.
        max_outputs=65536,
        short_inputs=2048,
        long_inputs=16384,
        # µs, cuBLAS and ours: 1024 x 2048 12.7, 3.0; 6144 x 1024 5.9, 4.9; 5120 x 17408 49.8, 42.5.
        edge_tile=GemvTile(columns=1024, pair=True),
        # µs for the products of a layer of Llama-3.1-8B: 105.2; 1,024 columns by 2 or 1 warps 107.3, 107.8; 512 by
        # one 108.4; pairs of rows 1,024 by 4 or 2 106.1, 109.5, 512 by 2 or 1 112.1, 115.6; four rows 110.9.
        tile=GemvTile(columns=2048),
        uneven_tile=GemvTile(columns=1024),
        # µs for norm, gate·up, SwiGLU and down, apart and fused: 28672 x 4096 80.8, 80.1; 25600 x 5120 93.6, 93.6;
        # 34816 x 5120 124.8, 124.3; 7168 x 8192 45.5, 44.0; 6144 x 1024 9.8, 8.6.
        fuse_silu_and_mul=True,
        # µs for gate·up, SwiGLU and down, 25600 x 5120 and 34816 x 5120: 92.2, 122.9; 1,024 columns by 2 warps 92.1,
        # 123.8; 2,048 by 4 92.6, 123.9; 1,024 by 4 94.8, 126.2.
        uneven_silu_tile=GemvTile(columns=512),
    ),
    fp8_gemv=FP8GemvTuning(
        short_inputs=8192,
        # µs, columns and warps 512, 1; 1,024, 1; 1,024, 2; 2,048, 2: 7168 x 5120 11.8, 10.7, 11.2, 11.4; 34816 x 5120
        # 44.4, 42.2, 42.8, 43.4. Single rows instead of pairs take 10% to 25% longer.
        tile=FP8GemvTile(columns=1024, warps=1),
        # The same: 5120 x 17408 31.1, 27.4, 30.6, 23.5; 4096 x 14336 19.5, 20.3, -, 17.2.
        long_tile=FP8GemvTile(columns=2048, warps=2),
        # µs for gate·up, SwiGLU, quantization and down, apart and fused: 28672 x 4096 48.4, 46.0; 34816 x 5120 68.0, 67.3;
        # 6144 x 1024 9.8, 9.2.
        fuse_silu_and_mul=True,
        # µs: 2048 x 4096, quantizing its token, 3.6, and 2048 x 2048 2.7; by ``tile`` behind a launch that quantizes 7.5
        # and 4.6. Behind a norm that quantizes, with it and by ``tile``: 5120 x 2048 5.0, 6.0; 2048 x 4096 4.7, 7.8.
        # A 2048 x 4096 that quantizes its token behind a 5120 x 2048, µs for both by columns, warps and rows: 1,024, 1, 2 8.72;
        # 1, 4 8.44; 2, 4 8.44; 2, 8 8.67; 2,048, 2, 4 8.46; 4096 x 4096 behind 6144 x 4096 15.29, 15.16, 15.09, 15.17,
        # 15.13. Output tokens/s at batch 1 in FP8, 1,024, 1, 2 and 1,024, 2, 4: Qwen3-30B-A3B 586, 589; Llama-3.1-8B 388, 396.
        preloading_tile=PreloadingGemvTile(columns=1024, warps=2, rows=4),
        # The same: 4096 x 4096 6.9, 8.4; 5120 x 5120 9.7, 10.8. Larger weights were not compared.
        max_preloaded_weights=25 << 20,
        # Output tokens/s at batch 1 in FP8, the norm apart, 8 rows of 1,024 inputs a warp, and 16 of 512: Qwen3-30B-A3B 586,
        # 581, 596; behind the tile above 589, -, 600; Llama-3.1-8B 396, 398, 398. By themselves the 8 rows are faster, and beside
        # the experts ahead of them their registers are not free. µs of norm, 5120 x 2048 and 2048 x 4096: 9.1, 8.6, 9.0;
        # of 6144 x 4096 and 4096 x 4096: 16.9, 15.0, 16.6; of 4096 x 1024 and 1024 x 2048: 6.3, 5.3, 5.5.
        norm_tile=NormGemvTile(rows=16, inputs_per_warp=512),
        max_normed_weights=25 << 20,
    ),
    stream_k=StreamKTuning(
        # µs for the four products of a layer of Qwen3-14B, library and ours: 2 tokens 133.3, 95.5; 64 134.3, 111.9;
        # 96 135.9, 138.7.
        max_tokens=64,
        # 5120 x 17408 with 128 tokens: 50.1, 37.6. With 192 and 256 tokens ours takes 22% to 40% longer.
        max_tokens_of_tall=128,
        # The best of those tried. Two or three programs a multiprocessor take 2% to 3% longer; loads by TMA take as
        # long up to 64 tokens and up to 14% less with 128.
        rules=(
            StreamKRule(16, None, StreamKTile(inputs=512, stages=4)),
            StreamKRule(64, 4095, StreamKTile(inputs=512, stages=3)),
            StreamKRule(16, None, StreamKTile(inputs=256, stages=8)),
            StreamKRule(32, None, StreamKTile(inputs=256, stages=7)),
            StreamKRule(64, None, StreamKTile(inputs=256, stages=6)),
            StreamKRule(128, None, StreamKTile(inputs=256, stages=4)),
            StreamKRule(128, None, StreamKTile(inputs=128, stages=6)),
        ),
    ),
    block_fp8=BlockFP8Tuning(
        # Untuned: as for FP8 with one scale per output.
        short_inputs=8192,
        gemv_tile=FP8GemvTile(columns=1024, warps=1),
        long_gemv_tile=FP8GemvTile(columns=2048, warps=2),
        max_tokens=64,
        rules=(
            StreamKRule(16, None, StreamKTile(inputs=256, stages=8)),
            StreamKRule(32, None, StreamKTile(inputs=256, stages=7)),
            StreamKRule(64, None, StreamKTile(inputs=256, stages=6)),
            StreamKRule(64, None, StreamKTile(inputs=128, stages=6)),
        ),
        # Untuned: 128 outputs are those of one scale, and 64 tokens leave the sums of a tile in registers.
        matrix_tile=MatrixTile(tokens=64, outputs=128, warps=4, stages=3),
    ),
    w4a16=W4A16Tuning(
        # Untuned: 256 words of two rows are 2 KiB, as in the FP8 GEMV.
        gemv_tile=Int4GemvTile(words=256, warps=2),
        # Untuned: the bound of FP8's stream-K.
        max_tokens=64,
        rules=(
            StreamKRule(32, None, StreamKTile(inputs=256, stages=6)),
            StreamKRule(64, None, StreamKTile(inputs=256, stages=4)),
            StreamKRule(64, None, StreamKTile(inputs=128, stages=4)),
        ),
        dequantize_rows=32,
    ),
    # Two launches of many programs instead of one program: 1.8 µs less a layer of Qwen3-14B in FP8. Other sizes were
    # not compared.
    single_row_chunk=1024,
    single_row_warps=4,
    # µs by one program and by many: 1,024 elements 0.90, 0.89; 3,072 1.04, 0.96; 5,120 1.27, 0.99; 17,408 2.38, 1.70.
    single_row_max_block=1024,
    # µs over 256 rows of 151,936 logits by block and warps: 1,024, 4 81; 2,048, 4 69; 2,048, 8 82; 4,096, 4 67;
    # 4,096, 8 71; 8,192, 8 73. 2,048 is within 3% of the best and has twice as many programs where there are few
    # rows.
    sampling_block=2048,
    sampling_warps=4,
    # Untuned, an estimate: thresholds and draw take 1.6 µs a row where there are 256 of them (docs/lab/sampling.md),
    # of which two ranks save half each, and the tokens need a second exchange.
    row_exchange_min_rows=12,
    moe=HOPPER_MOE,
    # untuned.
    lora=LoraTuning(
        # µs of LoRA for one token, rank 16, on an H200, x read early or not: 4,096 outputs 2.4 and 3.1, 6,144 2.6 and 3.2, 28,672
        # 5.0 and 3.0.
        early_outputs=8192,
        # Measured for 16 slots of rank 16 and up to 256 tokens.
        appended=AppendedLoraTuning(max_rows=512, max_rank=64, max_elements=4096),
        rules=(
            LoraRule(1, LoraTile(rows=1, chunk=256, inputs=256, outputs=64)),
            LoraRule(16, LoraTile(rows=1, chunk=512, inputs=512, outputs=256)),
            LoraRule(512, LoraTile(rows=16, chunk=512, inputs=128, outputs=256, stages=4)),
            LoraRule(2048, LoraTile(rows=64, chunk=2048, inputs=64, outputs=128, warps=8, stages=3)),
            LoraRule(None, LoraTile(rows=64, chunk=4096, inputs=64, outputs=128, warps=8, stages=3)),
        ),
    ),
    top_k_top_p=TopKTopPTuning(
        # µs by top_p over 151,936 logits, 1 and 256 rows of peaked logits: 8,192 21, 361; 4,096 16, 419. Blocks of
        # 1,024 by 4 warps 25, 298 where 2,048 by 8 take 21, 361.
        chunk=8192,
        block=1024,
        # µs of a step in which no row requests either, 1 and 256 rows: 3.1, 6.7.
        max_programs=1024,
        min_programs_of_row=4,
        max_candidates=4096,
    ),
    shared_prefix=SharedPrefixTuning(
        min_rows=16,
        # Below these the extra launches were found to cost more than the reads; the figures are not on record.
        min_saved_tokens=4096,
        min_saved_fraction=0.1,
        min_split_tokens=256,
        # µs a layer, 32/8 heads, one row of 30,000 tokens among rows of 700, as a row and split: 32 rows 204, 77; 128
        # rows 617, 174; 256 rows 639, 312.
        long_tokens=2048,
        long_fraction=1 / 32,
        long_means=4,
    ),
    prefill_choice=PrefillChoiceTuning(
        # Samples of the engine's thread: most of the host time of a step with prompts is FlashInfer's launch.
        launch_seconds=75e-6,
        bytes_per_second=4e12,
        flops_per_second=6e14,
        # Qwen3-0.6B, steps with prompts at 16 requests/s, FlashInfer twice and ours twice: 6.7, 6.3; 4.9, 6.0
        # ms.
        max_tokens=1024,
        long_context=4096,
    ),
    # Two ranks, 10 KB a row, sum and norm by LL, fused one-shot, and one-shot with the norm behind it: 6.5, 5.6 and 6.9
    # us for 32 rows, 8.0, 6.8 and 9.4 for 64, -, 14.7 and 15.6 for 256, -, 25.7 and 28.0 for 512; LL takes 4.3 for one row.
    # Sums alone by one-shot and NCCL: 13.1 and 27.9 us for 256 rows, 21.3 and 36.3 for 512; NCCL is ahead from 2,048 on.
    # Four ranks, us by LL, one-shot and two-shot: 80 KB 7.8, 8.0, -; 160 KB 9.3, 9.5, -; 260 KB 10.5, 10.4, -; 660 KB -, 14.2,
    # 14.8; 1 MB -, 18.9, 16.7. Two-shot and NCCL: 33.5 MB 172.2 and 177.3, 42 MB 236 and 232, 67 MB 338 and 326. With the norm,
    # one-shot is ahead of LL at every size: 10 KB 7.6 and 11.4, 64 KB 7.5 and 7.9, 130 KB 7.5 and 9.4; at 660 KB it takes 15.8,
    # two-shot with the norm behind it 16.5. Untuned for 8 ranks: SGLang's limits on an H200 (CustomAllReduceV2).
    all_reduce=(
        AllReduceLimits(
            ranks=2,
            low_latency=160 << 10,
            fused_low_latency=160 << 10,
            one_shot=12 << 20,
            fused_one_shot=5 << 20,
            two_shot=12 << 20,
        ),
        AllReduceLimits(
            ranks=4,
            low_latency=160 << 10,
            fused_low_latency=0,
            one_shot=704 << 10,
            fused_one_shot=704 << 10,
            two_shot=36 << 20,
        ),
        AllReduceLimits(
            ranks=8,
            low_latency=64 << 10,
            fused_low_latency=64 << 10,
            one_shot=128 << 10,
            fused_one_shot=128 << 10,
            two_shot=32 << 20,
        ),
    ),
    # Two H200, ms of product, sum and norm, 4,096 and 12,800 inputs, 5,120 outputs. 4,096 rows, in a graph: by NCCL 0.43 and
    # 0.90, whole 0.41 and 0.88, in 2 chunks 0.36 and 0.84, in 3 0.33 and 0.83, in 4 0.32 and 0.81, in 5 0.33 and 0.81; chunks
    # of 256 rows gain nothing (2,048 rows: 0.18 and 0.42 in 3 chunks, 0.19 and 0.44 in 4). Untuned: the largest message.
    copy_exchange=CopyExchangeTuning(max_bytes=256 << 20, max_chunks=4, min_chunk_rows=512),
    # Two H100, us for a layer of Qwen3-32B at batch 1, of two ranks. Untuned for more.
    gemv_all_reduce=GemvAllReduceTuning(
        # The bound between the two cases that were measured, 4,096 and 12,800 inputs.
        short_inputs=8192,
        # The output projection by columns and warps: 1,024, 2 171.6; 2,048, 8 171.7; 2,048, 4 172.0; 4,096, 8 172.8;
        # 4,096, 4 173.3.
        tile=GemvTile(columns=1024, warps=2),
        # The down-projection: 4,096, 8 170.4; 512, 4 171.5; 1,024, 4 171.6. On two H200 2,048, 4 takes 2.4 longer than
        # 512, 4.
        long_tile=GemvTile(columns=4096, warps=8),
        # Before both norms: 8 MiB, every second row 172.9, every fourth 172.8; 4 MiB by 16 programs 173.5; none 175.9. On
        # two H200 all rows, every second and every fourth: 133.3, 132.9, 133.1.
        prefetch_bytes=8 << 20,
        prefetch_programs=32,
        prefetch_row_stride=2,
    ),
)
"""Of compute capability 9.0 (H100, H200), measured on an H200."""

TUNINGS: Final[dict[int, Tuning]] = {90: HOPPER}
"""By compute capability; 90 is 9.0."""
DEFAULT: Final = HOPPER
"""For GPUs on which nothing was measured."""
CPU: Final = replace(
    DEFAULT,
    lora=replace(DEFAULT.lora, appended=AppendedLoraTuning(max_rows=0, max_rank=0, max_elements=0)),
)
"""For Triton's interpreter, and for PyTorch on a CPU, where no launch is saved."""

_overrides: Final[list[Tuning]] = []


def tuning_for(device: "torch.device") -> Tuning:
    """Return the tuned numbers of ``device``."""
    return _overrides[-1] if _overrides else _lookup(device)


@cache
def _lookup(device: "torch.device") -> Tuning:
    if device.type != "cuda":
        return CPU
    from skiff_runtime.kernels.triton.runtime.device_properties import compute_capability

    return TUNINGS.get(compute_capability(device), DEFAULT)


@contextmanager
def overridden(tuning: Tuning) -> Iterator[None]:
    """Let every device take ``tuning`` for a while, in all threads: for ``skiff tune`` and for tests."""
    _overrides.append(tuning)
    try:
        yield
    finally:
        _overrides.pop()
