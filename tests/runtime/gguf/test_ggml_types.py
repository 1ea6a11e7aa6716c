"""GGML's types: sizes as in the ``gguf`` package, and every type that is read is one that the package dequantizes."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from skiff_runtime.gguf.ggml_types import GGML_TYPES


@pytest.mark.parametrize("number", GGML_TYPES)
def test_type_is_that_of_the_package(number: int) -> None:
    known = GGMLQuantizationType(number)
    ours = GGML_TYPES[number]
    assert ours.name == known.name
    assert (ours.block_elements, ours.block_bytes) == gguf.GGML_QUANT_SIZES[known]
    values = gguf.dequantize(np.zeros((1, ours.block_bytes), np.uint8), known)
    assert values.shape == (1, ours.block_elements) and values.dtype == np.float32


def test_every_type_that_the_package_dequantizes_alone_is_read() -> None:
    readable = set()
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        readable.add(kind.name)
    # NVFP4 has a scale in a tensor beside it.
    assert readable - {"NVFP4"} == {each.name for each in GGML_TYPES.values()}
