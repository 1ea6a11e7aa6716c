"""The GEMV kernel against float64: odd shapes, strided inputs, every element written."""

import pytest
import torch
from kernel_device import DEVICE, HALF, TOLERANCE, error, noise

from skiff_runtime.kernels.triton.linear.gemv import gemv, is_profitable
from skiff_runtime.kernels.tuning import GemvTile, tuning_for

TYPES = (torch.float32, HALF)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("outputs, inputs", [(1, 16), (37, 100), (64, 1300), (40, 4096)])
@pytest.mark.parametrize("bias", [False, True])
def test_gemv_equals_the_product(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    x = noise(1, 2 * inputs, dtype=dtype)[:, :inputs]
    weight = noise(outputs, inputs, dtype=dtype, seed=1)
    added = noise(outputs, dtype=dtype, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    product = gemv(x, weight, added)
    assert product.shape == (1, outputs) and product.dtype == dtype
    assert error(product, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "tile", [GemvTile(16, warps=1), GemvTile(128, pair=True, warps=2), GemvTile(2048, pair=True, warps=8)]
)
def test_every_tile_gives_the_same_product(tile: GemvTile) -> None:
    x, weight = noise(1, 300, dtype=torch.float32), noise(71, 300, dtype=torch.float32, seed=1)
    assert error(gemv(x, weight, tile=tile), x.double() @ weight.double().T) < 1e-5


def test_gemv_is_profitable_for_one_token_and_no_output_head() -> None:
    x, weight = torch.empty(1, 32), torch.empty(64, 32)
    assert is_profitable(x, weight)
    assert not is_profitable(torch.empty(2, 32), weight) and not is_profitable(torch.empty(0, 32), weight)
    assert not is_profitable(x, torch.empty(tuning_for(DEVICE).gemv.max_outputs + 1, 32))
