"""The home page in headless Chromium: state, load, key, and a chat that streams, stops, and shows errors and calls."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from frontend import NAME, Echo, Frontend, running_frontend, write_model
from headless_chromium import PHONE, WIDE, chromium
from tiny_models import edit_json

from skiff_runtime.messages import (
    AbortRequest,
    FinishReason,
    GenerateRequest,
    PhaseReport,
    ServiceReady,
    StepStats,
)

pytestmark = pytest.mark.browser

KEY: Final = "sk-of-the-page"
TEMPLATE: Final = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}{% endfor %}"
)
TOOLS: Final = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
CONTRAST: Final = 4.5
"""Least ratio of WCAG 2.2, level AA, for text of ordinary size."""
COLOURS: Final = [
    *((text, back) for text in ("text", "quiet", "accent") for back in ("page", "card")),
    *((text, back) for text in ("good", "wait", "bad") for back in ("page", "card")),
    ("text", "own"),
    ("quiet", "own"),
    ("on-accent", "accent"),
]
RATIO: Final = """([text, back]) => {
  const style = getComputedStyle(document.documentElement);
  const light = name => {
    const hex = style.getPropertyValue('--' + name).trim();
    const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16) / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [low, high] = [light(text), light(back)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""
UNNAMED: Final = """() => [...document.querySelectorAll('input, textarea, button, progress, meter')]
  .filter(each => !each.textContent.trim() && !each.labels?.length && !each.getAttribute('aria-labelledby'))
  .map(each => each.outerHTML)"""


class Visit:
    """The open page. ``complaints`` are errors of the console, refusals of the policy among them."""

    def __init__(self, context: Any, url: str) -> None:
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(url)

    def _hear(self, message: Any) -> None:
        if (
            message.type == "error" and "Failed to load resource" not in message.text
        ):  # a status of 400 or more
            self.complaints.append(message.text)

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        self.page.wait_for_function(f"() => {condition}")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).last.inner_text())

    def wait_text(self, selector: str, part: str) -> None:
        """Wait until the last element of a selector contains ``part``."""
        self.page.locator(selector).last.filter(has_text=part).wait_for()

    def say(self, text: str) -> None:
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_model(tmp_path_factory.mktemp("model"))
    edit_json(model / "tokenizer_config.json", chat_template=TEMPLATE)
    return model


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[Frontend]:
    with running_frontend(model, tool_call_parser="hermes") as front:
        yield front


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    with chromium() as context:
        yield context


@pytest.fixture
def visit(context: Any, front: Frontend) -> Iterator[Visit]:
    visit = Visit(context, front.url)
    visit.wait_text("#model", NAME)
    yield visit
    assert visit.complaints == []
    assert all(url.startswith((front.url, "data:")) for url in visit.urls), visit.urls
    visit.page.close()


def end(front: Frontend, request: GenerateRequest, text: str) -> None:
    """Send the rest of an answer."""
    front.rank.generate(request.uid, text)
    front.rank.finish(request.uid, FinishReason.STOP)


def test_answer_is_streamed_and_counted(visit: Visit, front: Frontend) -> None:
    visit.say("A pod starts")
    request = front.rank.request()
    assert "A pod starts" in front.rank.tokenizer.decode(front.rank.prompt_ids(request))
    assert visit.text("article.user .text") == "A pod starts"
    assert visit.page.input_value("#message") == ""
    front.rank.start(request)
    front.rank.generate(request.uid, "the boat")
    visit.wait_text("article.assistant .text", "the boat")  # while the answer goes on
    assert visit.page.get_attribute("#log", "aria-busy") == "true" and visit.page.is_disabled("#send")
    end(front, request, " <b>crosses</b>")
    visit.wait_text("article.assistant .text", "the boat <b>crosses</b>")  # as text, not as markup
    visit.wait_text("article.assistant .quiet", "tokens/s")
    visit.wait("document.getElementById('log').getAttribute('aria-busy') === 'false'")
    visit.say("again")
    request = front.rank.request()
    assert "<assistant>the boat <b>crosses</b><user>again" in front.rank.tokenizer.decode(
        front.rank.prompt_ids(request)
    )
    front.rank.start(request)
    end(front, request, "so")
    visit.wait_text("article.assistant .text", "so")
    visit.page.click("#clear")
    assert visit.page.locator("#log article").count() == 0


def test_stop_aborts_the_request_and_keeps_its_text(visit: Visit, front: Frontend) -> None:
    visit.say("x")
    request = front.rank.request()
    front.rank.start(request)
    front.rank.generate(request.uid, "the boat")
    visit.wait_text("article.assistant .text", "the boat")
    visit.page.click("#stop")
    visit.wait_text("article.assistant .quiet", "stopped")
    abort = front.rank.receive()
    assert isinstance(abort, AbortRequest) and abort.uid == request.uid
    front.rank.finish(request.uid)
    assert visit.text("article.assistant .text") == "the boat" and visit.text("#chat-error") == ""


