"""Decode attention with QK norm and RoPE in its launch, as compiled for an H100: what it loads before its wait."""

import re
from pathlib import Path
from typing import Final

import pytest
from compiling import CompilingProcess

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

SCRIPT: Final = str(Path(__file__).parents[2] / "support/compiled_kernels.py")


def test_keys_and_values_are_loaded_from_l2_before_the_wait_and_nothing_is_stored_there() -> None:
    """An empty split waits as well, before it stores that it is empty."""
    process = CompilingProcess(SCRIPT)
    try:
        ptx = process.ask(["attend", 4])["fused_decode_attention_kernel"]["ptx"]
    finally:
        process.close()
    first_wait, *others = (each.start() for each in re.finditer(r"griddepcontrol\.wait", ptx))
    assert len(others) == 1
    early = [each.start() for each in re.finditer(r"ld\.global\.cg\.v4\.b32", ptx)]
    assert len(early) >= 8 and max(early) < first_wait < ptx.index("st.global")
    # What is loaded early without passing by L1 no kernel writes: angles and the weights of the norm.
    ordinary = re.findall(r"ld\.global\.(?!cg)\S+", ptx[:first_wait])
    assert ordinary and not any("v4" in each for each in ordinary), ordinary
