"""Dependencies: bounds in pyproject.toml, pins in constraints.txt, and the modules that may use libraries' internals."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
EXTRAS = {
    extra: [Requirement(line) for line in lines]
    for extra, lines in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].items()
}
PACKAGES = {
    "skiff_operator": (ROOT / "operator", ("operator",)),
    "skiff_router": (ROOT / "runtime", ("router",)),
    "skiff_runtime": (ROOT / "runtime", ("runtime", "bench", "fast", "tracing", "gpu")),
}
REQUIREMENTS = [
    pytest.param(requirement, id=f"{extra}-{requirement.name}")
    for extra, requirements in EXTRAS.items()
    for requirement in requirements
]
# Installed by a requirement of the same project, or whose version is for it to decide.
BROUGHT_ALONG = {
    "pydantic-core": "pydantic",
    "opentelemetry-api": "opentelemetry-sdk",
    "triton": "torch",
}
INTERNALS = {
    "uvicorn.protocols": "skiff_runtime.api.http.uvicorn_internals",
    "torch": "skiff_runtime.kernels.torch_internals",
    "torch.distributed._symmetric_memory": "skiff_runtime.distributed.symmetric_memory",
    "triton.backends": "skiff_runtime.kernels.triton_internals",
    "triton.knobs": "skiff_runtime.kernels.triton_internals",
    "triton.runtime": "skiff_runtime.kernels.triton_internals",
    "flashinfer.jit": "skiff_runtime.kernels.flashinfer_internals",
    "flashinfer.utils": "skiff_runtime.kernels.flashinfer_internals",
    "transformers.convert_slow_tokenizer": "skiff_runtime.conversion.transformers_internals",
    "kopf": "skiff_operator.reflector",
}
"""Undocumented submodule, or library whose underscore names are meant -> the one module that may use it."""


def pins() -> dict[str, Version]:
    """Versions in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return {
        canonicalize_name(name): Version(pin) for name, _, pin in (line.partition("==") for line in lines)
    }


def sources() -> Iterator[tuple[str, str, ast.Module]]:
    """Package, dotted name and tree of each of our modules."""
    for package, (base, _) in PACKAGES.items():
        for path in sorted((base / package).rglob("*.py")):
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            yield package, name, ast.parse(path.read_text())


def uses(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports, or reads from a third-party package that it imported by its own name."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names if not alias.asname}
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.partition(".")[0] in imported and all(part.isidentifier() for part in name.split(".")):
                yield name


def is_third_party(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in PACKAGES


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_each_requirement_is_bounded_and_pinned_within_its_bounds(requirement: Requirement) -> None:
    operators = {each.operator for each in requirement.specifier}
    assert operators == {">=", "<"}, f"{requirement} needs a lower and an upper bound"
    pinned = pins().get(canonicalize_name(requirement.name))
    assert pinned is not None, f"constraints.txt pins no {requirement.name}"
    assert requirement.specifier.contains(pinned), f"constraints.txt pins {pinned}, outside of {requirement}"


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_the_installed_version_is_within_the_bounds(requirement: Requirement) -> None:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        pytest.skip(f"{requirement.name} is not installed")
    assert requirement.specifier.contains(installed, prereleases=True), (
        f"{installed} is outside of {requirement}"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_is_required_by_its_extras(package: str) -> None:
    """A library that comes along with another today may not come along tomorrow."""
    required = {canonicalize_name(each.name) for extra in PACKAGES[package][1] for each in EXTRAS[extra]} | {
        name for name, by in BROUGHT_ALONG.items() if any(by == each.name for each in _required(package))
    }
    distributions = packages_distributions()
    missing = set()
    for owner, module, tree in sources():
        for name in uses(tree) if owner == package else ():
            top = name.partition(".")[0]
            if not is_third_party(name) or top not in distributions:
                continue
            if not required & {canonicalize_name(each) for each in distributions[top]}:
                missing.add(f"{module} imports {top}")
    assert not missing, sorted(missing)


def _required(package: str) -> list[Requirement]:
    return [each for extra in PACKAGES[package][1] for each in EXTRAS[extra]]


def test_internals_of_a_library_are_used_by_one_module() -> None:
    faults = set()
    for _, module, tree in sources():
        for name in filter(is_third_party, uses(tree)):
            private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
            top = name.partition(".")[0]
            owners = [
                owner
                for internal, owner in INTERNALS.items()
                if (private and internal.partition(".")[0] == top)
                or ("." in internal and f"{name}.".startswith(f"{internal}."))
            ]
            if (private or owners) and module not in owners:
                faults.add(
                    f"{module} uses {name}, which belongs in {' or '.join(owners) or 'a module of its own'}"
                )
    assert not faults, sorted(faults)
