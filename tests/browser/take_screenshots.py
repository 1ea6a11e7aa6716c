"""Take the screenshots of docs/guide: the home page of the demo model's service, in headless Chromium.

    make screenshots

The demo model answers at temperature 0, so that the same text appears each time; the figures of a run differ.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from headless_chromium import PHONE, chromium
from service import running_service

GUIDE: Final = Path(__file__).parents[2] / "docs/guide"
MAX_BYTES: Final = 150_000
QUESTION: Final = "What is a pod?"
TOOL_QUESTION: Final = "Is the pod web-0 in namespace shop running?"
TOOL_RESULT: Final = '{"phase": "Running", "restarts": 2}'
TOOL: Final = {
    "name": "get_pod_status",
    "description": "Get the status of a pod.",
    "parameters": {
        "type": "object",
        "properties": {"namespace": {"type": "string"}, "name": {"type": "string"}},
        "required": ["namespace", "name"],
    },
}
"""One of the tools that the demo model was trained to call."""


def main(model: str = "demo://") -> int:
    """Take every screenshot."""
    with running_service(model, "--served-model-name", "skiff-demo") as service:
        with chromium() as context:
            page = open_page(context, service.url)
            ask(page, QUESTION)
            save(page, "home-page.png")
        with chromium(color_scheme="dark", viewport=PHONE) as context:
            page = open_page(context, service.url)
            ask(page, QUESTION)
            save(page, "home-page-phone.png")
        with chromium() as context:
            page = open_page(context, service.url)
            page.click("summary")
            page.fill("#tools", json.dumps([{"type": "function", "function": TOOL}], indent=1))
            ask(page, TOOL_QUESTION)
            if page.locator("article.assistant pre").count() == 0:
                print("the demo model called no tool: home-page-tool.png was not taken", file=sys.stderr)
                return 1
            page.click("summary")
            page.get_by_label(f"Result of {TOOL['name']}").fill(TOOL_RESULT)
            page.get_by_role("button", name="Return results").click()
            wait_for_answer(page)
            save(page, "home-page-tool.png")
    return 0


def open_page(context: Any, url: str) -> Any:
    """Open the home page, and wait for its second look at the load."""
    page = context.new_page()
    page.goto(url)
    page.click("summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "120")
    page.click("summary")
    page.wait_for_function("() => document.getElementById('generated').textContent !== '-'")
    return page


def ask(page: Any, question: str) -> None:
    """Send a message, and wait until its answer is complete."""
    page.fill("#message", question)
    page.press("#message", "Enter")
    wait_for_answer(page)


def wait_for_answer(page: Any) -> None:
    """Wait until the answer is complete, and the load has been shown with it."""
    page.wait_for_function("() => document.getElementById('log').getAttribute('aria-busy') === 'false'")
    page.wait_for_function("() => document.getElementById('chart').points.length > 1")


def save(page: Any, name: str) -> None:
    """Write one picture of the whole page."""
    path = GUIDE / name
    page.screenshot(path=path, full_page=True, animations="disabled", caret="hide")
    size = path.stat().st_size
    assert size < MAX_BYTES, f"{path} has {size} bytes, more than {MAX_BYTES}"
    print(f"{path} {size} bytes")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
