"""Free memory for this process: of the GPU, or of the machine and its control groups."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

ROOT: Final = Path("/")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: "torch.device") -> int:
    """Return the free memory of ``device`` in bytes."""
    if device.type == "cuda":
        import torch  # not at the top: a rank reads the host's free memory before it imports torch

        return torch.cuda.mem_get_info(device)[0]
    return host_free_bytes()


def host_free_bytes(root: Path = ROOT) -> int:
    """Return the least that the machine and each control group around this process have left; ``root`` is for tests."""
    free = [_machine_free(root)]
    for directory, names in _control_groups(root):
        left = _group_free(directory, *names)
        if left is not None:
            free.append(left)
    return max(0, min(free))


def _machine_free(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo lacks MemAvailable")


def _control_groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the directories of this process's memory groups and of their parents, with the names of their files.

    Inside a container the path in /proc may lie outside of what is mounted. The mounted root is then the container's
    own group, so it is always included.
    """
    found: list[tuple[Path, tuple[str, str, str]]] = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [(each, _V2) for each in _ancestors(root / "sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            found += [(each, _V1) for each in _ancestors(root / "sys/fs/cgroup/memory", path)]
    return found


def _ancestors(mount: Path, path: str) -> list[Path]:
    inner = mount / path.lstrip("/")
    return [inner, *[each for each in inner.parents if each.is_relative_to(mount)]]


def _group_free(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    """Return the bytes that a group has left, its reclaimable file cache counted as free; None without a limit."""
    try:
        limit = (directory / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((directory / usage_file).read_text())
        stats = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stats.get(reclaimable, 0))
    except (OSError, ValueError):
        return None


def allocatable_bytes(device: "torch.device") -> int:
    """Return the free memory of a GPU, with what torch's allocator holds of it without using it."""
    import torch

    return free_bytes(device) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
