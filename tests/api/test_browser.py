"""The pages in a real browser: they show what they say, by themselves, without an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.api.keys import make_key
from planner.api.settings import Settings
from planner.schedule import Durations, build, simulate
from planner.schedule.timeline import from_simulation, html
from tests.api.documents import four_equal_layers, plan_body
from tests.api.fakes import MARKUP, Gated, Instant, Rich
from tests.api.live import running

pytestmark = pytest.mark.browser

# Chromium must not look up its maker's hosts; without a sandbox it runs as root too.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=ARGUMENTS
        )
        yield browser
        browser.close()


class Visit:
    """A page, the requests that it made, and the errors that it met."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self._note(message))
        self.page.goto(address)

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)


def test_start_page_leads_to_the_plan_and_shows_its_timeline(
    browser: Any, settings: Settings
) -> None:
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


def test_timeline_page_shows_every_action_with_its_words(
    browser: Any, tmp_path: Path
) -> None:
    """The self-contained page draws all actions of all ranks inside the picture, each with hover text."""
    schedule = build("1f1b", ranks=2, micro_batches=3)
    page = tmp_path / "timeline.html"
    page.write_text(
        html([from_simulation(simulate(schedule, Durations.uniform(2)))]),
        encoding="utf-8",
    )
    visit = Visit(browser, page.as_uri())
    titles = visit.page.locator("svg title").all_text_contents()
    for action in (action for actions in schedule.to_text() for action in actions):
        assert any(action in title for title in titles), action
    width = visit.page.locator("svg").first.bounding_box()["width"]
    assert width > 400
    assert visit.errors == []
    assert visit.requests == [page.as_uri()]


def test_a_filled_form_leads_to_the_plans_page(
    browser: Any, settings: Settings, journal: Path
) -> None:
    """On a phone, in the dark: fill in, send, wait on the job's page, read the plan; nothing comes from elsewhere."""
    gate = journal.with_name("gate")
    with running(settings, Gated(journal, gate)) as live:
        base = str(live.client.base_url).rstrip("/")
        visit = Visit(
            browser,
            f"{base}/",
            viewport={"width": 390, "height": 800},
            color_scheme="dark",
        )
        page = visit.page
        page.get_by_role("link", name="New plan").first.click()
        page.get_by_label("Model").select_option("gpt2")
        page.get_by_label("Batch").fill("none")
        page.get_by_role("button", name="Plan").click()
        assert "'none'" in page.locator("#batch-wrong").inner_text()
        assert ["422" in error for error in visit.errors] == [
            True
        ]  # the refused form, which browsers note
        visit.errors.clear()
        page.get_by_label("Batch").fill("64")
        page.get_by_role("button", name="Plan").click()
        page.wait_for_url("**/jobs/*")
        assert page.get_by_role("button", name="Cancel").is_visible()
        gate.touch()
        page.wait_for_url("**/plans/*")
        assert page.get_by_role("heading", name="gpt2 on 8 devices").is_visible()
        assert (
            page.get_by_role(
                "img", name="One predicted training step"
            ).first.bounding_box()["width"]
            > 300
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.get_by_role("link", name="Change this request").click()
        assert page.get_by_label("Batch").input_value() == "64"
        assert visit.errors == []
        assert all(url.startswith((base, "data:")) for url in visit.requests)


def test_markup_in_a_name_stays_text(
    browser: Any, settings: Settings, journal: Path
) -> None:
    """A model that is called like a script is shown so; the browser runs nothing and reports nothing."""
    with running(settings, Rich(journal)) as live:
        plan_id = live.plan(plan_body(four_equal_layers(MARKUP))).json()["id"]
        visit = Visit(browser, f"{live.client.base_url}/plans/{plan_id}")
        assert visit.page.locator("h1").inner_text() == f"{MARKUP} on 2 devices"
        assert visit.page.locator("script").count() == 0
        assert visit.errors == []


def test_a_browser_asks_for_the_key(
    browser: Any, settings_of: Callable[..., Settings], journal: Path
) -> None:
    """With the key as password pages, pictures and forms work; a key that may only read cannot plan."""
    (reading, reader), (secret, planner) = (
        make_key("read", "reader"),
        make_key("plan", "planner"),
    )
    with running(
        settings_of(keys=f"{reader.line()}\n{planner.line()}"), Instant(journal)
    ) as live:
        address = f"{live.client.base_url}/plan"
        for key, place, told in (
            (reading, "**/plan", "requires the scope plan"),
            (secret, "**/plans/*", "Why this plan"),
        ):
            context = browser.new_context(
                http_credentials={"username": "me", "password": key}
            )
            page = context.new_page()
            page.goto(address)
            page.get_by_role("button", name="Plan").click()
            page.wait_for_url(place)
            assert told in page.locator("main").inner_text()
            context.close()
        live.client.headers["Authorization"] = f"Bearer {secret}"
        assert live.metric('planner_problems_total{code="forbidden"}') == 1
