"""The compiler process as its tokenizer process sees it."""

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
    """Starts the process; its pipes, which never block, join the owner's poller."""

    def __init__(self, launch: Launch, poller: zmq.Poller) -> None:
        command = [sys.executable, "-m", _MODULE, str(launch.run_dir), str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._tasks, self._results = _unblocked(self._process.stdin), _unblocked(self._process.stdout)
        self._poller = poller
        self._poller.register(self._results, zmq.POLLIN)
        self._writer = FrameWriter(self._tasks)
        self._reader: FrameReader[CompilerReady | CompileResult] = FrameReader(
            self._results, CompilerReady | CompileResult
        )
        self.is_ready = False
        self.ended = False

    def send(self, task: CompileTask) -> None:
        """Begin to hand over a task; the rest of a long one goes with the next calls of ``receive``."""
        self._writer.put(task)
        self._flush()

    def receive(self) -> list[CompileResult]:
        """The results that are there. Sets ``is_ready`` and ``ended``."""
        self._flush()
        done = []
        for frame in self._reader.read():
            if isinstance(frame, CompileResult):
                done.append(frame)
            else:
                self.is_ready = True
        self.ended = self.ended or self._reader.ended
        return done

    def close(self) -> int:
        """End the process; its exit code."""
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
        """Write what the pipe takes; the poller wakes up when it takes the rest."""
        try:
            waits = not self._writer.flush()
        except BrokenPipeError:
            waits, self.ended = False, True
        if waits:
            self._poller.register(self._tasks, zmq.POLLOUT)
        elif self._tasks in self._poller:
            self._poller.unregister(self._tasks)


def _unblocked(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()
