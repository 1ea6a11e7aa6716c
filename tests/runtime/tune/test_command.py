"""``skiff tune`` as a command, on a machine without a GPU."""

import pytest
import torch

from skiff_runtime.__main__ import main
from skiff_runtime.errors import ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be measured")
def test_machine_without_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "skiff tune measures on a GPU, and torch finds none" in output.err


def test_help_names_the_command_and_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in ((["--help"], "tune"), (["tune", "--help"], "--only")):
        with pytest.raises(SystemExit) as raised:
            main(words)
        assert raised.value.code == 0 and expected in capsys.readouterr().out


def test_only_selects_fields_and_groups_and_refuses_other_names() -> None:
    pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")
    from skiff_runtime.tune.command import select
    from skiff_runtime.tune.tunables import TUNABLES

    assert select(TUNABLES, None) is TUNABLES
    paths = [tunable.path for tunable in select(TUNABLES, "fp8_gemv, sampling_warps")]
    assert paths == [
        "fp8_gemv.tile",
        "fp8_gemv.long_tile",
        "fp8_gemv.fuse_silu_and_mul",
        "fp8_gemv.preloading_tile",
        "fp8_gemv.max_preloaded_weights",
        "fp8_gemv.norm_tile",
        "fp8_gemv.max_normed_weights",
        "sampling_warps",
    ]
    with pytest.raises(ConfigError, match="'fp8'; choose from decode_attention"):
        select(TUNABLES, "gemv,fp8")
