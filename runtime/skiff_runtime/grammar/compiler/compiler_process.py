"""The compiler process: ``python -m skiff_runtime.grammar.compiler.compiler_process RUN_DIR PARENT``.

A compilation cannot be interrupted, its memory is not bounded, and xgrammar imports torch. So a tokenizer process
compiles in this child process, which it starts for the first grammar and kills when a grammar takes too long. Tasks
arrive through standard input and results leave through standard output, one at a time.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Final

from skiff_runtime import log
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.compiler.grammar_compiler import GrammarCompiler, load_compiler
from skiff_runtime.grammar.compiler.pipe_protocol import (
    CompileResult,
    CompilerReady,
    CompileTask,
    FrameReader,
    FrameWriter,
)
from skiff_runtime.processes.child_process import die_with_parent
from skiff_runtime.processes.launch import Launch

MAX_COMPILED_BYTES: Final = 32 << 20
MAX_COMPILE_MEMORY_BYTES: Final = 4 << 30
"""Address space for compilations, in addition to that of the process after it has loaded."""
_NICENESS: Final = 5
_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2


def serve(compiler: GrammarCompiler, tasks: "FrameReader[CompileTask]", results: FrameWriter) -> None:
    """Compile until the tokenizer process closes the pipe."""
    results.put(CompilerReady())
    while results.flush() and not tasks.ended:
        for task in tasks.read():
            results.put(_compile(compiler, task))


def _compile(compiler: GrammarCompiler, task: CompileTask) -> CompileResult:
    try:
        data = compiler.compile(task.grammar)
    except InvalidRequest as error:
        return CompileResult(task.key, refusal=error.message)
    if len(data) > MAX_COMPILED_BYTES:
        return CompileResult(
            task.key,
            refusal=f"the compiled grammar is larger than {MAX_COMPILED_BYTES >> 20} MiB; use a simpler one",
        )
    return CompileResult(task.key, data)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_COMPILE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _reserve_stdout() -> int:
    """Return a descriptor of standard output for frames alone; anything printed goes to standard error from now on."""
    frames = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    return frames


def main(arguments: list[str]) -> None:
    """Run the compiler process: ``arguments`` are the run directory and the process id of the parent."""
    die_with_parent(int(arguments[1]))
    frames = _reserve_stdout()
    launch = Launch.read(Path(arguments[0]))
    log.configure("grammar", launch.config.log_level)
    os.nice(_NICENESS)
    compiler = load_compiler(launch)
    _limit_memory()
    serve(compiler, FrameReader(_STDIN, CompileTask), FrameWriter(frames))


if __name__ == "__main__":
    main(sys.argv[1:])
