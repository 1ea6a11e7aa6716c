"""Client of the compiler process: starts it, sends it tasks and receives results, without ever blocking."""

import os
import subprocess
import sys
from typing import IO, Final

import zmq

from skiff_runtime.grammar.compiler.pipe_protocol import (
    CompileResult,
    CompilerReady,
    CompileTask,
    FrameReader,
    FrameWriter,
)
from skiff_runtime.processes.launch import Launch

_MODULE: Final = "skiff_runtime.grammar.compiler.compiler_process"


class CompilerClient:
    """Owns one compiler process. Its pipes are non-blocking and join the owner's poller."""

    def __init__(self, launch: Launch, poller: zmq.Poller) -> None:
        command = [sys.executable, "-m", _MODULE, str(launch.run_dir), str(os.getpid())]
        # A session of its own keeps a terminal's Ctrl-C away; the tokenizer process ends this process.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._tasks = _set_nonblocking(self._process.stdin)
        self._results = _set_nonblocking(self._process.stdout)
        self._poller = poller
        self._poller.register(self._results, zmq.POLLIN)
        self._writer = FrameWriter(self._tasks)
        self._reader: FrameReader[CompilerReady | CompileResult] = FrameReader(
            self._results, CompilerReady | CompileResult
        )
        self.is_ready = False
        self.has_ended = False

    def send(self, task: CompileTask) -> None:
        """Begin to send a task. A long one is sent in parts; each call of ``receive`` sends the next."""
        self._writer.put(task)
        self._flush()

    def receive(self) -> list[CompileResult]:
        """Return the results that have arrived. Updates ``is_ready`` and ``has_ended``."""
        self._flush()
        results = []
        for frame in self._reader.read():
            if isinstance(frame, CompileResult):
                results.append(frame)
            else:
                self.is_ready = True
        self.has_ended = self.has_ended or self._reader.ended
        return results

    def close(self) -> int:
        """Kill the process and return its exit code."""
        self._poller.unregister(self._results)
        if self._tasks in self._poller:
            self._poller.unregister(self._tasks)
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return code

    def _flush(self) -> None:
        """Write as much as the pipe accepts. The poller wakes up when it accepts the rest."""
        try:
            is_pending = not self._writer.flush()
        except BrokenPipeError:
            is_pending, self.has_ended = False, True
        if is_pending:
            self._poller.register(self._tasks, zmq.POLLOUT)
        elif self._tasks in self._poller:
            self._poller.unregister(self._tasks)


def _set_nonblocking(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()
