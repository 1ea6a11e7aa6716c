"""The commands of `kubectl skiff`: registration, kubectl's conventions, and errors of one line."""

import argparse
import tomllib
from pathlib import Path

import pytest
import yaml

from skiff_operator.cli import main as cli
from skiff_operator.cli import rollout

ROOT = Path(__file__).parents[2]


def test_each_command_is_an_entry_point_of_skiff() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["skiff.commands"] == dict.fromkeys(
        cli.COMMANDS, "skiff_operator.cli.main:main"
    )
    assert project["scripts"]["kubectl-skiff"] == "skiff_operator.cli.main:main"


def test_help_has_every_command_and_action(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["rollout", "--help"], ["rollout", "undo", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
    said = capsys.readouterr().out
    for word in (
        *cli.COMMANDS,
        "status",
        "history",
        "pause",
        "resume",
        "restart",
        "upgrade",
        "--to-revision",
    ):
        assert word in said
    assert "usage: kubectl skiff rollout undo" in said


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("500ms", 0.5)]
)
def test_durations_are_kubectls(text: str, seconds: float) -> None:
    assert rollout._seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "1x", "m", "1m x"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="90s"):
        rollout._seconds(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["roll"], "invalid choice: 'roll'"),
        (["rollout", "status"], "required: NAME; see kubectl skiff rollout status --help"),
        (["rollout", "undo", "llama", "--to-revision", "x"], "invalid int value: 'x'"),
        (["rollout", "status", "llama"], "no cluster: the kubeconfig gave: "),
        (["rollout", "status", "deployment/llama"], "deployment/llama is no InferenceService"),
        (["rollout", "status", "llama", "--context", "other"], "no cluster: the kubeconfig gave: "),
    ],
)
def test_errors_are_one_line_and_exit_with_1(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    if "deployment/llama" in words or "other" in words:
        kubeconfig.write_text(yaml.safe_dump(nowhere()))
    where = ["--kubeconfig", str(kubeconfig)] if words[2:] else []
    assert cli.main([*words, *where]) == 1
    error = capsys.readouterr().err
    assert said in error and error.startswith("kubectl skiff: ") and error.count("\n") == 1


def test_an_api_server_that_does_not_answer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(nowhere()))
    assert cli.main(["rollout", "pause", "llama", "--kubeconfig", str(kubeconfig)]) == 1
    error = capsys.readouterr().err
    assert (
        "the API server does not answer: Cannot connect to host 127.0.0.1:1" in error
        and error.count("\n") == 1
    )


def nowhere() -> dict[str, object]:
    """A kubeconfig of an API server that does not exist."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "a", "user": {}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a", "namespace": "models"}}],
        "current-context": "a",
    }
