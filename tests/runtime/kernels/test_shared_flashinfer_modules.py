"""FlashInfer's modules on a volume that several pods share: each is loaded whole, whoever builds it and dies of it.

FlashInfer needs CUDA to be imported, so a package of its name takes its place. It has the classes that Skiff uses, with
the steps of FlashInfer 0.6.12: a module that is compiled ahead is loaded as it is, any other is built under a file lock
by a linker that writes it in place.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LINKER = """
import os, sys, time
from pathlib import Path

output, pause = Path(sys.argv[1]), os.environ.get("TEST_PAUSE_AT")
with output.open("wb", buffering=0) as stream:
    stream.write(b"first half, ")
    if pause:
        Path(pause).touch()
        while not Path(pause + ".continue").exists():
            time.sleep(0.01)
    stream.write(b"second half")
"""
FLASHINFER = {
    "__init__": "",
    "jit/__init__": "def gen_batch_prefill_module(backend, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk, head_dim_vo,"
    " pos_encoding_mode, use_sliding_window, use_logits_soft_cap, use_fp16_qk_reduction): ...",
    "jit/attention/__init__": "",
    "jit/attention/modules": "from flashinfer.jit import gen_batch_prefill_module as get_batch_prefill_uri",
    "utils": """
def determine_attention_backend(
    device, pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv): ...
def device_support_pdl(device): ...
""",
    "jit/env": """
import os
from pathlib import Path

FLASHINFER_CACHE_DIR = Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / ".cache" / "flashinfer"
FLASHINFER_JIT_DIR = FLASHINFER_CACHE_DIR / "0.6.12" / "90a" / "cached_ops"
FLASHINFER_AOT_DIR = Path("/nowhere")
""",
    "jit/core": """
import os, subprocess, sys
from contextlib import nullcontext
from filelock import FileLock
from flashinfer.jit import env

class JitSpec:
    def __init__(self, name):
        self.name = name

    @property
    def jit_library_path(self):
        return env.FLASHINFER_JIT_DIR / self.name / f"{self.name}.so"

    @property
    def aot_path(self):
        return env.FLASHINFER_AOT_DIR / self.name / f"{self.name}.so"

    @property
    def is_aot(self):
        return self.aot_path.exists()

    @property
    def lock_path(self):
        (env.FLASHINFER_JIT_DIR / "tmp").mkdir(parents=True, exist_ok=True)
        return env.FLASHINFER_JIT_DIR / "tmp" / f"{self.name}.lock"

    def build(self, verbose, need_lock=True):
        with FileLock(self.lock_path) if need_lock else nullcontext():
            self.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, "-c", os.environ["TEST_LINKER"], self.jit_library_path], check=True)
            print("built")

    def build_and_load(self):
        if self.is_aot:
            return self.aot_path.read_text()
        with FileLock(self.lock_path):
            self.build(False, need_lock=False)
            return self.jit_library_path.read_text()
""",
}
RANK = """
import sys
from pathlib import Path
from skiff_runtime.kernels import kernel_cache

kernel_cache.activate(Path(sys.argv[1]), Path(sys.argv[2]))
kernel_cache.use_prebuilt_flashinfer_modules()
from flashinfer.jit.core import JitSpec

print(JitSpec("prefill").build_and_load())
"""
WHOLE = "first half, second half"
WAIT_SECONDS = 60


class Pods:
    """Pods that start with one directory of kernels, each with a directory of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.volume = tmp_path / "volume"
        self._root = tmp_path
        for name, text in FLASHINFER.items():
            path = tmp_path / "site" / "flashinfer" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def start(self, name: str, **variables: str) -> "subprocess.Popen[str]":
        path = os.pathsep.join([str(self._root / "site"), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-c", RANK, str(self.volume), str(self._root / name)],
            env={**os.environ, "PYTHONPATH": path, "TEST_LINKER": LINKER, **variables},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, name: str) -> list[str]:
        return finish(self.start(name))

    def start_until_half_is_written(self, name: str) -> "subprocess.Popen[str]":
        pause = self._root / f"{name}.pause"
        pod = self.start(name, TEST_PAUSE_AT=str(pause))
        deadline = time.monotonic() + WAIT_SECONDS
        while not pause.exists():
            assert pod.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        return pod

    def resume(self, name: str) -> None:
        (self._root / f"{name}.pause.continue").touch()


def finish(pod: "subprocess.Popen[str]") -> list[str]:
    output, _ = pod.communicate(timeout=WAIT_SECONDS)
    assert pod.returncode == 0
    return output.splitlines()


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    return Pods(tmp_path)


def test_pods_that_build_a_module_at_once_load_it_whole(pods: Pods) -> None:
    slow = pods.start_until_half_is_written("slow")
    assert pods.run("fast") == ["built", WHOLE]
    pods.resume("slow")
    assert finish(slow) == ["built", WHOLE]
    assert pods.run("late") == [WHOLE], "a module that was published is not built again"
    (folder,) = pods.volume.rglob("cached_ops")
    assert [str(path.relative_to(folder)) for path in folder.rglob("*")] == ["prefill", "prefill/prefill.so"]


def test_module_of_a_pod_that_was_killed_is_built_again(pods: Pods) -> None:
    killed = pods.start_until_half_is_written("killed")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=WAIT_SECONDS)
    assert pods.run("next") == ["built", WHOLE]
    assert pods.run("late") == [WHOLE]
