"""``CachedLaunch``: a repeated launch passes what the first one passed, on fake tensors and a fake driver."""

import pytest
from compiling import run_compiling

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

LAUNCHES = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from skiff_runtime.kernels.shared_prefixes import packed_size, unpack_shared_prefixes
from skiff_runtime.kernels.triton.attention.decode_attention import DecodeAttention, DecodeRows
from skiff_runtime.prebuild.offline_driver import OfflineDriver, use_offline_driver

launches = []
def describe(argument):
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.data_ptr()
    return argument
OfflineDriver.launcher_cls = lambda *_: lambda *given: launches.append([*given[:4], *map(describe, given[9:])])
with use_offline_driver(90), FakeTensorMode(), torch.inference_mode():
    def ints(*shape):
        return torch.empty(shape, dtype=torch.int32, device="cuda")
    rows, kv, heads = 3, 2, 4
    q = torch.empty(rows, heads, 64, dtype=torch.bfloat16, device="cuda")
    pool = tuple(torch.empty(320, kv, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for columns in (1, 7, 32):
        for longest in (1, 4096):
            for shared in (None, unpack_shared_prefixes(ints(packed_size(rows)), rows)):
                tables = DecodeRows(ints(rows), ints(5, columns), ints(rows), 16)
                attend = DecodeAttention(q, pool, tables, max_seq_len=longest, shared=shared)
                attend(q, pool, q)
                first = launches[:]
                launches.clear()
                attend(q, pool, q)
                assert first and first == launches, (columns, longest, first, launches)
                launches.clear()
"""


def test_second_launch_passes_what_the_first_one_passed() -> None:
    done = run_compiling("-c", LAUNCHES)
    assert done.returncode == 0, done.stderr
