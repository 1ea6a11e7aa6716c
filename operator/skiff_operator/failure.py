"""The cause of a container's failure and its remedy, from the exit code and the end of the log. Pure.

The server and the download log one line that ends the process (`service_failed`, `fetch_failed`, or `skiff: ...` for a
flag or a model that cannot be served), and its message says what is wrong. `diagnose` recognizes the classes that have
different remedies and translates each into a field of the InferenceService, because a user of the cluster sets no flags
and reads no `--help`. What nothing recognizes keeps a general reason; a wrong cause would be worse than none.
"""

import re
from typing import Final, NamedTuple

from skiff_operator import policy
from skiff_operator.resources.containers import FETCH
from skiff_runtime import contract

SIGKILL_CODE: Final = 137
SIGTERM_CODE: Final = 143
OOM_KILLED: Final = "OOMKilled"
"""The kubelet's reason for a container whose processes the kernel's out-of-memory killer ended."""

REMEDIES: Final = {
    "OutOfMemory": "Raise spec.resources.limits.memory; on a CPU, --max-total-tokens in spec.runtime.args makes the KV cache smaller.",
    "GPUOutOfMemory": "Lower --mem-fraction-static, --max-num-batched-tokens or --max-running-requests in spec.runtime.args, "
    "or raise spec.parallelism.tensor.",
    "InsufficientMemory": "The weights or the KV cache do not fit: lower spec.runtime.maxModelLen, raise spec.parallelism.tensor "
    "or spec.resources.limits.memory, or serve a smaller or quantized model; `skiff info MODEL` computes what fits.",
    "UnsupportedModel": "Serve a model of a supported architecture and format, as the log lists them, or use a newer spec.runtime.image.",
    "InvalidModelFiles": "Download the model again, or correct the files in its volume.",
    "ModelNotFound": "Correct spec.model.uri, spec.model.revision or spec.model.endpoint; for pvc:// and file://, the path inside of the volume.",
    "InvalidModelURI": "Correct spec.model.uri: the folder of a bucket that contains this model alone, or one manifest of an index by its digest.",
    "Unauthorized": "Accept the model's terms on the hub, and set spec.model.credentialsSecretRef to a Secret with a token that may read it.",
    "NoCredentials": "Set spec.model.credentialsSecretRef to a Secret with credentials that may read spec.model.uri, or give the pods' ServiceAccount "
    "a workload identity; AWS_SKIP_SIGNATURE or GOOGLE_SKIP_SIGNATURE in spec.runtime.env reads a public bucket.",
    "InvalidCredentials": "Correct the Secret of spec.model.credentialsSecretRef: its credentials have expired, are unknown to the source, "
    "or do not have the form that the scheme of spec.model.uri needs.",
    "AccessDenied": "Give the identity of spec.model.credentialsSecretRef, or of the pods' ServiceAccount, the right to list and read spec.model.uri.",
    "WrongRegion": "Set AWS_REGION in spec.runtime.env to the region of the bucket, or correct spec.model.endpoint.",
    "TLSFailed": "Correct http or https in spec.model.endpoint, or let the pods trust its certificate authority: SSL_CERT_FILE in spec.runtime.env, "
    "with the file in a volume of spec.podTemplate.",
    "SourceUnreachable": "Check the network, the proxy and DNS of the pods; spec.model.endpoint names another address of the model's source, "
    "HTTPS_PROXY in spec.runtime.env a proxy.",
    "UnexpectedResponse": "Correct spec.model.endpoint or spec.model.uri: what answers there is not a source of models that Skiff supports, "
    "but a proxy, a web page or another API.",
    "SourceChanged": "Wait for the end of the upload to spec.model.uri: the download is repeated; put another version under another prefix or tag.",
    "ChecksumMismatch": "Upload the model of spec.model.uri again, or find the proxy that changes its files.",
    "UnsupportedArtifact": "Push the model again as safetensors files, in raw, tar or tar+gzip layers (oras or modctl), and name that artifact in spec.model.uri.",
    "ModelCacheNotReady": "See what delays the ModelCache's fetchers: kubectl describe modelcache; a new pod waits for it again.",
    "DiskFull": "Raise spec.cache.size, or the ephemeral-storage of spec.resources for weights on the node's disk.",
    "VolumeNotWritable": "Make the cache's volume writable for user 65532, or use another spec.cache.",
    "PortInUse": "Another process of the pod listens on the server's port: remove it from spec.podTemplate, or do not use hostNetwork.",
    "NoGPU": "Check that the node's device plugin and driver work and that spec.runtime.gpuResourceName is right, "
    "or set spec.runtime.device to cpu.",
    "GPUDriver": "Update the node's driver, or use a spec.runtime.image that was built for its version of CUDA.",
    "GPUFault": "The GPU or its driver failed: look for Xid errors in the node's kernel log, and drain the node if they recur.",
    "CollectiveFailed": "The ranks could not communicate: look for the first rank that failed, and check the GPUs' links and /dev/shm; "
    "NCCL_DEBUG=INFO in spec.runtime.env logs more.",
    "StartupTimeout": "Raise spec.startup.timeoutSeconds; status.startup and the phase_started lines of the log show which step is slow.",
    "Hung": "A process stopped answering: if it was only slow, give it more CPU or raise the flag that the log names; "
    "otherwise look at the GPU.",
    "InvalidArgument": "Correct spec.runtime.args or spec.runtime.env.",
    "Killed": "The kubelet or another process killed it: `kubectl describe pod` shows failed probes and evictions; "
    "a slow start needs a larger spec.startup.timeoutSeconds.",
    "WeightsDownloadFailed": "Read logTail: the download's last line names what failed.",
    "CrashLoop": "Read logTail and the container's log (`kubectl logs --previous`); docs/guide/troubleshooting.md lists messages.",
    "ImagePullFailed": "Correct spec.runtime.image or the chart's runtimeImage, or add a pull secret.",
    "ContainerConfigError": "Create the Secret or ConfigMap that the message names, or correct credentialsSecretRef, runtime.env or podTemplate.",
    "InsufficientGPU": "Add or free GPUs, or lower spec.parallelism.tensor or spec.replicas; during a rollout, one more pod needs room.",
    "NoNodeLargeEnough": "Lower spec.parallelism.tensor, add a node with that many GPUs, or check that the device plugin runs.",
    "Unschedulable": "Lower spec.resources, or correct spec.nodeSelector and spec.tolerations; an unbound claim needs a volume.",
    "Evicted": "Request more ephemeral-storage or memory in spec.resources, or set spec.cache so that weights are not on the node's disk.",
    "PodCreateFailed": "Change the quota, LimitRange or admission policy that the message names, or set spec.resources.limits.",
    "ProgressDeadlineExceeded": "Look at the newest pod's events and log; a slow start needs a larger spec.startup.timeoutSeconds.",
    "RolledBack": "Change spec, which starts a new revision, or try the failed one again with `skiff rollout restart`.",
    "InvalidSpec": "Change spec as the message says.",
    "NameConflict": "Delete the object that the message names, or give the InferenceService another name.",
    "ApplyFailed": "Change what the API server's message names; the operator tries again by itself.",
}  # fmt: skip
"""One sentence for each reason of a failure, of `lastFailure` and of conditions: what to change."""

