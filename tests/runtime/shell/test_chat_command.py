"""``skiff chat`` as a process, with a pipe and with a pseudo-terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from canned_server import CannedServer, canned_server
from interrupts import heed_interrupts

from skiff_runtime.shell.terminal import printable

ANSWER = "w0 w1 w2 w3 w4"
COMMAND = [sys.executable, "-m", "skiff_runtime", "chat"]


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with canned_server() as running:
        yield running


def run_piped(server: CannedServer, lines: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, "--url", server.url, *flags], input=lines, capture_output=True, text=True, timeout=60
    )


def test_piped_lines_are_questions_of_one_conversation(server: CannedServer) -> None:
    done = run_piped(server, "one\n\ntwo\n", "--system", "Be brief.", "--temperature", "0", "--seed", "7")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.strip() for line in done.stdout.splitlines()] == [ANSWER, ANSWER]
    first, second = server.bodies
    assert first == {
        "model": "canned",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "seed": 7,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}],
    }
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"].strip() == ANSWER


def test_slash_commands_reset_and_instruct_the_conversation(server: CannedServer) -> None:
    lines = "one\n/reset\ntwo\n/system You are a boat.\n/system\nthree\n/nonsense\n/help\n/exit\nfour\n"
    done = run_piped(server, lines)
    assert done.returncode == 0, done.stderr
    assert "You are a boat." in done.stdout
    assert "no command /nonsense" in done.stdout and "/system TEXT" in done.stdout
    asked = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert asked == [["one"], ["two"], ["You are a boat.", "three"]]


def test_set_command_validates_parameters_and_sends_them(server: CannedServer) -> None:
    lines = [
        "/set",
        "/set temperature 0.5",
        "/set top-k -1",
        "/set warmth 3",
        "/set temperature 9",
        "/set seed 1.5",
        "one",
        "/set",
        "/set temperature default",
        "two",
    ]
    done = run_piped(server, "\n".join(lines), "--seed", "7")
    assert done.returncode == 0, done.stderr
    for text in (
        "seed 7",
        "temperature is 0.5.",
        "There is no parameter warmth; the parameters are temperature, top_p",
        "temperature must be a number from 0.0 to 2.0, or default, not '9'",
        "seed must be a whole number",
        "temperature is the server's default.",
    ):
        assert text in done.stdout
    first, second = server.bodies
    assert (first["temperature"], first["top_k"], first["seed"]) == (0.5, -1, 7)
    assert "temperature" not in second and second["top_k"] == -1
    wrong = run_piped(server, "", "--temperature", "hot")
    assert wrong.returncode == 2 and "temperature must be a number" in wrong.stderr


def test_save_command_writes_the_conversation_as_json(server: CannedServer, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    done = run_piped(
        server, f"/system Be brief.\none\n/save {file}\n/save\n/save {tmp_path}\n", "--seed", "3"
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads(file.read_text())
    assert (saved["model"], saved["parameters"]) == ("canned", {"seed": 3})
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    assert f"Wrote 3 messages to {file}" in done.stdout
    assert "Give a file" in done.stdout and "cannot be written" in done.stdout


def test_backslash_continues_a_piped_question(server: CannedServer) -> None:
    assert run_piped(server, "one\\\ntwo\\\n\nthree\\\n").returncode == 0
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["one\ntwo", "three"]


def test_reasoning_is_neither_printed_to_a_pipe_nor_sent_back(server: CannedServer) -> None:
    done = run_piped(server, "think\nmore\n")
    assert [line.strip() for line in done.stdout.splitlines()] == [ANSWER, ANSWER]
    assert server.bodies[1]["messages"][1]["content"].strip() == ANSWER


def test_progress_of_a_start_is_written_to_the_standard_error(server: CannedServer) -> None:
    done = run_piped(server, "start\n")
    assert done.stdout.strip() == ANSWER
    assert done.stderr.splitlines() == ["skiff: waiting for a pod", "skiff: loading[2J weights 43%"]


def test_api_key_comes_from_the_flag_or_the_environment(
    server: CannedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_piped(server, "one\n", "--api-key", "k1")
    monkeypatch.setenv("SKIFF_API_KEY", "k2,k3")
    run_piped(server, "one\n")
    assert server.authorizations == ["Bearer k1", "Bearer k2"]


@pytest.mark.parametrize(
    ("question", "complaint"),
    [
        ("busy", "too many requests wait already"),
        ("cut", "lost the connection"),
        ("broken", "the engine failed"),
    ],
)
def test_failed_question_is_one_line_and_leaves_the_conversation_unchanged(
    server: CannedServer, question: str, complaint: str
) -> None:
    done = run_piped(server, f"{question}\nfine\n")
    assert done.returncode == 1
    assert complaint in done.stderr and len(done.stderr.splitlines()) == 1
    assert ANSWER in done.stdout
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["fine"]


def test_unreachable_server_is_named() -> None:
    done = subprocess.run(
        [*COMMAND, "--url", "http://127.0.0.1:1"], input="", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "nothing answers at http://127.0.0.1:1" in done.stderr and "skiff serve" in done.stderr


def test_model_that_the_server_does_not_serve_is_named(server: CannedServer) -> None:
    done = run_piped(server, "", "--model", "other")
    assert done.returncode == 1 and "serves canned, not other" in done.stderr


def test_printable_removes_terminal_control_characters() -> None:
    assert printable("red \x1b[31m\x07bell\nnew\tline é 漢") == "red [31mbell\nnew\tline é 漢"


class Screen:
    """``skiff chat`` on a pseudo-terminal."""

    def __init__(self, url: str, home: Path) -> None:
        self._master, slave = pty.openpty()
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(home),
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }
        self.process = subprocess.Popen(
            [*COMMAND, "--url", url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
        os.close(slave)
        self._text = ""

    def type(self, keys: str) -> None:
        """Type ``keys``."""
        os.write(self._master, keys.encode())

    def expect(self, text: str, timeout_seconds: float = 30.0) -> str:
        """Wait until ``text`` appears. Return the output before it, and discard both."""
        deadline = time.monotonic() + timeout_seconds
        while text not in self._text:
            assert time.monotonic() < deadline, f"no {text!r} in {self._text!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self._text += os.read(self._master, 4096).decode(errors="replace")
        shown, _, self._text = self._text.partition(text)
        return shown

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def screen(server: CannedServer, tmp_path: Path) -> Iterator[Screen]:
    shown = Screen(server.url, tmp_path)
    yield shown
    shown.close()


def test_terminal_streams_answers_and_keeps_the_interrupted_one(
    server: CannedServer, screen: Screen, tmp_path: Path
) -> None:
    screen.expect("Connected to canned at " + server.url)
    screen.expect("you>")
    screen.type("first line\x1b\rsecond line\r")
    screen.expect("w4")
    screen.expect("[5 tokens, first after ")
    assert server.bodies[0]["messages"][0]["content"] == "first line\nsecond line"
    screen.expect("you>")
    screen.type("half\\\rline\r")
    screen.expect("w4")
    assert server.bodies[1]["messages"][-1]["content"] == "half\nline"
    screen.expect("you>")
    screen.type("think\r")
    screen.expect("\x1b[2mhmm\x1b[0m\r\n\r\nw0 ")
    screen.expect("you>")
    screen.type("start\r")
    screen.expect("\x1b[2mwaiting for a pod\x1b[0m")
    screen.expect("weights 43%\x1b[0m\r\x1b[K")
    screen.expect("w0 w1")
    screen.expect("you>")
    screen.type("slow\r")
    screen.expect("w1")
    os.kill(screen.process.pid, signal.SIGINT)
    screen.expect("…")
    assert server.hung_up.wait(30)
    screen.expect("you>")
    screen.type("busy\r")
    screen.expect("too many requests wait already")
    screen.expect("you>")
    screen.type("/exit\r")
    assert screen.process.wait(30) == 0
    assert "slow" in (tmp_path / "skiff" / "chat_history").read_text()
    kept = [message["content"].strip() for message in server.bodies[-1]["messages"]]
    assert kept[-2:] == ["w0 w1", "busy"]  # the part of the interrupted answer that was shown is kept


def test_ctrl_d_ends_the_chat(screen: Screen) -> None:
    screen.expect("you>")
    screen.type("\x04")
    assert screen.process.wait(30) == 0
