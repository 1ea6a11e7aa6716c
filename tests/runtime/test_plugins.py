"""Commands of other packages: `skiff NAME` runs the entry point NAME of the group `skiff.commands`."""

from pathlib import Path

import pytest

from skiff_runtime.__main__ import main


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two commands, one of which needs a module that is missing."""
    info = tmp_path / "stranger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    entries = (
        "wave = stranger_commands:wave",
        "broken = stranger_absent:wave",
        "serve = stranger_commands:wave",
    )
    (info / "entry_points.txt").write_text("\n".join(["[skiff.commands]", *entries]))
    (tmp_path / "stranger_commands.py").write_text(
        "def wave(words, prog):\n    print(prog, *words)\n    return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_command_of_another_package_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wave", "--hard"]) == 7
    assert capsys.readouterr().out == "skiff wave --hard\n"


def test_help_lists_it_and_own_commands_stay(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["serve", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
    out = capsys.readouterr().out
    assert "wave" in out and "Serve a model over HTTP" in out


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broken"]) == 2
    assert "stranger_absent is not installed; pip install 'skiff[operator]'" in capsys.readouterr().err
    assert main(["unheard-of"]) == 2
    assert "invalid choice: 'unheard-of'" in capsys.readouterr().err
