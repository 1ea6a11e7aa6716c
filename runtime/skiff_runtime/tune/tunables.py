"""The tuned numbers that ``skiff tune`` measures: their candidates, and the workloads that judge them.

Shapes are those of served models: Qwen3-0.6B (16/8 heads), Llama-3.1-8B (32/8), Qwen3-14B (40/8). Numbers that only a
whole service can judge (``shared_prefix``, ``prefill_choice``) are not among them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from skiff_runtime.engine.shared_prefix import pack_work_items
from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.constants import FP8_BLOCK, INT4_UNIT
from skiff_runtime.kernels.fp8 import (
    add_rms_norm_quantize,
    can_fuse_silu_and_mul,
    fp8_linear,
    fused_fp8_linear_silu_and_mul,
    quantize_activations,
    quantize_grouped_activations,
    silu_and_mul_quantize,
)
from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    BlockFP8Weight,
    FP8Weight,
    QuantizedActivations,
    empty_fp8_weight,
)
from skiff_runtime.kernels.int4_tensors import PER_WORD, Int4Weight
from skiff_runtime.kernels.linear import fused_linear_silu_and_mul, linear
from skiff_runtime.kernels.qk_norm_rope import RopeInputs, qk_norm_rope_store_kv
from skiff_runtime.kernels.sampling import sample_tokens
from skiff_runtime.kernels.shared_prefixes import unpack_shared_prefixes
from skiff_runtime.kernels.torch_internals import block_scaled_mm, scaled_mm
from skiff_runtime.kernels.triton.attention.decode_attention import (
    DecodeAttention,
    DecodeRows,
    max_group_rows,
)
from skiff_runtime.kernels.triton.attention.fused_decode_attention import FusedDecodeAttention
from skiff_runtime.kernels.triton.attention.prefill_attention import PrefillAttention
from skiff_runtime.kernels.triton.fp8.add_rms_norm_gemv import add_rms_norm_fp8_gemv
from skiff_runtime.kernels.triton.fp8.block_fp8_gemm import block_fp8_gemm, block_fp8_stream_k_gemm
from skiff_runtime.kernels.triton.fp8.block_fp8_gemv import block_fp8_gemv
from skiff_runtime.kernels.triton.fp8.fp8_gemv import fp8_gemv, quantizing_fp8_gemv
from skiff_runtime.kernels.triton.fp8.stream_k_gemm import stream_k_gemm
from skiff_runtime.kernels.triton.linear.gemv import gemv
from skiff_runtime.kernels.triton.sampling.top_k_top_p import find_thresholds
from skiff_runtime.kernels.triton.w4a16.int4_gemm import int4_stream_k_gemm
from skiff_runtime.kernels.triton.w4a16.int4_gemv import int4_gemv
from skiff_runtime.kernels.tuning import (
    AttentionTile,
    FP8GemvTile,
    GemvTile,
    Int4GemvTile,
    MatrixTile,
    NormGemvTile,
    PrefillAttentionTile,
    PreloadingGemvTile,
    StreamKTile,
    tuning_for,
)
from skiff_runtime.kernels.w4a16 import dequantize, dequantize_and_multiply
from skiff_runtime.tune.measure import Launch, Tunable, Workload
from skiff_runtime.tune.moe_tunables import MOE_TUNABLES

CACHE_BYTES: Final = 256 << 20
"""More than any GPU's L2 cache: inputs of this size in turn find nothing of themselves there."""
DTYPE: Final = torch.bfloat16
PAGE_SIZE: Final = 16
VOCAB_SIZE: Final = 151_936
MAX_SEQ_LEN: Final = 8192


@dataclass(frozen=True, slots=True)
class _Heads:
    """Query and KV heads of a layer, and their dimensions."""

    query: int
    kv: int = 8
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} heads"


SMALL, MIDDLE, LARGE = _Heads(16), _Heads(32), _Heads(40)
FEW_KV_HEADS = _Heads(32, kv=4)


