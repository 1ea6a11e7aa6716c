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


def test_pushed_data_is_16_bytes_wide_between_a_fence_and_an_acquire(sums: Kernels) -> None:
    ptx = sums["push_all_reduce_kernel"]["ptx"]
    assert re.search(rf"st\.global{WIDE}", ptx) and re.search(rf"ld\.global\.cg\S*{WIDE}", ptx)
    assert not re.search(r"ld\.global\.cg\S*\.b(16|32|64) ", ptx.replace("v2.b64", "").replace("v4.b32", ""))
    # Narrow stores are those of the end of a call alone: its epoch, and what it reports.
    assert ptx.index("st.global.b") > ptx.rindex("ld.global.cg")
    flag, acquire = "st.relaxed.sys.global.b64", "ld.acquire.sys.global.b64"
    assert ptx.index("bar.sync") < ptx.index("fence.acq_rel.sys") < ptx.index(flag)
    assert ptx.index(acquire) < ptx.index("ld.global.cg")
    # The order of all of them in TTGIR, whose loops are nested; PTX may have the body of a loop behind its exit.
    ttgir = sums["push_all_reduce_kernel"]["ttgir"]
    order = [
        ttgir.index(each) for each in ("tt.store", "fence.acq_rel.sys", flag, acquire, "cacheModifier = cg")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize("width", [64, 1536, 4096, 5120, 8192])
def test_fused_norms_sum_a_row_in_the_layout_of_the_kernels_that_they_fuse(width: int) -> None:
    """The layout decides the order of a sum, and so its last bits."""
    kernels = compile_case("normalize", width)
    for algorithm in ("", "push_"):
        fused = row_layouts(kernels[f"{algorithm}all_reduce_add_rms_norm_kernel"])
        assert fused == row_layouts(kernels["rms_norm_kernel"])
        fused = row_layouts(kernels[f"{algorithm}all_reduce_add_rms_norm_quantize_kernel"])
        assert fused == row_layouts(kernels["add_rms_norm_quantize_kernel"])


def test_fused_one_shot_loads_rows_16_bytes_wide_between_an_acquire_and_the_norm() -> None:
    for kernel in ("push_all_reduce_add_rms_norm_kernel", "push_all_reduce_add_rms_norm_quantize_kernel"):
        compiled = compile_case("normalize", 5120)[kernel]
        loads = re.findall(r"ld\.global\.cg\S*", compiled["ptx"])
        assert loads and all(re.search(WIDE, each) for each in loads), loads
        ttgir, flag = compiled["ttgir"], "st.relaxed.sys.global.b64"
        landmarks = ("fence.acq_rel.sys", flag, "ld.acquire.sys.global.b64", "cacheModifier = cg", "scf.for")
        order = [ttgir.rindex(each) if each == "scf.for" else ttgir.index(each) for each in landmarks]
        assert order == sorted(order)


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
