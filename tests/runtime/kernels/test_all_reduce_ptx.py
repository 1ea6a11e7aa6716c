"""The all-reduce kernels as compiled for an H100: scopes and widths of their accesses, and the layout of the fused norm."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from compiling import CompilingProcess

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

SCRIPT: Final = str(Path(__file__).parents[2] / "support/compiled_kernels.py")
WIDE: Final = r"\.v(2\.b64|4\.b32)"
"""16 bytes at a time."""
Kernels = dict[str, dict[str, str]]


def compile_case(kind: str, number: int) -> Kernels:
    """Return PTX and TTGIR of the kernels of a case of ``compiled_kernels``."""
    found: Kernels = _compiler().ask([kind, number])
    return found


@cache
def _compiler() -> CompilingProcess:
    return CompilingProcess(SCRIPT)


@pytest.fixture(scope="module", autouse=True)
def _closed_compiler() -> Iterator[None]:
    yield
    _compiler().close()
    _compiler.cache_clear()


@pytest.fixture(scope="module", params=[2, 4, 8])
def sums(request: pytest.FixtureRequest) -> Kernels:
    return compile_case("sum", request.param)


def test_words_are_stored_and_polled_16_bytes_wide_at_system_scope(sums: Kernels) -> None:
    """And no access to peers is narrower: what remains are the epoch, the table and the message."""
    ptx = sums["low_latency_all_reduce_kernel"]["ptx"]
    assert "st.relaxed.sys.global.v2.b64" in ptx and "ld.relaxed.sys.global.v2.b64" in ptx
    assert not re.search(r"(st|ld)\.relaxed\.sys\.global\.b", ptx)
    message = re.findall(r"(?:ld|st)\.global\S*\.v\S*", ptx)
    assert message and all(re.search(WIDE, each) for each in message), message


def test_lines_are_stored_polled_and_emptied_16_bytes_wide_by_their_threads_alone(sums: Kernels) -> None:
    """Without a fence; what barriers there are belong to the end of a call. A line stays in one thread."""
    kernel = sums["push_all_reduce_kernel"]
    ptx = kernel["ptx"]
    lines = re.findall(r"(?:ld\.volatile|ld\.relaxed\.sys|st)\.global\S*\.v\S*", ptx)
    assert {each.partition(".global")[0] for each in lines} == {"ld.volatile", "ld.relaxed.sys", "st"}
    assert all(re.search(WIDE, each) for each in lines), lines
    assert not re.search(r"ld\.(volatile|relaxed\.sys)\.global\.b", ptx)
    assert "fence" not in ptx and "ld.acquire" not in ptx
    assert ptx.index("bar.sync") > ptx.rindex("ld.relaxed.sys") and "convert_layout" not in kernel["ttgir"]
    # Narrow stores are those of the end of a call alone: its epoch, and what it reports.
    assert ptx.index("st.global.b") > ptx.rindex("ld.relaxed.sys")


@pytest.mark.parametrize("width", [64, 1536, 4096, 5120, 8192])
def test_fused_norms_sum_a_row_in_the_layout_of_the_kernels_that_they_fuse(width: int) -> None:
    """The layout decides the order of a sum, and so its last bits."""
    kernels = compile_case("normalize", width)
    for algorithm in ("", "push_"):
        fused = row_layouts(kernels[f"{algorithm}all_reduce_add_rms_norm_kernel"])
        assert fused == row_layouts(kernels["rms_norm_kernel"])
        fused = row_layouts(kernels[f"{algorithm}all_reduce_add_rms_norm_quantize_kernel"])
        assert fused == row_layouts(kernels["add_rms_norm_quantize_kernel"])


def test_fused_one_shot_loads_rows_16_bytes_wide_behind_their_arrival_and_a_barrier() -> None:
    for kernel in ("push_all_reduce_add_rms_norm_kernel", "push_all_reduce_add_rms_norm_quantize_kernel"):
        ptx = compile_case("normalize", 5120)[kernel]["ptx"]
        loads = re.findall(r"ld\.(?:global\.cg|volatile\.global|relaxed\.sys)\S*", ptx)
        assert loads and all(re.search(WIDE, each) for each in loads), loads
        assert "fence" not in ptx and "ld.acquire" not in ptx
        arrived = ptx.rindex("ld.relaxed.sys")
        assert arrived < ptx.index("bar.sync", arrived) < ptx.index("ld.global.cg")


@pytest.mark.parametrize("ranks", [2, 8])
def test_fused_product_stores_words_behind_its_wait_and_lets_the_norm_start_there(ranks: int) -> None:
    """One word for each rank; the norm reads the epoch before its own wait, so it must not start ahead of the GEMV's."""
    kernels = compile_case("multiply", ranks)
    gemv, norm = (kernels[name]["ptx"] for name in ("gemv_push_kernel", "receive_add_rms_norm_kernel"))
    store = "st.relaxed.sys.global.b64"
    assert gemv.count(store) == ranks and "st.global" not in gemv
    wait, launch = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    assert gemv.index("L1::evict_first") < gemv.index(wait) < gemv.index(launch) < gemv.index(store)
    load = "ld.relaxed.sys.global.b64"
    assert norm.index(launch) < norm.index("prefetch.global.L2") and norm.index(load) < norm.rindex(wait)
    # What the kernels ahead of the GEMV wrote is not read from L1.
    assert norm.count("ld.global.cg") >= 2


def row_layouts(kernel: dict[str, str]) -> list[str]:
    """Return shape and layout of the operand of each reduction of a float32 row, layouts written out."""
    ttgir = kernel["ttgir"]
    names = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    operands = re.findall(r"\) : \(tensor<(\d+xf32), (#\w+)>\) -> f32", ttgir)
    assert operands, "no reduction found"
    return [f"{shape} {names[name]}" for shape, name in operands]
