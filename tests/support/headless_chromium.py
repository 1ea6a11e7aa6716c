"""Headless Chromium for tests of the home page and for the screenshots of the documentation.

``make test-browser`` and ``make screenshots`` install playwright, and Chromium from Debian's packages.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_FLAGS: Final = (
    "--no-sandbox",  # a container's root has no user namespaces
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE: Final = {"width": 1000, "height": 800}
PHONE: Final = {"width": 360, "height": 740}
_TIMEOUT_MS: Final = 20_000


@contextmanager
def chromium(**options: Any) -> Iterator[Any]:
    """Start Chromium with a fresh profile, and yield its context. ``options`` are those of playwright's context."""
    # Imported here, since the other suites run without playwright.
    from playwright.sync_api import sync_playwright

    executable = os.environ.get("SKIFF_TEST_CHROMIUM") or shutil.which("chromium")
    assert executable, "there is no chromium: run `make test-browser`, or set SKIFF_TEST_CHROMIUM"
    with tempfile.TemporaryDirectory(prefix="skiff-browser-") as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=executable, args=list(_FLAGS), **{"viewport": WIDE, **options}
        )
        context.set_default_timeout(_TIMEOUT_MS)
        try:
            yield context
        finally:
            context.close()
