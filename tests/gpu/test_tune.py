"""``skiff tune`` on a GPU, for two of its numbers."""

import re

import pytest
import torch

from skiff_runtime.__main__ import main
from skiff_runtime.kernels import tuning

pytestmark = pytest.mark.gpu


def test_measured_numbers_are_printed_as_a_table_and_as_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--only", "single_row_warps,gemv.max_outputs"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"## {torch.cuda.get_device_name()}")
    assert [
        float(each) > 0 for each in re.findall(r"^\| 3072 elements \| ([\d.]+) ", output, re.MULTILINE)
    ] == [True]
    assert "### gemv.max_outputs\n\n| µs | ours | library |" in output
    (code,) = re.findall(r"```python\n(.*)```", output, re.DOTALL)
    names = {**vars(tuning)}
    exec(code, names)
    (entry,) = (
        value
        for name, value in names.items()
        if name not in vars(tuning) and isinstance(value, tuning.Tuning)
    )
    assert entry.measured_on == torch.cuda.get_device_name()
