"""A kernel that is launched again gets what Triton's own way would give it; all on tensors and a driver that compute nothing."""

import pytest
from compiling import run_compiling

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

LAUNCHES = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from skiff_runtime.prebuild.offline_driver import OfflineDriver, compiling
from skiff_runtime.kernels.triton.attention.decode_launch import Decode
from skiff_runtime.kernels.shared_prefixes import packed_size, unpack

seen = []
def told(argument):
    return (argument.dtype, argument.shape, argument.data_ptr()) if isinstance(argument, torch.Tensor) else argument
OfflineDriver.launcher_cls = lambda *_: lambda *given: seen.append([*given[:4], *map(told, given[9:])])
with compiling(90), FakeTensorMode(), torch.inference_mode():
    def ints(*shape):
        return torch.empty(shape, dtype=torch.int32, device="cuda")
    rows, kv, heads = 3, 2, 4
    q = torch.empty(rows, heads, 64, dtype=torch.bfloat16, device="cuda")
    pool = tuple(torch.empty(320, kv, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for columns in (1, 7, 32):
        for longest in (1, 4096):
            for shared in (None, unpack(ints(packed_size(rows)), rows)):
                launch = Decode(q, pool, ints(rows), ints(5, columns), ints(rows), 16, longest=longest, shared=shared)
                launch(q, pool, q)
                first = seen[:]
                seen.clear()
                launch(q, pool, q)
                assert first and first == seen, (columns, longest, first, seen)
                seen.clear()
"""


def test_the_second_launch_is_like_the_first() -> None:
    done = run_compiling("-c", LAUNCHES)
    assert done.returncode == 0, done.stderr
