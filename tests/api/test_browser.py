"""The pages in a real browser: they show what they say, by themselves, without an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.settings import Settings
from planner.schedule import Durations, build, simulate
from planner.schedule.timeline import from_simulation, html
from tests.api.documents import plan_body
from tests.api.live import running

pytestmark = pytest.mark.browser

# Chromium must not look up its maker's hosts; without a sandbox it runs as root too.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A page, the requests that it made, and the errors that it met."""

    def __init__(self, browser: Any, address: str) -> None:
        self.page = browser.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self._note(message))
        self.page.goto(address)

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)


def test_start_page_leads_to_the_plan_and_shows_its_timeline(browser: Any, settings: Settings) -> None:
    """A plan stands on the start page with its picture; its links work; nothing comes from elsewhere."""
    with running(settings) as live:
        plan = live.plan(plan_body()).json()
        base = str(live.client.base_url).rstrip("/")
        visit = Visit(browser, f"{base}/")
        assert visit.page.locator(f"a[href*='{plan['id']}']").first.is_visible()
        drawn = visit.page.locator("svg, img").first
        assert drawn.bounding_box()["width"] > 100
        assert visit.errors == []
        assert all(url.startswith((base, "data:")) for url in visit.requests)


def test_timeline_page_shows_every_action_with_its_words(browser: Any, tmp_path: Path) -> None:
    """The self-contained page draws all actions of all ranks inside the picture, each with hover text."""
    schedule = build("1f1b", ranks=2, micro_batches=3)
    page = tmp_path / "timeline.html"
    page.write_text(html([from_simulation(simulate(schedule, Durations.uniform(2)))]), encoding="utf-8")
    visit = Visit(browser, page.as_uri())
    titles = visit.page.locator("svg title").all_text_contents()
    for action in (action for actions in schedule.to_text() for action in actions):
        assert any(action in title for title in titles), action
    width = visit.page.locator("svg").first.bounding_box()["width"]
    assert width > 400
    assert visit.errors == []
    assert visit.requests == [page.as_uri()]
