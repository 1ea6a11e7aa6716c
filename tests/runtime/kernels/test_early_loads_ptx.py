"""Kernels as compiled for an H100: what they load before their wait for the kernel ahead, and that they store nothing there."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from compiling import CompilingProcess

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

SCRIPT: Final = str(Path(__file__).parents[2] / "support/compiled_kernels.py")
WAIT: Final = r"griddepcontrol\.wait"


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompilingProcess]:
    process = CompilingProcess(SCRIPT)
    yield process
    process.close()


def test_fused_decode_attention_loads_keys_and_values_from_l2(compiler: CompilingProcess) -> None:
    ptx = compiler.ask(["attend", 4])["fused_decode_attention_kernel"]["ptx"]
    early, late = re.split(WAIT, ptx)
    assert len(re.findall(r"ld\.global\.cg\.v4\.b32", early)) >= 8
    assert "ld.global.cg" not in late and "st.global" not in early
    # What is loaded early without passing by L1 no kernel writes: angles and the weights of the norm.
    ordinary = re.findall(r"ld\.global\.(?!cg)\S+", early)
    assert ordinary and not any("v4" in each for each in ordinary), ordinary


@pytest.mark.parametrize("rows", [4, 8])
def test_gemv_behind_a_norm_loads_its_rows(compiler: CompilingProcess, rows: int) -> None:
    """Two warps hold rows of 2,048 bytes, so each thread loads 4 int64 of a row."""
    ptx = compiler.ask(["normalize_and_multiply", rows])["add_rms_norm_fp8_gemv_kernel"]["ptx"]
    early, late = re.split(WAIT, ptx)
    assert len(re.findall(r"ld\.global\.b64", early)) == 4 * rows
    assert not re.findall(r"ld\.global\.b64", late) and "st.global" not in early
    assert re.findall(r"ld\.global\.v2\.b64", late)  # the token


def test_gemv_behind_a_norm_compiles_for_ada() -> None:
    """The first GPUs with FP8 products, whose assembler knows fewer instructions than that of Hopper."""
    process = CompilingProcess(SCRIPT)  # a process compiles a kernel for one architecture
    assert "add_rms_norm_fp8_gemv_kernel" in process.ask(["normalize_and_multiply", 4, 89])
    process.close()
