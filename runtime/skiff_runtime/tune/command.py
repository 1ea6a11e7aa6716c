"""Measure the tuned numbers of Skiff's GPU kernels on this machine's GPU.

Prints a table of times for each number, and at the end an entry for the table in
skiff_runtime/kernels/tuning.py, as Python, each number below the times that chose it.
A number is kept where no candidate is more than 2% faster.

Measure on a GPU on which nothing else runs. That takes some minutes, most of it to
compile kernels, and up to 16 GiB of the GPU's memory. Judge a new entry by
`skiff bench offline` before it is added: a kernel may be faster alone than between
others. The thresholds of shared prefixes and of the choice of prefill kernels can only
be measured with a whole engine; they are printed as they are.

examples:
  skiff tune                          all numbers
  skiff tune --only gemv,fp8_gemv     those of two kernels
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from skiff_runtime.tune.measure import Tunable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--only",
        metavar="NAME[,NAME...]",
        help="measure these numbers alone: fields of the table or groups of them, such as gemv or stream_k.max_tokens",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return the exit code.

    Raises:
        ConfigError: there is no GPU, no Triton, or no number of this name.
    """
    device = find_gpu()
    # Only now, because these need Triton.
    import torch

    from skiff_runtime.kernels.tuning import tuning_for
    from skiff_runtime.tune.measure import Measurement, measure_all, replace_field, time_on_gpu
    from skiff_runtime.tune.report import format_entry, format_measurement
    from skiff_runtime.tune.tunables import TUNABLES

    name = torch.cuda.get_device_name(device)
    tuning = replace(tuning_for(device), measured_on=name)
    measurements: dict[str, Measurement] = {}
    print(f"## {name}, torch {torch.__version__}\n", flush=True)
    with torch.inference_mode():
        for measurement in measure_all(select(TUNABLES, arguments.only), tuning, device, time_on_gpu):
            measurements[measurement.tunable.path] = measurement
            print(format_measurement(measurement) + "\n", flush=True)
    for path, measurement in measurements.items():
        tuning = replace_field(tuning, path, measurement.chosen)
    constant = re.sub(r"\W+", "_", name).strip("_").upper()
    print(f"```python\n{format_entry(constant, tuning, measurements)}\n```")
    return EXIT_OK


def find_gpu() -> "torch.device":
    """Return the current GPU.

    Raises:
        ConfigError: torch finds none, or Triton is missing.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("skiff tune measures on a GPU, and torch finds none on this machine")
    if find_spec("triton") is None:
        raise ConfigError("skiff tune measures Triton kernels, and Triton is not installed")
    return torch.device("cuda", torch.cuda.current_device())


def select(tunables: "Sequence[Tunable]", only: str | None) -> "Sequence[Tunable]":
    """Return those whose paths are named in ``only``, or lie below a name in it; all of them for None.

    Raises:
        ConfigError: a name fits none of them.
    """
    if only is None:
        return tunables
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if not any(_is_within(each.path, name) for each in tunables):
            groups = ", ".join(dict.fromkeys(each.path.split(".")[0] for each in tunables))
            raise ConfigError(f"--only: nothing that is measured is called {name!r}; choose from {groups}")
    return [each for each in tunables if any(_is_within(each.path, name) for name in names)]


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")
