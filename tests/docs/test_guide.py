"""The guides in docs/: the page of flags is that of the code, links lead somewhere, what is shown parses."""

import re
import shlex
from pathlib import Path

import pytest
from flag_page import render

from skiff_runtime.__main__ import _parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
GUIDES = [page for page in PAGES if "guide" in page.parts or page.name == "README.md"]
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
SKIFF = re.compile(r"(?:^|\| )(?:\.venv/bin/)?skiff ([^|&>]*)")
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The command lines of ``skiff`` that a page shows."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            command = SKIFF.search(line)
            if command:
                found.append(command[1])
    return found


def test_the_page_of_flags_is_made_from_the_code() -> None:
    made = (ROOT / "docs/guide/flags.md").read_text()
    assert made == render(), "run `python tests/support/flag_page.py > docs/guide/flags.md`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    dead = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not dead, dead


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_shown_are_understood(page: Path) -> None:
    shown = commands(page)
    for command in shown:
        words = shlex.split(command, comments=True)
        if "--help" not in words:
            _parser(words).parse_args(words)


def test_the_guides_show_every_command() -> None:
    shown = {command.split()[0] for page in GUIDES for command in commands(page)}
    assert shown >= {"serve", "chat", "info", "fetch", "bench"}
