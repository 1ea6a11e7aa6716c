"""The cause of a failure and its remedy, from the ends of real logs of `skiff serve` and `skiff fetch`."""

import pytest

from skiff_operator.failure import REMEDIES, diagnose

STARTED = "2026-11-24T20:28:33.894Z info supervisor processes_started pid=8 processes=4\n"
FETCH_FAILED = "2026-11-24T20:29:06.974Z error fetch fetch_failed model=hf://org/model@main "
GPU_TRACEBACK = """\
2026-11-24T20:28:33.894Z error rank0 process_failed error=RuntimeError message="{message}"
Traceback (most recent call last):
  File "/opt/skiff/lib/python3.13/site-packages/skiff_runtime/processes/child_process.py", line 125, in main
    run(child)
RuntimeError: {message}
2026-11-24T20:28:34.086Z error supervisor service_failed reason="rank0 exited with code 1"
"""


def ending(reason: str) -> str:
    """The log of a server that ends during its start for this reason."""
    return f'{STARTED}2026-11-24T20:28:35.435Z error supervisor service_failed reason="{reason}"\n'


def fetch_ending(message: str) -> str:
    """The log of a download that ends with this message."""
    return f'{FETCH_FAILED}message="{message}"\n'


CASES = [
    ("UnsupportedModel", 2, "skiff: /model/config.json: architecture MambaForCausalLM is not supported; supported are LlamaForCausalLM, MistralForCausalLM\n", "spec.runtime.image"),
    ("ModelNotFound", 2, "skiff: model directory /model/no/such does not exist; --model takes a directory with config.json and weights, or a GGUF file\n", "spec.model.uri"),
    ("NoGPU", 2, "skiff: --device cuda with --tp 1 needs 1 GPUs; this machine shows 0\n", "device plugin"),
    ("InvalidArgument", 2, "skiff: unrecognized arguments: --max-modellen 5; see skiff --help\n", "remove --max-modellen in spec.runtime.args"),
    ("InvalidArgument", 2, "skiff: --tp 7 does not divide the model's 4 attention heads\n", "Correct spec.parallelism.tensor, which sets --tp."),
    ("InvalidArgument", 2, "skiff: --max-model-len 10000000 exceeds the 2048 positions of this model; --rope-scaling extends them\n", "Correct spec.runtime.maxModelLen"),
    ("InvalidArgument", 2, "skiff: unknown environment variable SKIFF_FOO; did you mean SKIFF_PORT?\n", "SKIFF_FOO in spec.runtime.env"),
    ("PortInUse", 4, ending("api exited with code 1: cannot listen on 0.0.0.0 port 8000: Address already in use (while attempting to bind on address ('0.0.0.0', 8000)); choose another --host or --port"), "hostNetwork"),
    ("InsufficientMemory", 4, ending("rank0 exited with code 1: --max-total-tokens 2000000000 takes 6.836e+06 MiB, but 1.979e+04 MiB are free; lower it, or omit it to size the cache by the free memory"), "maxModelLen"),
    ("InsufficientMemory", 4, ending("rank0 exited with code 1: the weights take 1.5e+04 MiB on each rank in bfloat16, but 1.2e+04 MiB are free; use a smaller model, a smaller --dtype, more memory, or a larger --tp"), "spec.parallelism.tensor"),
    ("StartupTimeout", 4, ending("not ready within 1 s: api, rank0"), "spec.startup.timeoutSeconds"),
    ("InvalidModelFiles", 4, ending("rank0 exited with code 1: weights file /model/model.safetensors is truncated or corrupt (Error while deserializing header: incomplete metadata, file not fully covered); download the model again"), "Download the model again"),
    ("InvalidModelFiles", 4, ending("rank0 exited with code 1: /model contains no weights: neither model.safetensors nor model.safetensors.index.json exists (other formats are not supported); --load-format dummy runs without weights"), "Download"),
    ("OutOfMemory", 3, ending("rank0 was killed by SIGKILL"), "spec.resources.limits.memory"),
    ("Hung", 3, ending("rank0 has been silent for 60 s"), "CPU"),
    ("GPUOutOfMemory", 4, ending("rank0 exited with code 1: out of memory: CUDA out of memory"), "--mem-fraction-static"),
    ("GPUFault", 3, GPU_TRACEBACK.format(message="CUDA error: an illegal memory access was encountered"), "Xid"),
    ("GPUDriver", 4, GPU_TRACEBACK.format(message="The NVIDIA driver on your system is too old (found version 11040)."), "driver"),
    ("CollectiveFailed", 4, GPU_TRACEBACK.format(message="NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error"), "NCCL_DEBUG"),
    ("CrashLoop", 3, GPU_TRACEBACK.format(message="list index out of range"), "kubectl logs --previous"),
    ("CrashLoop", 1, "", "kubectl logs --previous"),
    ("Killed", 137, STARTED, "failed probes"),
]  # fmt: skip
FETCHES = [
    ("Unauthorized", "127.0.0.1 refuses org/gated (401): check its name; if it is gated or private, set HF_TOKEN (in an InferenceService: model.credentialsSecretRef)", "credentialsSecretRef"),
    ("ModelNotFound", "127.0.0.1 has no model org/none with revision 'main' (404): correct the name or the revision", "spec.model.uri"),
    ("ModelNotFound", "org/gated has no revision 'v9' on 127.0.0.1 (404): correct the revision", "spec.model.revision"),
    ("SourceUnreachable", "hf://a/b@main: no answer from 127.0.0.1 ([Errno 111] Connection refused); check the network, the proxy and HF_ENDPOINT; gave up after 5 attempts", "spec.model.endpoint"),
    ("DiskFull", "not enough space in /cache: 16.07 GB are needed, 9.97 GB are free; use a larger volume, or another --download-dir", "spec.cache.size"),
    ("VolumeNotWritable", "cannot use /cache/models--a--b (Permission denied); make /cache writable for user 65532, or use another --download-dir", "65532"),
    ("ChecksumMismatch", "model.safetensors: checksum mismatch after 2 downloads (the expected digest is 0123); check for a proxy that changes the file", "proxy"),
    ("UnsupportedModel", "the repository has no *.safetensors and no *.gguf files, and Skiff reads no other weight format", "spec.runtime.image"),
    ("WeightsDownloadFailed", "interrupted; complete files are kept", "logTail"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "code", "log", "remedy"), CASES)
