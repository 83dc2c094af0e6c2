"""The status page of a real server in a real browser, by keyboard only."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from serve.page import ASSETS
from tests.e2e.conftest import KEY
from tests.e2e.prompts import python_prompts
from tests.e2e.running import MODEL, Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SLOW_MS = 60_000
"""Bound on what a busy machine takes to answer."""
UNAUTHORIZED = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
FAILED = "Failed to load resource: "
"""The browser's own words for an answer that is no success, before they say why."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=SLOW_MS)
    with sync_playwright() as playwright:
        # Without a sandbox: the tests run as root in containers.
        arguments = ["--no-sandbox", "--disable-background-networking"]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=SLOW_MS)
        yield started
        started.close()


@contextmanager
def opened(
    browser: Browser, server: Server, *, unlock: bool = True, expected: str = UNAUTHORIZED, **context: Any
) -> Iterator[Page]:
    """The page, its console free of errors but for the 401 that asks for the key, and its requests all ours."""
    complaints: list[str] = []
    hosts: set[str] = set()
    made: BrowserContext = browser.new_context(**context)
    made.set_default_timeout(SLOW_MS)
    page = made.new_page()
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    try:
        page.goto(f"{server.url}/dspark/")
        if unlock:
            enter_key(page)
        yield page
        assert [complaint for complaint in complaints if not complaint.startswith(expected)] == []
        assert hosts == {urlsplit(server.url).netloc}
    finally:
        made.close()


def enter_key(page: Page, key: str = KEY) -> None:
    """Type a key; the field has the focus already."""
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    if key == KEY:
        expect(page.locator("#content")).to_be_visible()


def test_the_shell_has_a_strict_policy_and_no_data(guarded: Server) -> None:
    with httpx.Client(base_url=guarded.url) as stranger:
        assert stranger.get("/dspark").next_request.url.path == "/dspark/"  # type: ignore[union-attr]
        for path in ASSETS:
            answer = stranger.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"} <= {
                *policy
            }
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert MODEL not in answer.text
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), "nothing from another host"
        markup = stranger.get("/dspark/").text
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son\w+=", markup)


def test_it_asks_for_the_key_and_forgets_it(browser: Browser, guarded: Server) -> None:
    with opened(browser, guarded, unlock=False) as page:
        expect(page.locator("#key-form")).to_be_visible()
        expect(page.locator("#content")).to_be_hidden()
        enter_key(page, "guessed")
        expect(page.locator("#key-problem")).to_have_text("The server does not accept this key.")
        expect(page.locator("#content")).to_be_hidden()
        page.locator("#key").fill("")
        enter_key(page)
        expect(page.locator("#key-form")).to_be_hidden()
        assert page.locator("#key").input_value() == ""
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.reload()
        expect(page.locator("#key-form")).to_be_visible()


