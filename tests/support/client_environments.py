"""Environments of the client suite: for each client from PyPI a virtual environment of its own, because they contradict
each other, and one ``node_modules`` for those from npm. They are made once, into a cache directory, by uv and npm.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

CLIENTS: Final = Path(__file__).parents[1] / "clients"
CACHE: Final = Path(os.environ.get("SKIFF_TEST_CLIENTS_CACHE", Path.home() / ".cache/skiff-clients"))
_PACKAGE_JSON: Final = CLIENTS / "package.json"
_INSTALL_SECONDS: Final = 900
_MIN_NODE: Final = 20


class InstallError(Exception):
    """A client could not be installed."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the suite: where it comes from, and what it has to do.

    ``packages`` are requirements for pip. Of their dependencies, ``borrowed`` are not installed but taken from the
    environment of the suite, and ``omitted`` are left out. ``npm`` are names of packages in package.json. ``scenarios``
    are the names that ``program`` must report, in its order.
    """

    name: str
    program: str
    scenarios: Sequence[str]
    packages: Sequence[str] = ()
    borrowed: Sequence[str] = ()
    omitted: Sequence[str] = ()
    npm: Sequence[str] = ()

    @property
    def version(self) -> str:
        """The exact version of the package that names the client."""
        if self.packages:
            return self.packages[0].rpartition("==")[2]
        version: str = json.loads(_PACKAGE_JSON.read_text())["dependencies"][self.npm[0]]
        return version


@dataclass(frozen=True, slots=True)
class Environments:
    """Makes environments on first use. ``published_before``: only dependencies published before this time are installed."""

    published_before: str
    uv_version: str
    directory: Path = field(default=CACHE)

    def command(self, client: Client) -> tuple[list[str], dict[str, str]]:
        """Install the client, and return the command of its program and the variables of its environment."""
        node = self._node_modules() if client.npm else None
        paths = [str(node / ".bin")] if node else []
        if client.program.endswith(".mjs"):
            assert node is not None
            program = self._beside(node, client.program)
            return ["node", str(program)], {"PATH": _path(paths)}
        python = Path(sys.executable)
        if client.packages:
            python = self._virtual_environment(client) / "bin/python"
            paths.append(str(python.parent))
        return [str(python), str(CLIENTS / "programs" / client.program)], {"PATH": _path(paths)}

    def _virtual_environment(self, client: Client) -> Path:
        absent = [*client.borrowed, *client.omitted]
        wanted = [self.published_before, self.uv_version, sys.version, *client.packages, *absent]
        directory = self.directory / f"{client.name}-{_digest(*wanted)}"
        is_whole = (
            directory / "installed"
        )  # scripts contain the path of their environment: it cannot be moved
        if is_whole.exists():
            return directory
        uv = str(self._uv())
        overrides = self.directory / f"{client.name}.overrides"
        overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in absent))
        # A cache on the same file system gives its files to all environments as hard links.
        environment = {"UV_CACHE_DIR": str(self.directory / "uv-cache")}
        _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(directory)], environment)
        install = [uv, "pip", "install", "--quiet", "--python", str(directory / "bin/python")]
        install += ["--exclude-newer", self.published_before, "--overrides", str(overrides), *client.packages]
        _run(install, environment)
        if client.borrowed:  # found last: whatever the client has installed itself comes first
            [packages] = directory.glob("lib/python*/site-packages")
            (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        is_whole.touch()
        return directory

    def _uv(self) -> Path:
        directory = self.directory / f"uv-{self.uv_version}"
        if not (directory / "bin/uv").exists():
            _run([sys.executable, "-m", "venv", "--clear", str(directory)])
            pip = [
                str(directory / "bin/python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
            _run([*pip, f"uv=={self.uv_version}"])
        return directory / "bin/uv"

    def _node_modules(self) -> Path:
        _check_node()
        directory = self.directory / f"npm-{_digest(self.published_before, _PACKAGE_JSON.read_text())}"
        if not directory.exists():
            making = directory.with_suffix(".making")
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir(parents=True)
            shutil.copy(_PACKAGE_JSON, making)
            install = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
            _run([*install, "--before", self.published_before], directory=making)
            making.rename(directory)
        return directory / "node_modules"

    def _beside(self, node_modules: Path, program: str) -> Path:
        """Copy the JavaScript programs to where node finds the packages that they import."""
        for path in (CLIENTS / "programs").glob("*.mjs"):
            shutil.copy(path, node_modules.parent)
        return node_modules.parent / program


def read_clients() -> tuple[list[Client], Environments]:
    """Read clients.toml."""
    table: dict[str, Any] = tomllib.loads((CLIENTS / "clients.toml").read_text())
    clients = [Client(name=name, **row) for name, row in table["client"].items()]
    return clients, Environments(table["published_before"], table["uv"])


def _run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=_INSTALL_SECONDS,
    )
    if done.returncode:
        raise InstallError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def _check_node() -> None:
    if not shutil.which("node") or not shutil.which("npm"):
        raise InstallError(f"node and npm are not installed; this client needs node {_MIN_NODE} or later")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.lstrip("v").partition(".")[0]) < _MIN_NODE:
        raise InstallError(f"node is {version.strip()}; this client needs {_MIN_NODE} or later")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _path(first: Sequence[str]) -> str:
    return os.pathsep.join([*first, os.environ["PATH"]])