def test_the_cause_of_a_servers_end(reason: str, code: int, log: str, remedy: str) -> None:
    found = diagnose("runtime", exit_code=code, reason="Error", log_tail=log)
    assert found.reason == reason
    assert remedy in found.remedy


@pytest.mark.parametrize(("reason", "message", "remedy"), FETCHES)
def test_the_cause_of_a_failed_download(reason: str, message: str, remedy: str) -> None:
    found = diagnose("fetch", exit_code=5, reason="Error", log_tail=fetch_ending(message))
    assert found.reason == reason
    assert remedy in found.remedy


def test_the_kernels_killer_is_believed_before_the_log() -> None:
    tail = ending("not ready within 1 s: api, rank0")
    assert diagnose("runtime", exit_code=137, reason="OOMKilled", log_tail=tail).reason == "OutOfMemory"


def test_the_last_line_decides_before_what_was_logged_earlier() -> None:
    """A download that ran out of space after it had waited for the network has no network problem."""
    earlier = '2026-11-24T20:28:01.347Z warning fetch fetch_attempt_failed what=hf://a/b reason="no answer from hub"\n'
    tail = earlier + fetch_ending("no space left in /cache (No space left on device); use a larger volume")
    assert diagnose("fetch", exit_code=5, reason="Error", log_tail=tail).reason == "DiskFull"
    tail = earlier.replace("no answer from hub", "no space left") + fetch_ending("hub refuses a/b (403): ...")
    assert diagnose("fetch", exit_code=5, reason="Error", log_tail=tail).reason == "Unauthorized"


def test_each_remedy_is_one_sentence() -> None:
    for reason, remedy in REMEDIES.items():
        assert reason.isalnum() and reason[0].isupper()
        assert remedy[0].isupper() and remedy.endswith(".") and ". " not in remedy, remedy
