"""``skiff complete``: the scripts, and what bash completes with one of them."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 30.0


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "skiff.bash"
    path.write_text(print_script("bash"))
    return path


def print_script(shell: str) -> str:
    code = (
        "import sys; from skiff_runtime.__main__ import main; code = main(['complete', sys.argv[1]]); "
        "loaded = {'torch', 'transformers', 'xgrammar'} & set(sys.modules); assert not loaded, loaded; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, shell], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def complete(script: Path, line: str) -> set[str]:
    """Return the words that bash offers for the last word of ``line``."""
    words = line.split(" ")
    code = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
        '_shtab_skiff skiff "${@: -1}" ""; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code, str(script), *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("skiff se", {"serve"}),
        ("skiff serve --tensor", {"--tensor-parallel-size"}),
        ("skiff serve --tokenizer-backend ", {"auto", "tokenizers", "fastokens"}),
        ("skiff serve --tokenizer-backend fas", {"fastokens"}),
        ("skiff serve --attention-backend flash", {"flashinfer", "flashinfer,triton"}),
        ("skiff bench ser", {"serve"}),
        ("skiff bench serve --num-pro", {"--num-prompts"}),
        ("skiff bench prefill-interference --chunk", {"--chunk-sizes"}),
        ("skiff serve --model sk", {"skiff.bash"}),
        ("skiff serve --tokenizers", set()),  # a former flag
        ("skiff complete z", {"zsh"}),
    ],
)
def test_bash_completes(script: Path, line: str, offered: set[str]) -> None:
    assert complete(script, line) == offered


def test_tab_in_bash_completes_the_flag(script: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        os.write(terminal, f"source {script}\nskiff serve --tensor\t".encode())
        assert any("--tensor-parallel-size " in shown for shown in read_all(terminal))
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def read_all(terminal: int) -> Iterator[str]:
    """Yield what the terminal has shown so far, each time that there is more."""
    shown = b""
    deadline = time.monotonic() + SECONDS
    while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        shown += os.read(terminal, 4096)
        yield shown.decode(errors="replace")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command(shell: str) -> None:
    script = print_script(shell)
    for word in ("serve", "bench", "prebuild", "tensor-parallel-size", "num-prompts", "fastokens"):
        assert word in script
