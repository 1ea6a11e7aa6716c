"""The quickstart: its commands run as they are printed, and no key is in it."""

import logging
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
from frontend import Frontend, echoing_frontend, write_model

from skiff_runtime.processes.quickstart import Quickstart

KEY = "sk-of-the-quickstart"
MODEL = 'it\'s a "model"'


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    model = write_model(tmp_path_factory.mktemp("model"))
    with echoing_frontend(model, api_key=(KEY,), served_model_name=MODEL) as front:
        yield front


def parts(text: str) -> dict[str, str]:
    """Return the examples by their titles."""
    [_, *rest] = re.split(r"^# (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(rest[::2], rest[1::2], strict=True))


@pytest.fixture
def shown(front: Frontend) -> dict[str, str]:
    port = int(front.url.rpartition(":")[2])
    return parts(Quickstart("0.0.0.0", port, MODEL, keyed=True).render())


@pytest.mark.parametrize(("title", "command"), [("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])])
def test_examples_run_as_printed(shown: dict[str, str], title: str, command: list[str]) -> None:
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [*command, shown[title]], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "What is a pod?" in done.stdout  # the echo of the prompt


def test_settings_are_valid(shown: dict[str, str], front: Frontend) -> None:
    [codex] = [text for title, text in shown.items() if title.startswith("Codex")]
    settings = tomllib.loads(codex)
    assert settings["model"] == MODEL and settings["model_providers"]["skiff"]["env_key"] == "OPENAI_API_KEY"
    assert settings["model_providers"]["skiff"]["base_url"] == front.url + "/v1"
    words = shlex.split(shown["Claude Code"])
    assert f"ANTHROPIC_MODEL={MODEL}" in words and f"ANTHROPIC_BASE_URL={front.url}" in words


def test_without_keys_none_is_named() -> None:
    text = Quickstart("::1", 8000, "tiny", keyed=False).render()
    assert "http://[::1]:8000/v1" in text and "OPENAI_API_KEY=none" in text
    assert "Bearer" not in text and "env_key" not in text and "YOUR-KEY" not in text
    [codex] = [text for title, text in parts(text).items() if title.startswith("Codex")]
    assert tomllib.loads(codex)["model"] == "tiny"


def test_model_without_output_head_is_asked_for_an_embedding() -> None:
    shown = parts(Quickstart("127.0.0.1", 8000, "tiny", keyed=False, generates=False).render())
    assert set(shown) == {"curl", "Python"} and "/v1/embeddings" in shown["curl"]
    compile(shown["Python"], "example", "exec")


def test_without_a_terminal_it_is_one_event(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "skiff")
    Quickstart("127.0.0.1", 8000, "tiny", keyed=True).show()
    [record] = caplog.records
    assert record.getMessage() == (
        "quickstart home_page=http://127.0.0.1:8000/ openai_base_url=http://127.0.0.1:8000/v1 "
        "anthropic_base_url=http://127.0.0.1:8000 model=tiny api_key=required"
    )
    assert capsys.readouterr().out == ""


def test_on_a_terminal_it_is_printed() -> None:
    code = "from skiff_runtime.processes.quickstart import Quickstart as Q; Q('::', 8000, 'tiny', keyed=False).show()"
    main, other = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", code], stdout=other, check=True, timeout=60)
        assert b"Ready: tiny at http://[::1]:8000" in os.read(main, 1 << 16)
    finally:
        os.close(main)
        os.close(other)