def _sets(bytes_each: int) -> int:
    """Return how many sets of inputs of this size are needed to exceed the cache."""
    return max(2, -(-CACHE_BYTES // bytes_each))


def _upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    source = torch.from_numpy(values)
    return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(source)


def _decode(
    heads: _Heads, rows: int, low: int, high: int, *, fp8: bool = False, prefix_rows: int = 0
) -> Workload:
    """Decode attention of rows of ``low`` to ``high`` tokens, the longest first, as the scheduler orders them.

    With ``prefix_rows``, groups of this size share their first ``low`` tokens.
    """
    shared_tokens = low // PAGE_SIZE * PAGE_SIZE if prefix_rows else 0
    lengths = np.random.default_rng(0).integers(max(low, shared_tokens + 1), high, rows, endpoint=True)
    longest_first = -np.sort(-lengths).astype(np.int32)

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        pages = np.cumsum(-(-longest_first // PAGE_SIZE))
        table = np.zeros((rows, MAX_SEQ_LEN // PAGE_SIZE), np.int32)
        for row, end in enumerate(pages):
            count = -(-int(longest_first[row]) // PAGE_SIZE)
            table[row, :count] = np.arange(end - count, end)
        groups = np.arange(rows, dtype=np.int32) // max(1, prefix_rows)
        columns = shared_tokens // PAGE_SIZE
        table[:, :columns] = table[groups * max(1, prefix_rows), :columns]
        queries = torch.randn(rows, heads.query, heads.dim, dtype=DTYPE, device=device)
        kv_dtype = E4M3 if fp8 else DTYPE
        pool_shape = (int(pages[-1]) * PAGE_SIZE, heads.kv, heads.dim)
        pool_bytes = 2 * int(np.prod(pool_shape)) * kv_dtype.itemsize
        pools = [
            (
                torch.randn(pool_shape, device=device).to(kv_dtype),
                torch.randn(pool_shape, device=device).to(kv_dtype),
            )
            for _ in range(_sets(pool_bytes))
        ]
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        decode_rows = DecodeRows(slots, _upload(table, device), _upload(longest_first, device), PAGE_SIZE)
        output = torch.empty_like(queries)

        def make_launches() -> Sequence[Launch]:
            shared = None
            if prefix_rows:
                max_rows = max_group_rows(device, heads.query, heads.kv)
                tokens = np.full(rows, shared_tokens, np.int32)
                packed = pack_work_items(
                    groups,
                    tokens,
                    max_rows=max_rows,
                    rows=rows,
                    min_split_tokens=tuning_for(device).shared_prefix.min_split_tokens,
                )
                shared = unpack_shared_prefixes(_upload(packed, device), rows)
            attend = DecodeAttention(queries, pools[0], decode_rows, max_seq_len=MAX_SEQ_LEN, shared=shared)
            return [partial(attend, queries, pool, output) for pool in pools]

        return make_launches

    cache = ", FP8 cache" if fp8 else ""
    prefix = f" in groups of {prefix_rows} that share {low}" if prefix_rows else ""
    return Workload(f"{heads}, {rows} rows of {low} to {high} tokens{prefix}{cache}", prepare)


def _decode_layer(heads: _Heads, hidden: int, length: int, *, fp8: bool = False) -> Workload:
    """Decode attention of one row between the two products beside it.

    A tile may be fast by itself and slow in a step, because its shared memory is not free while the kernel ahead
    still runs.
    """
    attention = _decode(heads, 1, length, length, fp8=fp8)

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        make_attention = attention.prepare(device)
        ahead, behind = _products_beside(heads, hidden, device)
        x, y = (torch.randn(1, inputs, dtype=DTYPE, device=device) for inputs in (hidden, behind[0].shape[1]))

        def make_launches() -> Sequence[Launch]:
            attend = make_attention()

            def run(index: int) -> None:
                gemv(x, ahead[index])
                attend[index % len(attend)]()
                gemv(y, behind[index])

            return [partial(run, index) for index in range(len(ahead))]

        return make_launches

    return Workload(f"{attention.name}, with the products beside it", prepare)


def _fused_decode_layer(heads: _Heads, hidden: int, length: int) -> Workload:
    """``_decode_layer`` with QK norm and RoPE, which are a part of the launch of attention."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        ahead, behind = _products_beside(heads, hidden, device)
        x = torch.randn(1, hidden, dtype=DTYPE, device=device)
        pages = -(-length // PAGE_SIZE)
        shape = (2, pages * PAGE_SIZE, heads.kv, heads.dim)
        caches = [torch.randn(shape, dtype=DTYPE, device=device) for _ in ahead]
        table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        slots, lengths = (torch.full((1,), each, dtype=torch.int32, device=device) for each in (0, length))
        cos_sin = torch.randn(length, 2, heads.dim, dtype=DTYPE, device=device)
        rope = RopeInputs(cos_sin, lengths - 1, (lengths - 1).long())
        weights = torch.randn(2, heads.dim, dtype=DTYPE, device=device)
        rows = DecodeRows(slots, table, lengths, PAGE_SIZE)

        def make_launches() -> Sequence[Launch]:
            qkv = torch.empty(1, len(ahead[0]), dtype=DTYPE, device=device)
            pool = caches[0][0], caches[0][1]
            attend = FusedDecodeAttention(qkv, pool, rows, rope, 1e-6, max_seq_len=MAX_SEQ_LEN)

            def run(index: int) -> None:
                keys, values = caches[index]
                attended = attend(gemv(x, ahead[index]), weights, (keys, values))
                gemv(attended.flatten(1), behind[index])

            return [partial(run, index) for index in range(len(ahead))]

        return make_launches

    return Workload(
        f"{heads}, one row of {length} tokens with QK norm and RoPE, and the products beside it", prepare
    )


def _products_beside(
    heads: _Heads, hidden: int, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the QKV matrices [outputs, hidden] of some layers, and their output matrices [hidden, inputs]."""
    outputs, inner = (heads.query + 2 * heads.kv) * heads.dim, heads.query * heads.dim
    count = _sets(2 * (outputs * hidden + hidden * inner))
    ahead = [torch.randn(outputs, hidden, dtype=DTYPE, device=device) for _ in range(count)]
    return ahead, [torch.randn(hidden, inner, dtype=DTYPE, device=device) for _ in range(count)]


def _prefill(heads: _Heads, tokens: int, start: int) -> Workload:
    """Prefill attention of one chunk of ``tokens`` tokens after ``start`` cached ones."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        pages = -(-(start + tokens) // PAGE_SIZE)
        queries = torch.randn(tokens, heads.query, heads.dim, dtype=DTYPE, device=device)
        shape = (pages * PAGE_SIZE, heads.kv, heads.dim)
        pools = [
            (torch.randn(shape, dtype=DTYPE, device=device), torch.randn(shape, dtype=DTYPE, device=device))
            for _ in range(8)
        ]
        rows = _upload(np.array([[0], [start], [tokens], [0]], np.int32), device)
        table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        output = torch.empty_like(queries)

        def make_launches() -> Sequence[Launch]:
            attend = PrefillAttention(
                queries, pools[0], rows, table, PAGE_SIZE, max_chunk_len=tokens, skipped=0
            )
            return [partial(attend, queries, pool, output) for pool in pools]

        return make_launches

    return Workload(f"{heads}, {tokens} tokens after {start}", prepare)


def _heads(heads: _Heads, tokens: int) -> Workload:
    """QK-norm, RoPE and KV store."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        width = (heads.query + 2 * heads.kv) * heads.dim
        qkvs = [
            torch.randn(tokens, width, dtype=DTYPE, device=device) for _ in range(_sets(2 * tokens * width))
        ]
        cos_sin = torch.randn(4096, 2, heads.dim, dtype=DTYPE, device=device)
        weights = torch.randn(2, heads.dim, dtype=DTYPE, device=device)
        places = torch.arange(tokens, device=device)
        positions = (places % 4096).int()
        shape = (tokens, heads.kv, heads.dim)
        pool = torch.empty(shape, dtype=DTYPE, device=device), torch.empty(shape, dtype=DTYPE, device=device)
        return lambda: [
            partial(qk_norm_rope_store_kv, qkv, cos_sin, positions, weights, 1e-6, pool, places)
            for qkv in qkvs
        ]

    return Workload(f"{heads}, {tokens} tokens", prepare)


def _weights(outputs: int, inputs: int, device: torch.device) -> list[torch.Tensor]:
    return [
        torch.randn(outputs, inputs, dtype=DTYPE, device=device) for _ in range(_sets(2 * outputs * inputs))
    ]


def _fp8_weights(outputs: int, inputs: int, device: torch.device) -> list[FP8Weight]:
    weights = [empty_fp8_weight(outputs, inputs, device) for _ in range(_sets(outputs * inputs))]
    for weight in weights:
        weight.values.view(torch.uint8).random_(0, 0x70)  # finite numbers, none of them negative
        weight.scales.fill_(1e-3)
    return weights


def _gemv(outputs: int, inputs: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = torch.randn(1, inputs, dtype=DTYPE, device=device)
        weights = _weights(outputs, inputs, device)
        return lambda: [partial(gemv, x, weight) for weight in weights]

    return Workload(f"{outputs} x {inputs}", prepare)


def _gemv_or_library(outputs: int, inputs: int) -> Workload:
    """The GEMV, and the library's product."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = torch.randn(1, inputs, dtype=DTYPE, device=device)
        weights = _weights(outputs, inputs, device)
        return lambda: [
            lambda: [gemv(x, weight) for weight in weights],
            lambda: [F.linear(x, weight) for weight in weights],
        ]

    return Workload(f"{outputs} x {inputs}", prepare)


def _gate_up(outputs: int, inputs: int) -> Workload:
    """The product of one token with gate and up, SwiGLU's product, and that with the down-projection."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = torch.randn(1, inputs, dtype=DTYPE, device=device)
        weights = zip(_weights(outputs, inputs, device), _weights(inputs, outputs // 2, device), strict=False)

        def run(gate_up: torch.Tensor, down: torch.Tensor) -> None:
            product = fused_linear_silu_and_mul(x, gate_up)
            gemv(silu_and_mul(linear(x, gate_up)) if product is None else product, down)

        launches = [partial(run, *pair) for pair in weights]
        return lambda: launches

    return Workload(f"{outputs} x {inputs}", prepare)


def _fp8_gate_up(outputs: int, inputs: int) -> Workload:
    """The same with FP8 weights, and so with quantization of SwiGLU's product."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = quantize_activations(torch.randn(1, inputs, dtype=DTYPE, device=device))
        weights = zip(
            _fp8_weights(outputs, inputs, device), _fp8_weights(inputs, outputs // 2, device), strict=False
        )

        def run(gate_up: FP8Weight, down: FP8Weight) -> None:
            if can_fuse_silu_and_mul(x):
                quantized = quantize_activations(fused_fp8_linear_silu_and_mul(x, gate_up))
            else:
                quantized = silu_and_mul_quantize(fp8_linear(x, gate_up))
            fp8_gemv(quantized, down)

        launches = [partial(run, *pair) for pair in weights]
        return lambda: launches

    return Workload(f"{outputs} x {inputs}", prepare)


def _fp8_gemv(outputs: int, inputs: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = quantize_activations(torch.randn(1, inputs, dtype=DTYPE, device=device))
        weights = _fp8_weights(outputs, inputs, device)
        return lambda: [partial(fp8_gemv, x, weight) for weight in weights]

    return Workload(f"{outputs} x {inputs}", prepare)


def _quantizing_gemv(outputs: int, inputs: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = torch.randn(1, inputs, dtype=DTYPE, device=device)
        weights = _fp8_weights(outputs, inputs, device)
        return lambda: [partial(quantizing_fp8_gemv, x, weight) for weight in weights]

    return Workload(f"{outputs} x {inputs}, quantizing", prepare)


def _norm_gemv(outputs: int, inputs: int) -> Workload:
    """Norms of one token, each with its product in one launch, one behind the other."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x, norm_weight = _token_and_norm_weight(inputs, device)
        weights = _fp8_weights(outputs, inputs, device)
        return lambda: [
            partial(add_rms_norm_fp8_gemv, x, x, norm_weight, 1e-6, weight, None, math.inf)
            for weight in weights
        ]

    return Workload(f"{outputs} x {inputs}, behind a norm", prepare)


def _norm_gemv_or_not(outputs: int, inputs: int) -> Workload:
    """The norm of one token and its product, in one launch and in two."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x, norm_weight = _token_and_norm_weight(inputs, device)
        weights = _fp8_weights(outputs, inputs, device)
        return lambda: [
            lambda: [
                add_rms_norm_fp8_gemv(x, x, norm_weight, 1e-6, weight, None, math.inf) for weight in weights
            ],
            lambda: [
                fp8_gemv(add_rms_norm_quantize(x, x, norm_weight, 1e-6)[0], weight) for weight in weights
            ],
        ]

    return Workload(f"{outputs} x {inputs}, behind a norm", prepare)


def _token_and_norm_weight(inputs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, inputs, dtype=DTYPE, device=device)
    return x, torch.ones(inputs, dtype=DTYPE, device=device)


def _preloading_fp8_gemv_or_not(outputs: int, inputs: int) -> Workload:
    """The GEMV that loads all its weights before the kernel ahead has ended, and the one that loads a few."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = quantize_activations(torch.randn(1, inputs, dtype=DTYPE, device=device))
        weights, tuning = _fp8_weights(outputs, inputs, device), tuning_for(device).fp8_gemv
        return lambda: [
            lambda: [fp8_gemv(x, weight, tile=tuning.preloading_tile) for weight in weights],
            lambda: [fp8_gemv(x, weight, tile=tuning.tile) for weight in weights],
        ]

    return Workload(f"{outputs} x {inputs}", prepare)


def _stream_k(tokens: int, outputs: int, inputs: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = quantize_activations(torch.randn(tokens, inputs, dtype=DTYPE, device=device))
        weights = _fp8_weights(outputs, inputs, device)
        return lambda: [partial(stream_k_gemm, x, weight) for weight in weights]

    return Workload(f"{tokens} tokens, {outputs} x {inputs}", prepare)


def _stream_k_or_library(tokens: int, *shapes: tuple[int, int]) -> Workload:
    """The stream-K products of a layer, and the library's."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        work = [
            (
                quantize_activations(torch.randn(tokens, inputs, dtype=DTYPE, device=device)),
                _fp8_weights(outputs, inputs, device),
            )
            for outputs, inputs in shapes
        ]
        return lambda: [
            lambda: [stream_k_gemm(x, weight) for x, weights in work for weight in weights],
            lambda: [_library_product(x, weight) for x, weights in work for weight in weights],
        ]

    return Workload(
        f"{tokens} tokens, " + ", ".join(f"{rows} x {columns}" for rows, columns in shapes), prepare
    )


def _library_product(x: QuantizedActivations, weight: FP8Weight) -> torch.Tensor:
    product: torch.Tensor = scaled_mm(
        x.values,
        weight.values.T,
        scale_a=x.scales,
        scale_b=weight.scales.T,
        out_dtype=DTYPE,
        use_fast_accum=True,
    )
    return product


def _block_fp8_weights(outputs: int, inputs: int, device: torch.device) -> list[BlockFP8Weight]:
    shape = (outputs // FP8_BLOCK, -(-inputs // (4 * FP8_BLOCK)) * 4)
    return [
        BlockFP8Weight(weight.values, torch.full(shape, 1e-3, device=device), weight.tile_counters)
        for weight in _fp8_weights(outputs, inputs, device)
    ]


def _block_fp8(product: Callable[..., torch.Tensor], tokens: int, outputs: int, inputs: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = quantize_grouped_activations(torch.randn(tokens, inputs, dtype=DTYPE, device=device))
        weights = _block_fp8_weights(outputs, inputs, device)
        return lambda: [partial(product, x, weight) for weight in weights]

    return Workload(f"{tokens} tokens, {outputs} x {inputs}", prepare)


def _block_fp8_or_library(tokens: int, *shapes: tuple[int, int]) -> Workload:
    """The stream-K products of a layer in block FP8, and the library's."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        work = [
            (
                quantize_grouped_activations(torch.randn(tokens, inputs, dtype=DTYPE, device=device)),
                _block_fp8_weights(outputs, inputs, device),
            )
            for outputs, inputs in shapes
        ]
        return lambda: [
            lambda: [block_fp8_stream_k_gemm(x, weight) for x, weights in work for weight in weights],
            lambda: [
                block_scaled_mm(x.values, weight.values.T, x.scales, weight.scales.T)
                for x, weights in work
                for weight in weights
            ],
        ]

    return Workload(
        f"{tokens} tokens, " + ", ".join(f"{rows} x {columns}" for rows, columns in shapes), prepare
    )


def _int4_weights(outputs: int, inputs: int, device: torch.device) -> list[Int4Weight]:
    """Make weights with zero points in groups of 128 inputs."""
    tables = (outputs, inputs // INT4_UNIT)
    words = (outputs, inputs // PER_WORD)
    return [
        Int4Weight(
            words=torch.randint(0, (1 << 31) - 1, words, dtype=torch.int32, device=device),
            scales=torch.full(tables, 1e-3, dtype=DTYPE, device=device),
            zeros=torch.full(tables, 7.0, dtype=DTYPE, device=device),
            inputs=inputs,
            group_size=INT4_UNIT,
            order=None,
            tile_counters=torch.zeros(outputs, dtype=torch.int32, device=device),
        )
        for _ in range(_sets(outputs * inputs // 2))
    ]


def _int4(product: Callable[..., torch.Tensor], tokens: int, outputs: int, inputs: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = torch.randn(tokens, inputs, dtype=DTYPE, device=device)
        weights = _int4_weights(outputs, inputs, device)
        return lambda: [partial(product, x, weight) for weight in weights]

    return Workload(f"{tokens} tokens, {outputs} x {inputs}", prepare)


def _int4_or_library(tokens: int, *shapes: tuple[int, int]) -> Workload:
    """The products of a layer with int4 weights, and those of the library after dequantization."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        work = [
            (
                torch.randn(tokens, inputs, dtype=DTYPE, device=device),
                _int4_weights(outputs, inputs, device),
            )
            for outputs, inputs in shapes
        ]
        return lambda: [
            lambda: [int4_stream_k_gemm(x, weight) for x, weights in work for weight in weights],
            lambda: [dequantize_and_multiply(x, weight) for x, weights in work for weight in weights],
        ]

    return Workload(
        f"{tokens} tokens, " + ", ".join(f"{rows} x {columns}" for rows, columns in shapes), prepare
    )


def _dequantize(outputs: int, inputs: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        weights = _int4_weights(outputs, inputs, device)
        return lambda: [partial(dequantize, weight, DTYPE) for weight in weights]

    return Workload(f"{outputs} x {inputs}", prepare)


def _single_row(width: int) -> Workload:
    """SwiGLU's product of one token, quantized."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        rows = torch.randn(64, 1, 2 * width, dtype=DTYPE, device=device)
        return lambda: [partial(silu_and_mul_quantize, row) for row in rows]

    return Workload(f"{width} elements", prepare)


@dataclass(frozen=True, slots=True)
class _Logits:
    """Logits in turn, and the tables that sampling reads."""

    logits: Sequence[torch.Tensor]
    slots: torch.Tensor
    seeds: torch.Tensor
    params: torch.Tensor


def _make_logits(rows: int, spread: float, params: tuple[float, ...], device: torch.device) -> _Logits:
    logits = [
        spread * torch.randn(rows, VOCAB_SIZE, dtype=DTYPE, device=device)
        for _ in range(_sets(2 * rows * VOCAB_SIZE))
    ]
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    return _Logits(
        logits[:64],
        slots,
        torch.zeros(rows, dtype=torch.int64, device=device),
        _upload(np.tile(np.array(params, np.float32), (rows, 1)), device),
    )


def _sampling(rows: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        made = _make_logits(rows, 3.0, (0.6, 0, 1, 0), device)
        return lambda: [
            partial(sample_tokens, logits, made.slots, made.slots, made.seeds, made.params)
            for logits in made.logits
        ]

    return Workload(f"{rows} rows of {VOCAB_SIZE} logits", prepare)


def _thresholds(rows: int, spread: float) -> Workload:
    """Thresholds of top_p 0.95; a spread of 3 is usual, one of 8 peaked, as of a trained model."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        made = _make_logits(rows, spread, (0.6, 0, 0.95, 0), device)
        return lambda: [partial(find_thresholds, logits, made.slots, made.params) for logits in made.logits]

    return Workload(f"{rows} rows, spread {spread:g}", prepare)


LATENCY_TILES: Final = (
    AttentionTile(32, warps=2, stages=3),
    AttentionTile(32, warps=4, stages=3),
    AttentionTile(64, warps=2, stages=3),
    AttentionTile(64, warps=4, stages=1),
    AttentionTile(64, warps=4, stages=2),
)
FUSED_TILES: Final = (
    AttentionTile(32, warps=2, stages=2),
    AttentionTile(32, warps=4, stages=2),
    AttentionTile(64, warps=4, stages=2),
)
THROUGHPUT_TILES: Final = (
    AttentionTile(64, warps=2, stages=3),
    AttentionTile(64, warps=4, stages=3),
    AttentionTile(128, warps=4, stages=2),
    AttentionTile(128, warps=4, stages=3),
    AttentionTile(128, warps=8, stages=3),
)
GEMV_TILES: Final = tuple(
    GemvTile(columns, pair=pair, warps=warps)
    for columns in (512, 1024, 2048)
    for pair in (False, True)
    for warps in (2, 4)
)
FP8_GEMV_TILES: Final = tuple(
    FP8GemvTile(columns, warps)
    for columns, warps in ((256, 1), (512, 1), (1024, 1), (1024, 2), (2048, 2), (2048, 4))
)
PRELOADING_GEMV_TILES: Final = tuple(
    PreloadingGemvTile(columns, warps, rows)
    for columns, warps, rows in (
        (1024, 1, 1),
        (1024, 2, 1),
        (1024, 4, 1),
        (1024, 1, 2),
        (1024, 2, 2),
        (1024, 4, 2),
        (1024, 1, 4),
        (1024, 2, 4),
        (1024, 4, 4),
        (2048, 4, 2),
        (2048, 8, 4),
    )
)
STREAM_K_BLOCKS: Final = {512: (2, 3, 4), 256: (4, 6, 7, 8), 128: (4, 6, 8)}
"""Stages by inputs of a block."""
STREAM_K_WORK: Final = (
    (16, 7168, 5120, 512),
    (64, 6144, 1024, 512),
    (16, 5632, 2816, 256),
    (32, 7168, 5120, 256),
    (64, 7168, 5120, 256),
    (128, 5120, 17408, 256),
    (64, 4864, 896, 128),
)
"""For each rule of ``StreamKTuning.rules``: tokens, outputs, inputs, and the largest block that divides the inputs."""
BLOCK_FP8_WORK: Final = (
    (16, 7168, 5120, 256),
    (32, 7168, 5120, 256),
    (64, 7168, 5120, 256),
    (64, 4864, 896, 128),
)
"""The same for each rule of ``BlockFP8Tuning.rules``."""
INT4_WORK: Final = ((32, 7168, 5120, 256), (64, 7168, 5120, 256), (64, 4864, 896, 128))
"""The same for each rule of ``W4A16Tuning.rules``."""
INT4_STAGES: Final = (2, 3, 4, 6)
INT4_GEMV_TILES: Final = tuple(
    Int4GemvTile(words, warps) for words in (64, 128, 256, 512) for warps in (1, 2, 4) if words >= 32 * warps
)
MATRIX_TILES: Final = (
    MatrixTile(64, 64, warps=4, stages=4),
    MatrixTile(64, 128, warps=4, stages=3),
    MatrixTile(128, 128, warps=8, stages=3),
)
LAYER: Final = ((7168, 5120), (5120, 5120), (34816, 5120))
TALL: Final = ((5120, 17408),)
TOKEN_COUNTS: Final = (16, 32, 48, 64, 96, 128)
OUTPUT_COUNTS: Final = (8192, 16384, 32768, 65536, 131072)

TUNABLES: Final = (
    Tunable(
        "decode_attention.throughput_tile",
        THROUGHPUT_TILES,
        (
            _decode(MIDDLE, 256, 100, 2048),
            _decode(LARGE, 137, 100, 1700),
            _decode(LARGE, 137, 100, 1700, fp8=True),
        ),
    ),
    Tunable(
        "decode_attention.target_programs",
        (350, 700, 1400, 2200),
        (_decode(LARGE, 137, 100, 1700), _decode(MIDDLE, 64, 500, 1500), _decode(MIDDLE, 32, 4000, 8000)),
    ),
    Tunable(
        "decode_attention.latency_tile",
        LATENCY_TILES,
        (_decode_layer(MIDDLE, 4096, 450), _decode_layer(LARGE, 5120, 1900)),
    ),
    Tunable(
        "decode_attention.fused_tile",
        FUSED_TILES,
        (
            _fused_decode_layer(FEW_KV_HEADS, 2048, 450),
            _fused_decode_layer(MIDDLE, 4096, 450),
            _fused_decode_layer(LARGE, 5120, 450),
        ),
    ),
    Tunable(
        "decode_attention.fp8_latency_tile",
        LATENCY_TILES,
        (_decode_layer(LARGE, 5120, 450, fp8=True), _decode(LARGE, 32, 600, 2000, fp8=True)),
    ),
    Tunable(
        "decode_attention.max_group_heads",
        (32, 64, 128),
        (_decode(MIDDLE, 256, 2048, 2240, prefix_rows=16), _decode(LARGE, 256, 2048, 2240, prefix_rows=16)),
    ),
    Tunable(
        "decode_attention.prefix_tile",
        (
            AttentionTile(32, warps=4, stages=3),
            AttentionTile(64, warps=4, stages=2),
            AttentionTile(64, warps=4, stages=3),
        ),
        (_decode(MIDDLE, 256, 2048, 2240, prefix_rows=16), _decode(MIDDLE, 256, 2048, 2240, prefix_rows=4)),
    ),
    Tunable(
        "prefill_tile",
        (
            PrefillAttentionTile(64, tokens=64, warps=4, stages=3),
            PrefillAttentionTile(128, tokens=64, warps=4, stages=3),
            PrefillAttentionTile(128, tokens=64, warps=8, stages=3),
            PrefillAttentionTile(128, tokens=128, warps=8, stages=2),
        ),
        (_prefill(SMALL, 256, 0), _prefill(SMALL, 1024, 0), _prefill(MIDDLE, 128, 2048)),
    ),
    Tunable("qk_norm_rope_heads", (4, 8, 16, 32), (_heads(LARGE, 256), _heads(LARGE, 16_384))),
    Tunable("gemv.edge_tile", GEMV_TILES, (_gemv(4096, 1024), _gemv(1024, 2048), _gemv(5120, 17_408))),
    Tunable("gemv.tile", GEMV_TILES, (_gemv(6144, 4096), _gemv(28_672, 4096), _gemv(4096, 14_336))),
    Tunable("gemv.uneven_tile", GEMV_TILES, (_gemv(7168, 5120), _gemv(34_816, 5120), _gemv(1024, 3072))),
    Tunable(
        "gemv.max_outputs",
        OUTPUT_COUNTS,
        tuple(_gemv_or_library(count, 4096) for count in OUTPUT_COUNTS),
        True,
    ),
    Tunable("gemv.fuse_silu_and_mul", (False, True), (_gate_up(28_672, 4096), _gate_up(25_600, 5120))),
    Tunable("gemv.uneven_silu_tile", GEMV_TILES, (_gate_up(25_600, 5120), _gate_up(34_816, 5120))),
    Tunable(
        "fp8_gemv.tile",
        FP8_GEMV_TILES,
        (_fp8_gemv(7168, 5120), _fp8_gemv(34_816, 5120), _fp8_gemv(6144, 4096)),
    ),
    Tunable("fp8_gemv.long_tile", FP8_GEMV_TILES, (_fp8_gemv(5120, 17_408), _fp8_gemv(4096, 14_336))),
    Tunable(
        "fp8_gemv.fuse_silu_and_mul", (False, True), (_fp8_gate_up(34_816, 5120), _fp8_gate_up(28_672, 4096))
    ),
    Tunable(
        "fp8_gemv.preloading_tile",
        PRELOADING_GEMV_TILES,
        (_quantizing_gemv(2048, 4096), _quantizing_gemv(4096, 4096), _fp8_gemv(5120, 2048)),
    ),
    Tunable(
        "fp8_gemv.max_preloaded_weights",
        (8 << 20, 16 << 20, 32 << 20, 64 << 20),
        (
            _preloading_fp8_gemv_or_not(2048, 4096),
            _preloading_fp8_gemv_or_not(4096, 4096),
            _preloading_fp8_gemv_or_not(4096, 8192),
            _preloading_fp8_gemv_or_not(8192, 8192),
        ),
        True,
    ),
    Tunable(
        "fp8_gemv.norm_tile",
        tuple(
            NormGemvTile(rows, inputs)
            for rows, inputs in ((4, 512), (4, 1024), (8, 512), (8, 1024), (8, 2048), (16, 512), (16, 1024))
        ),
        (_norm_gemv(5120, 2048), _norm_gemv(6144, 4096)),
    ),
    Tunable(
        "fp8_gemv.max_normed_weights",
        (12 << 20, 25 << 20),
        (_norm_gemv_or_not(5120, 2048), _norm_gemv_or_not(6144, 4096)),
        True,
    ),
    *(
        Tunable(
            f"stream_k.rules.{index}.tile",
            tuple(
                StreamKTile(size, stages)
                for size in STREAM_K_BLOCKS
                if size <= most
                for stages in STREAM_K_BLOCKS[size]
            ),
            (_stream_k(tokens, outputs, inputs),),
        )
        for index, (tokens, outputs, inputs, most) in enumerate(STREAM_K_WORK)
    ),
    Tunable(
        "stream_k.max_tokens",
        TOKEN_COUNTS,
        tuple(_stream_k_or_library(count, *LAYER) for count in TOKEN_COUNTS),
        True,
    ),
    Tunable(
        "stream_k.max_tokens_of_tall",
        TOKEN_COUNTS,
        tuple(_stream_k_or_library(count, *TALL) for count in TOKEN_COUNTS),
        True,
    ),
    Tunable(
        "block_fp8.gemv_tile",
        FP8_GEMV_TILES,
        (_block_fp8(block_fp8_gemv, 1, 7168, 5120), _block_fp8(block_fp8_gemv, 1, 34_816, 5120)),
    ),
    Tunable(
        "block_fp8.long_gemv_tile",
        FP8_GEMV_TILES,
        (_block_fp8(block_fp8_gemv, 1, 5120, 17_408), _block_fp8(block_fp8_gemv, 1, 4096, 14_336)),
    ),
    *(
        Tunable(
            f"block_fp8.rules.{index}.tile",
            tuple(
                StreamKTile(size, stages)
                for size in STREAM_K_BLOCKS
                if size <= most
                for stages in STREAM_K_BLOCKS[size]
            ),
            (_block_fp8(block_fp8_stream_k_gemm, tokens, outputs, inputs),),
        )
        for index, (tokens, outputs, inputs, most) in enumerate(BLOCK_FP8_WORK)
    ),
    Tunable(
        "block_fp8.max_tokens",
        TOKEN_COUNTS[:4],
        tuple(_block_fp8_or_library(count, *LAYER) for count in TOKEN_COUNTS[:4]),
        True,
    ),
    Tunable(
        "block_fp8.matrix_tile",
        MATRIX_TILES,
        (_block_fp8(block_fp8_gemm, 257, 7168, 5120), _block_fp8(block_fp8_gemm, 1025, 5120, 17_408)),
    ),
    Tunable(
        "w4a16.gemv_tile",
        INT4_GEMV_TILES,
        (
            _int4(int4_gemv, 1, 7168, 5120),
            _int4(int4_gemv, 1, 28_672, 4096),
            _int4(int4_gemv, 1, 5120, 17_408),
        ),
    ),
    *(
        Tunable(
            f"w4a16.rules.{index}.tile",
            tuple(
                StreamKTile(size, stages, warps=warps)
                for size in (512, 256, 128)
                if size <= most
                for stages in INT4_STAGES
                for warps in (4, 8)
            ),
            (_int4(int4_stream_k_gemm, tokens, outputs, inputs),),
        )
        for index, (tokens, outputs, inputs, most) in enumerate(INT4_WORK)
    ),
    Tunable(
        "w4a16.max_tokens",
        TOKEN_COUNTS[:4],
        tuple(_int4_or_library(count, *LAYER) for count in TOKEN_COUNTS[:4]),
        True,
    ),
    Tunable("w4a16.dequantize_rows", (16, 32, 64), (_dequantize(6144, 5120),)),
    *MOE_TUNABLES,
    Tunable("single_row_chunk", (512, 1024, 2048), (_single_row(3072), _single_row(17_408))),
    Tunable("single_row_warps", (2, 4, 8), (_single_row(3072), _single_row(17_408))),
    Tunable("sampling_block", (1024, 2048, 4096, 8192), (_sampling(1), _sampling(256))),
    Tunable("sampling_warps", (4, 8), (_sampling(1), _sampling(256))),
    Tunable(
        "top_k_top_p.chunk",
        (4096, 8192, 16_384),
        (_thresholds(1, 8.0), _thresholds(32, 3.0), _thresholds(256, 8.0)),
    ),
    Tunable(
        "top_k_top_p.block",
        (512, 1024, 2048),
        (_thresholds(1, 8.0), _thresholds(32, 3.0), _thresholds(256, 8.0)),
    ),
    Tunable("top_k_top_p.max_programs", (512, 1024, 2048), (_thresholds(32, 3.0), _thresholds(256, 8.0))),
)
