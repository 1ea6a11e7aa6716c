"""The documents agree with the code: the page of flags, links and their anchors, named files, and commands."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from flag_page import render

from skiff_runtime.__main__ import _make_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
GUIDES = [page for page in PAGES if "guide" in page.parts or page.name == "README.md"]
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
NAMED_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|toml|yaml|Dockerfile))(?:::\w+)?`")
FOLDERS = ("", "runtime/skiff_runtime", "operator", "operator/skiff_operator", "runtime")
SKIFF = re.compile(r"(?:^|\| )(?:\.venv/bin/)?skiff ([^|&>]*)")
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = HEADING.findall(page.read_text())
    plain = (re.sub(r"[`*]|\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def commands(page: Path) -> list[str]:
    """Return the command lines of ``skiff`` in a page's shell blocks."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            command = SKIFF.search(line)
            if command:
                found.append(command[1])
    return found


def test_the_page_of_flags_is_generated_from_the_code() -> None:
    made = (ROOT / "docs/guide/flags.md").read_text()
    assert made == render(), "run `python tests/support/flag_page.py > docs/guide/flags.md`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(f"{path}#{anchor}")
    assert not dead, dead


@pytest.fixture(scope="module")
def files() -> set[str]:
    """The paths of all tracked files, and of those that the diffs of docs/contributing add."""
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    diffs = (path.read_text() for path in (ROOT / "docs/contributing").glob("*.diff"))
    return set(listed) | {
        name for text in diffs for name in re.findall(r"^\+\+\+ b/(.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path, files: set[str]) -> None:
    names = {name for path in files for name in (path, Path(path).name)}
    missing = [
        name
        for name in NAMED_FILE.findall(page.read_text())
        if not any(str(Path(folder) / name) in names for folder in FOLDERS)
    ]
    assert not missing, missing


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shown_commands_parse(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command, comments=True)
        if "--help" not in words:
            _make_parser(words).parse_args(words)


def test_the_guides_show_every_command() -> None:
    shown = {command.split()[0] for page in GUIDES for command in commands(page)}
    assert shown >= {"serve", "chat", "info", "fetch", "router", "bench"}