def test_it_shows_what_the_server_knows(browser: Browser, guarded: Server) -> None:
    for prompt in python_prompts()[:2]:
        guarded.complete(prompt, max_tokens=24)

    def status() -> dict[str, Any]:
        said: dict[str, Any] = guarded.client.get("/dspark/status").json()
        return said

    guarded.wait_until(lambda: any(point["acceptance_length"] for point in status()["history"]))
    with opened(browser, guarded) as page:
        known = status()
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#model")).to_contain_text(MODEL)
        expect(page.locator("#mode-note")).to_contain_text("Configured: adaptive.")
        expect(page.locator("#history path.curve, #history circle.dot").first).to_be_attached()
        expect(page.locator("#calibration-chart circle")).to_have_count(
            sum(1 for row in known["reliability"] if row["predictions"])
        )
        shown = page.locator("#positions tbody tr").all_inner_texts()
        assert [row.split("\t")[:4] for row in shown] == [
            [str(row["position"]), *(f"{row[what]:,}" for what in ("proposed", "verified", "accepted"))]
            for row in known["positions"]
        ]
        samples = guarded.samples()
        for what in ("verified", "accepted"):
            assert sum(row[what] for row in known["positions"]) == samples[f"dspark_{what}_draft_tokens_total", ""]
        patches = page.locator("#patches tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in patches] == [patch["id"] for patch in known["patches"]]
        expect(page.locator("#server")).to_contain_text(known["vllm_version"])


def test_the_mode_is_switched_by_keyboard(browser: Browser, guarded: Server) -> None:
    assert guarded.client.put("/dspark/mode", json={"mode": "adaptive"}).status_code == 200
    with opened(browser, guarded) as page:
        adaptive, fixed = page.get_by_role("button", name="Adaptive"), page.get_by_role("button", name="Fixed")
        expect(adaptive).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("Tab")
        expect(adaptive).to_be_focused()
        page.keyboard.press("Tab")
        expect(fixed).to_be_focused()
        assert fixed.evaluate("node => getComputedStyle(node).outlineStyle") != "none", "the focus must be seen"
        page.keyboard.press("Enter")
        expect(page.locator("#mode-said")).to_have_text("In force: fixed.")
        expect(fixed).to_have_attribute("aria-pressed", "true")
        expect(fixed).to_be_focused()
        assert guarded.client.get("/dspark/mode").json()["mode"] == "fixed"
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Space")
        expect(page.locator("#mode-said")).to_have_text("In force: adaptive.")
        assert guarded.client.get("/dspark/mode").json()["mode"] == "adaptive"


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_at_every_width_and_in_both_schemes(
    browser: Browser, guarded: Server, width: int, scheme: Any
) -> None:
    """axe-core finds nothing, contrast included, and nothing is cut off at the side."""
    viewport: Any = {"width": width, "height": 800}
    with opened(browser, guarded, unlock=False, viewport=viewport, color_scheme=scheme) as page:
        expect(page.locator("#key-form")).to_be_visible()
        for unlocked in (False, True):
            if unlocked:
                enter_key(page)
                page.locator("summary").press("Enter")
            violations = Axe().run(page).response["violations"]
            assert [(found["id"], [node["html"] for node in found["nodes"]]) for found in violations] == []
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


STATES = [
    ({"state": "starting", "seconds": 3.0, "phase": "importing vLLM"}, "#state", "starting: importing vLLM"),
    ({"state": "failed", "seconds": 3.0, "reason": "the engine died: <b>x"}, "#state", "failed: the engine died: <b>x"),
    ({"positions": [], "history": [], "last_minute": {}}, "#positions-text", "Nothing is drafted on this server."),
    ({"reliability": None}, "#calibration-text", "Nothing predicts acceptance on this server."),
    (
        {"mode": {"mode": None, "engines": [{"engine": 0, "mode": "fixed"}, {"engine": 1, "mode": None}]}},
        "#mode-said",
        "engine 0: fixed, engine 1: not confirmed",
    ),
    (
        {"mode": {"switchable": False, "reason": "this server was started fixed"}},
        "#mode-note",
        "Configured: adaptive. This server was started fixed.",
    ),
]


@pytest.mark.parametrize(("change", "where", "text"), STATES)
def test_every_state_is_told(browser: Browser, guarded: Server, change: dict, where: str, text: str) -> None:
    """The real status with one thing changed on its way to the page."""
    status = guarded.client.get("/dspark/status").json()
    mode = status["mode"] | change.get("mode", {})
    with opened(browser, guarded, unlock=False) as page:
        page.route("**/dspark/status", lambda route: route.fulfill(json=status | change | {"mode": mode}))
        enter_key(page)
        expect(page.locator(where)).to_have_text(text)
        if not mode["switchable"]:
            page.get_by_role("button", name="Fixed").press("Enter")
            expect(page.get_by_role("button", name="Fixed")).to_have_attribute("aria-disabled", "true")


def test_what_the_server_says_of_a_refused_switch_is_shown(browser: Browser, guarded: Server) -> None:
    refusal = {"error": {"message": "engine 1 did not answer within 30 s"}}
    assert guarded.client.put("/dspark/mode", json={"mode": "adaptive"}).status_code == 200
    with opened(browser, guarded, expected=FAILED) as page:
        page.route("**/dspark/mode", lambda route: route.fulfill(status=504, json=refusal))
        page.get_by_role("button", name="Fixed").press("Enter")
        expect(page.locator("#mode-said")).to_have_text("Not switched: engine 1 did not answer within 30 s.")
        assert guarded.client.put("/dspark/mode", json={"mode": "fixed"}).status_code == 200
        expect(page.locator("#mode-said")).to_have_text("In force: fixed.")


def test_a_server_that_does_not_answer_is_told_and_found_again(browser: Browser, guarded: Server) -> None:
    with opened(browser, guarded, expected=FAILED) as page:
        page.route("**/dspark/status", lambda route: route.abort())
        expect(page.locator("#problem")).to_contain_text("The server does not answer. What is shown is from")
        expect(page.locator("#content")).to_be_visible()
        page.unroute("**/dspark/status")
        expect(page.locator("#problem")).to_be_hidden()
        expect(page.locator("#state")).to_have_text("ready")
