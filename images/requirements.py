"""Requirements of an image: those of some extras, minus the packages of its base image.

Run in a stage of a Dockerfile, as `requirements.py OUT EXTRA...`, by a Python that sees the base's packages. It writes
OUT/requirements.txt, OUT/alone.txt (to be installed without what those packages require), and OUT/constraints.txt with the project's pins except those of packages that the base holds: a base comes
with builds of torch and numpy that fit each other and its device, and they stay.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Too large, and too much the device's own, to be installed over the base by accident.
FROM_BASE = ("torch",)
# xgrammar requires triton, 600 MB that only a GPU uses, and whose torch brings it; what else it requires, the project lists.
ALONE = ("xgrammar",)


def held_version(name: str) -> str | None:
    """Return the version of a distribution that the base holds, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(requirements: list[Requirement]) -> list[str]:
    """Return the requirements that pip must see; ends the build when the base lacks what only it may bring."""
    wanted: list[str] = []
    for requirement in requirements:
        if canonicalize_name(requirement.name) not in FROM_BASE:
            wanted.append(str(requirement))
            continue
        held = held_version(requirement.name)
        if held is None or not requirement.specifier.contains(held, prereleases=True):
            sys.exit(
                f"the base image must hold {requirement}, but holds {held}: build with another --build-arg BASE"
            )
    return wanted


def pins(constraints: str) -> list[str]:
    """Return the constraint lines for packages that the base does not hold."""
    lines = [line.partition("#")[0].strip() for line in constraints.splitlines()]
    return [line for line in lines if line and held_version(Requirement(line).name) is None]


def main() -> None:
    """Write the two files."""
    out, extras = Path(sys.argv[1]), sys.argv[2:]
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(each for extra in extras for each in project["optional-dependencies"][extra]),
    ]
    out.mkdir(parents=True, exist_ok=True)
    wanted = missing([Requirement(each) for each in listed])
    alone = [each for each in wanted if canonicalize_name(Requirement(each).name) in ALONE]
    (out / "alone.txt").write_text("".join(f"{each}\n" for each in alone))
    (out / "requirements.txt").write_text("".join(f"{each}\n" for each in wanted if each not in alone))
    (out / "constraints.txt").write_text("\n".join(pins(Path("constraints.txt").read_text())) + "\n")


if __name__ == "__main__":
    main()