_NUMBER: Final = r"[\d.,e+]+"
_CAUSES: Final = tuple(
    (reason, re.compile(pattern, re.IGNORECASE))
    for reason, pattern in (
        ("DiskFull", r"no space left|not enough space in|disk quota exceeded|ENOSPC"),
        ("TLSFailed", r"certificate verify failed|invalid certificate: |\[SSL: |corrupt message of type"),
        ("InvalidCredentials", r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|TokenRefreshRequired|is not a Docker configuration|settings of the store are not usable|characters that no token has"),
        ("NoCredentials", r"no credentials were found|if it is private, set"),
        ("AccessDenied", r"access was refused \(|may not read it"),
        ("Unauthorized", r"refuses \S+ \((?:401|403)\)|(?:401|403) client error|GatedRepoError|AccessDenied"),
        ("WrongRegion", r"the bucket is in another region"),
        ("InvalidModelURI", r"is an index of \d+ manifests|name the model's own folder|is not a prefix of a bucket|is not an artifact of a registry"),
        ("ModelNotFound", r"has no (?:model|revision) .*\(404\)|model (?:directory|file) \S+ does not exist|is not a hub model|RepositoryNotFound|NoSuchKey|there is no bucket|has no objects: check|the store has no|\(404\): correct the repository"),
        ("ModelCacheNotReady", r"was not completed in \S+ within"),
        ("SourceChanged", r"changed during the download|is shorter than it was listed|does not answer requests for ranges|a manifest of another digest"),
        ("UnexpectedResponse", r"does not answer like a|demands an authentication|answered without a token|(?:manifest|listing) of \S+ is malformed|without a sha256 digest|redirects in a loop|is larger than \d+ bytes|answered 4(?!08|29)\d\d to a request"),
        ("SourceUnreachable", r"no answer from|HF_HUB_OFFLINE forbids|asks to retry after|answered (?:408|429|5\d\d)|the connection ended early|sent more bytes than it announced"),
        ("ChecksumMismatch", r"checksum mismatch"),
        ("UnsupportedArtifact", r"push it as tar|has no layers that are files|has two layers of the name|as a link or a device|may not leave its folder|is not a readable tar archive|contains more than \d+ files"),
        ("InvalidModelFiles", r"is truncated or corrupt|contains no weights|is malformed|cannot be read as a tokenizer|is not a GGUF file|is not valid (?:JSON|UTF-8)|cannot be converted|needs this file"),
        ("UnsupportedModel", r"architecture .* not supported|is not supported|no config\.json at its top level|has only GGUF files|reads no other weight format"),
        ("PortInUse", r"address already in use|EADDRINUSE"),
        ("NoGPU", r"needs \d+ GPUs?; this machine shows|no CUDA GPUs are available|no NVIDIA driver|no CUDA-capable device|NVML.*not found"),
        ("GPUDriver", r"driver version is insufficient|NVIDIA driver on your system is too old|no kernel image is available|forward compatibility was attempted"),
        ("GPUOutOfMemory", r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"),
        ("InsufficientMemory", rf"the weights take {_NUMBER} MiB|no room for a KV cache|--max-total-tokens \d+ takes"),
        ("GPUFault", r"uncorrectable ECC|CUDA error: |illegal memory access|GPU has fallen off|\bXid\b"),
        ("CollectiveFailed", r"\bNCCL\b|this rank waited for another one|planned other steps than rank 0|ProcessGroup"),
        ("StartupTimeout", r"not ready within [\d.]+ s"),
        ("Hung", r"has been silent for|step \S+ took longer than|took longer than .*watchdog"),
        ("OutOfMemory", r"rank\d+ was killed by SIGKILL|\bMemoryError\b|out of memory|cannot allocate memory"),
        ("VolumeNotWritable", r"make \S+ writable for user|read-only file system|supports no locks"),
    )
)  # fmt: skip
"""Ordered from the specific to the general: the first that matches wins."""

_DECISIVE: Final = re.compile(r"^skiff: |\b(?:service_failed|fetch_failed|process_failed)\b", re.MULTILINE)
_FLAG: Final = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]{1,60}")
_VARIABLE: Final = re.compile(r"\bSKIFF_[A-Z0-9_]{1,60}")


class Diagnosis(NamedTuple):
    """A class of failures in CamelCase, and one sentence that says what to change."""

    reason: str
    remedy: str


def diagnose(container: str, *, exit_code: int, reason: str, log_tail: str) -> Diagnosis:
    """Classify the termination of a container by the kubelet's `reason`, its exit code and the end of its output."""
    if reason == OOM_KILLED:
        return _known("OutOfMemory")
    cause = find_cause(log_tail)
    if cause is not None:
        return _known(cause)
    if exit_code == contract.EXIT_USAGE:
        return Diagnosis("InvalidArgument", _argument_remedy(_decisive_line(log_tail)))
    if exit_code in (SIGKILL_CODE, SIGTERM_CODE):
        return _known("Killed")
    return _known("WeightsDownloadFailed" if container == FETCH else "CrashLoop")


def find_cause(log_tail: str) -> str | None:
    """Return the reason that the end of a log shows, its decisive line before the others; None if nothing is recognized."""
    for text in (_decisive_line(log_tail), log_tail):
        for cause, pattern in _CAUSES:
            if pattern.search(text):
                return cause
    return None


def _known(reason: str) -> Diagnosis:
    return Diagnosis(reason, REMEDIES[reason])


def _decisive_line(log_tail: str) -> str:
    """Return the last line that says why a process ends; empty when the tail has none."""
    found = [line for line in log_tail.splitlines() if _DECISIVE.search(line)]
    return found[-1] if found else ""


def _argument_remedy(line: str) -> str:
    """Name the field, the flag or the variable that the message is about."""
    flag, variable = _FLAG.search(line), _VARIABLE.search(line)
    if flag is not None and policy.field_of(flag[0]):
        return f"Correct {policy.field_of(flag[0])}, which sets {flag[0]}."
    if flag is not None and flag[0] != "--help":
        return f"Correct or remove {flag[0]} in spec.runtime.args, or its variable in spec.runtime.env."
    if variable is not None:
        return f"Correct or remove {variable[0]} in spec.runtime.env."
    return REMEDIES["InvalidArgument"]