def test_errors_are_shown(visit: Visit, front: Frontend) -> None:
    visit.page.click("summary")
    visit.page.fill("#max-tokens", "100000")
    visit.say("x")
    visit.wait_text("#chat-error", "(status 400, request ")
    assert "100000 of output exceed" in visit.text("#chat-error")
    assert visit.page.input_value("#message") == "x" and visit.page.locator("#log article").count() == 0
    visit.page.fill("#max-tokens", "")
    visit.page.fill("#tools", "{}")
    visit.page.press("#message", "Enter")
    visit.wait_text("#chat-error", "not a JSON list")


def test_call_is_shown_and_its_result_returned(visit: Visit, front: Frontend) -> None:
    visit.page.click("summary")
    visit.page.fill("#tools", json.dumps(TOOLS))
    visit.say("x")
    request = front.rank.request()
    front.rank.start(request)
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
    end(front, request, call)
    visit.wait_text("article.assistant pre", 'now({"zone": "UTC"})')
    visit.page.get_by_label("Result of now").fill("noon")
    visit.page.get_by_role("button", name="Return results").click()
    request = front.rank.request()
    prompt = front.rank.tokenizer.decode(front.rank.prompt_ids(request))
    assert "<tool_call>now</tool_call><tool>noon" in prompt
    front.rank.start(request)
    end(front, request, "It is noon.")
    visit.wait_text("article.assistant .text", "It is noon.")


def test_load_is_shown(visit: Visit, front: Frontend) -> None:
    front.rank.step([], stats=StepStats(running=3, queued=2, decode_tokens=3))
    visit.wait_text("#running", "3")
    visit.wait_text("#waiting", "2")
    visit.wait("document.getElementById('generated').textContent !== '-'")
    visit.wait("document.getElementById('chart').points.length > 0")


def test_start_is_shown_until_the_service_is_ready(context: Any, model: Path) -> None:
    with running_frontend(model, ready=False) as front:
        front.api.send(PhaseReport(process="rank0", phase="weights", progress=0.5, seconds=1.0))
        visit = Visit(context, front.url)
        visit.wait_text("#processes", "rank0: weights")
        visit.wait("document.querySelector('#process-rank0 progress').value === 0.5")
        assert visit.text("#state") == "starting"
        visit.wait_text("#model", NAME)
        visit.say("too early")
        visit.wait_text("#chat-error", "still being loaded")
        front.api.send(ServiceReady(kv_tokens=1024))
        visit.wait_text("#state", "ready")
        assert visit.page.is_hidden("#start-section")
        front.processes["api"].kill()
        visit.wait_text("#state", "unreachable")
        visit.page.close()


def test_key_is_kept_in_the_tab_and_in_no_url(context: Any, model: Path) -> None:
    with running_frontend(model, api_key=(KEY,)) as front:
        echo = Echo(front.rank)
        echo.start()
        visit = Visit(context, front.url)
        visit.wait_text("#state", "ready")  # the probes need no key
        visit.page.locator("#key").wait_for()
        assert visit.text("#model") == "Skiff"
        visit.say("x")
        visit.wait_text("#chat-error", "(status 401")
        visit.page.fill("#key", "sk-wrong")
        visit.page.press("#key", "Enter")
        visit.wait_text("#key-error", "not known")
        visit.page.fill("#key", KEY)
        visit.page.press("#key", "Enter")
        visit.wait_text("#model", NAME)
        visit.page.press("#message", "Enter")  # the message was kept
        visit.wait_text("article.assistant .text", "x")
        visit.page.reload()
        visit.wait_text("#model", NAME)
        assert KEY not in visit.page.content() and not any(KEY in url for url in visit.urls)
        assert visit.page.evaluate("localStorage.length") == 0 and not context.cookies()
        other = Visit(context, front.url)
        other.page.locator("#key").wait_for()
        assert visit.complaints == other.complaints == []
        visit.page.close()
        other.page.close()
        echo.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_readable(visit: Visit, scheme: str) -> None:
    visit.page.emulate_media(color_scheme=scheme)
    ratios = {pair: visit.page.evaluate(RATIO, list(pair)) for pair in COLOURS}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < CONTRAST} == {}


def test_page_fits_a_phone_and_names_its_controls(visit: Visit) -> None:
    visit.page.set_viewport_size(PHONE)
    visit.page.click("summary")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    visit.page.set_viewport_size(WIDE)
    assert visit.page.evaluate(UNNAMED) == []


def test_controls_are_reached_by_keyboard(visit: Visit) -> None:
    visit.page.focus("#message")
    reached = []
    for _ in range(3):
        visit.page.keyboard.press("Tab")
        reached.append(visit.page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["send", "clear", "SUMMARY"]  # Stop is disabled
    assert visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
