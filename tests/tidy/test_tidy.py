"""Facts about the tree that linters do not check: layout, dead modules, no trace of a developer's machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from skiff_runtime import contract

ROOT = Path(__file__).parents[2]
TOP_LEVEL = {"operator", "runtime", "charts", "manifests", "tests", "images", "docs", ".ci", ".github"}
PACKAGES = {
    "skiff_operator": ROOT / "operator",
    "skiff_router": ROOT / "runtime",
    "skiff_runtime": ROOT / "runtime",
}
MIRROR = re.compile(r"https?://[^\s\"'<>)]*(?:mirror|artifactory|nexus|proxy|/simple\b)", re.IGNORECASE)
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:work|root)/\w")
LOCK_FILES = {"uv.lock", "poetry.lock", "package-lock.json", "Pipfile.lock"}
ENTRY_POINTS = {
    "skiff_runtime.__main__",
    "skiff_operator.__main__",
    "skiff_operator.cli.main",
    "skiff_router.__main__",
    "skiff_runtime.processes.child_process",
}


def tracked(suffix: str = "") -> list[Path]:
    """Files that git knows or would add, by ending."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    paths = [ROOT / name for name in names if name.endswith(suffix)]
    return [path for path in paths if path.is_file()]


def module_name(path: Path) -> str | None:
    """Dotted name of a file in one of the two packages."""
    for base in PACKAGES.values():
        if path.is_relative_to(base) and path.relative_to(base).parts[0] in PACKAGES:
            parts = path.relative_to(base).with_suffix("").parts
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return None


def mentions(tree: ast.AST) -> set[str]:
    """Every module that a file imports, or names in a string (lazy loading by name)."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_no_package_file_where_it_would_shadow() -> None:
    assert not (ROOT / "operator/__init__.py").exists()
    assert not [path for path in tracked("__init__.py") if path.is_relative_to(ROOT / "tests")]


def test_top_level_is_as_designed() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in tracked() if len(path.relative_to(ROOT).parts) > 1}
    assert folders <= TOP_LEVEL, sorted(folders - TOP_LEVEL)


def test_every_package_says_what_belongs_in_it() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked(".py")
        if module_name(path) and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, silent


def test_no_dead_module() -> None:
    sources = [path for path in tracked(".py") if module_name(path)]
    used: set[str] = set(ENTRY_POINTS)
    for path in sources:
        used |= mentions(ast.parse(path.read_text()))
    used |= {f"skiff_runtime.bench.{name}" for name in used}
    for path in [*tracked("Makefile"), *(path for path in tracked(".yaml") if "charts" in path.parts)]:
        used |= set(re.findall(r"skiff_(?:runtime|operator)(?:\.\w+)+", path.read_text()))
    names = {name for path in sources if (name := module_name(path)) and path.name != "__init__.py"}
    assert not names - used, sorted(names - used)


@pytest.mark.parametrize("pattern", [MIRROR, MACHINE_PATH], ids=["mirror", "machine path"])
def test_nothing_of_anyones_machine(pattern: re.Pattern[str]) -> None:
    faults = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in {".safetensors", ".png"} or path.name == "tokenizer.json":
            continue
        text = path.read_text(errors="replace")
        faults += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert not faults, faults


def test_no_lock_file_with_download_addresses() -> None:
    assert not [path for path in tracked() if path.name in LOCK_FILES]


def test_every_metric_is_documented() -> None:
    documented = (ROOT / "docs/metrics.md").read_text()
    prefixes = ("METRIC_", "ROUTING_", "OPERATOR_")
    names = [
        value
        for key, value in vars(contract).items()
        if key.startswith(prefixes) and isinstance(value, str) and re.match(r"skiff_|sglang:", value)
    ]
    assert len(names) > 20
    assert [name for name in names if f"`{name}" not in documented] == []
