"""The pages in a real browser: they show what they say, by themselves, without an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.api.http.keys import make_key
from planner.api.pages import standalone_page
from planner.api.settings import Settings
from planner.schedule import Durations, build, simulate
from planner.schedule.timeline import from_simulation, html
from planner.spec import Plan
from tests.api.documents import four_equal_layers, job, plan_body
from tests.api.fakes import MARKUP, Gated, Instant, Rich, Unfit
from tests.api.live import running
from tests.api.test_plans import measured_run

pytestmark = pytest.mark.browser

VENDOR = Path(__file__).resolve().parents[1] / "vendor"
UNFOLD = "document.querySelectorAll('details').forEach((each) => { each.open = true })"
WIDTH = "document.documentElement.scrollWidth"

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


def broken_rules(page: Any) -> list[tuple[str, str]]:
    """What axe-core finds on a page: the rule, and the first element that breaks it."""
    page.evaluate((VENDOR / "axe-core" / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    return [(each["id"], each["nodes"][0]["html"]) for each in found]


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
    """The start page leads to a plan, whose timeline becomes part of its page; nothing comes from elsewhere."""
    with running(settings) as live:
        plan = live.plan(plan_body()).json()
        base = str(live.client.base_url).rstrip("/")
        visit = Visit(browser, f"{base}/")
        visit.page.locator(f"a[href*='{plan['id']}']").first.click()
        drawn = visit.page.locator("#timeline svg")
        drawn.wait_for()
        width = drawn.bounding_box()["width"]
        assert width > 400
        visit.page.get_by_label("Zoom").fill("3")
        assert drawn.bounding_box()["width"] > 2 * width
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


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (390, "dark")], ids=["desk", "phone"]
)
def test_the_whole_way_from_the_form_to_the_stage_map(
    browser: Any, settings: Settings, journal: Path, width: int, scheme: str
) -> None:
    """Fill in the empty form, correct a mistake, wait for the search, read the plan, download its stage map."""
    gate = journal.with_name("gate")
    with running(settings, Gated(journal, gate)) as live:
        base = str(live.client.base_url).rstrip("/")
        visit = Visit(
            browser,
            f"{base}/",
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
        )
        page = visit.page
        page.get_by_label("Model").select_option("gpt2")
        page.get_by_label("Devices").fill("8")
        page.get_by_label("Batch").fill("0")
        page.get_by_label("Sequence").fill("1024")
        page.get_by_label("Runtime").select_option("megatron-core")
        page.get_by_role("button", name="Plan").click()
        assert "1" in page.locator("#batch-wrong").inner_text()
        # Browsers note the refused form.
        assert ["422" in error for error in visit.errors] == [True]
        visit.errors.clear()
        assert broken_rules(page) == []
        page.get_by_label("Batch").fill("64")
        page.get_by_role("button", name="Plan").click()
        page.wait_for_url("**/jobs/*")
        assert page.get_by_role("button", name="Cancel").is_visible()
        page.get_by_text("1.00 s").wait_for()
        assert page.locator("#gap").inner_text() == "75.0 %"
        assert page.locator("#best-curve").get_attribute("points") != ""
        assert broken_rules(page) == []
        gate.touch()
        page.wait_for_url("**/plans/*")
        assert page.get_by_role("heading", name="gpt2 on").is_visible()
        captions = page.locator("dl.figures dt").all_inner_texts()
        assert captions == ["Step time", "Throughput", "MFU", "Memory"]
        picture = page.get_by_role("img", name="Stage map").bounding_box()
        assert picture["width"] > 300
        assert picture["x"] + picture["width"] <= width
        assert page.evaluate(WIDTH) <= width
        with page.expect_download() as as_picture:
            page.get_by_role("link", name="Download stage map (picture)").click()
        assert "<svg" in as_picture.value.path().read_text()
        with page.expect_download() as as_json:
            page.get_by_role("link", name="Download stage map (JSON)").click()
        stage_map = json.loads(as_json.value.path().read_text())
        assert stage_map["runtime"] == "megatron-core"
        page.get_by_role("link", name="Change this request").click()
        assert page.get_by_label("Batch").input_value() == "64"
        assert visit.errors == []
        assert all(url.startswith((base, "data:")) for url in visit.requests)


def test_a_rank_under_the_pointer_dims_the_others(
    browser: Any, settings: Settings
) -> None:
    """In the stage map, the memory bars and the timeline alike; leaving the pictures shows all again."""
    with running(settings) as live:
        body = plan_body(job=job(constraints={"pipeline_parallel_degree": 2}))
        plan = live.plan(body).json()
        page = Visit(browser, f"{live.client.base_url}/plans/{plan['id']}").page
        page.locator("#timeline svg").wait_for()
        dimmed = page.locator("[data-ranks='1'].dim")
        shown = page.locator("[data-ranks='0']:not(.dim)")
        page.locator(".replica [data-ranks='0'] rect").first.hover()
        places = (".stage-map .replica", ".stage-map .cluster", ".bars", "#timeline")
        for place in places:
            assert page.locator(f"{place} [data-ranks='1'].dim").count() == 1, place
        assert dimmed.count() == shown.count() == len(places)
        page.locator("h1").hover()
        assert page.locator(".dim").count() == 0


def test_pages_of_a_real_search(
    browser: Any, settings: Settings, tmp_path: Path
) -> None:
    """The stage map is above the fold; the runtime is changed by one button; these are the pictures of the guide.

    `PLANNER_SCREENSHOTS=docs/images` makes them anew.
    """
    folder = Path(os.environ.get("PLANNER_SCREENSHOTS", tmp_path))
    with running(settings) as live:
        question = "model=llama-3.1-8b&devices=16&batch=64&sequence=8192&fix=pp%3D4"
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{live.client.base_url}/?{question}")
        page.get_by_role("button", name="Plan").click()
        page.wait_for_url("**/plans/*", timeout=120_000)
        page.locator("#timeline svg").wait_for()
        picture = page.get_by_role("img", name="Stage map").bounding_box()
        assert picture["y"] + picture["height"] <= 900
        page.screenshot(path=folder / "plan-page.png")
        page.set_viewport_size({"width": 390, "height": 1200})
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=folder / "plan-page-phone.png")
        first = page.url
        page.get_by_label("Use in").select_option("megatron-core")
        page.get_by_role("button", name="Plan for this runtime").click()
        page.wait_for_url(
            lambda url: "/plans/" in url and url != first, timeout=120_000
        )
        assert "with megatron-core." in page.locator("main > p").first.inner_text()
        page.get_by_role("link", name="Compare").click()
        page.get_by_label("Second plan").select_option(first.rpartition("/")[2])
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("Fields that differ").wait_for()
        assert "request.job.runtime" in page.locator("main").inner_text()


def test_copy_copies_the_export(browser: Any, settings: Settings) -> None:
    """The clipboard has the plan in the format of its runtime, or else the plan itself."""
    with running(settings) as live:
        plan = live.plan(plan_body()).json()
        base = str(live.client.base_url)
        context = browser.new_context()
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=base)
        page = context.new_page()
        page.goto(f"{base}/plans/{plan['id']}")
        page.get_by_role("button", name="Copy").click()
        page.get_by_text("Copied.").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert json.loads(copied)["id"] == plan["id"]
        context.close()


def test_a_page_of_the_command_line_stands_alone(
    browser: Any, settings: Settings, tmp_path: Path
) -> None:
    """It loads nothing, and a rank under the pointer dims the others in its three pictures."""
    with running(settings) as live:
        body = plan_body(job=job(constraints={"pipeline_parallel_degree": 2}))
        plan = Plan.model_validate(live.plan(body).json())
    path = tmp_path / "plan.html"
    path.write_text(standalone_page(plan, four_equal_layers()), encoding="utf-8")
    visit = Visit(browser, path.as_uri())
    visit.page.locator(".replica [data-ranks='0'] rect").first.hover()
    assert visit.page.locator("[data-ranks='1'].dim").count() == 4
    assert visit.requests == [path.as_uri()]
    assert visit.errors == []


def test_sliders_are_answered_by_predictions(browser: Any, settings: Settings) -> None:
    """A moved slider shows time, difference and memory of its layout, as the service predicts them; or why not."""
    with running(settings) as live:
        body = plan_body(job=job(constraints={"tensor_parallel_degree": 1}))
        plan = live.plan(body).json()
        visit = Visit(browser, f"{live.client.base_url}/plans/{plan['id']}")
        page, micro_batch = visit.page, plan["layout"]["micro_batch_size"]
        other = 1 if micro_batch != 1 else 2
        slider = page.get_by_label("Micro-batch size")
        slider.evaluate(
            "(input, value) => { input.value = input.dataset.values.split(' ')"
            ".indexOf(value); input.dispatchEvent(new Event('input')); }",
            str(other),
        )
        page.get_by_text("per step (").wait_for()
        layout = plan["layout"] | {"micro_batch_size": other}
        wanted = live.post("/v1/predictions", body | {"layout": layout}).json()
        peak = max(row["peak_bytes"] for row in wanted["prediction"]["memory"])
        answer = page.locator("#answer").inner_text()
        assert f"{peak / 1e9:.1f} GB of" in answer
        assert "fits" in answer
        assert visit.errors == []


def test_axe_finds_nothing_where_nothing_fits(
    browser: Any, settings: Settings, journal: Path
) -> None:
    """The page of a request without a plan breaks no rule either."""
    with running(settings, Unfit(journal)) as live:
        live.plan(plan_body())
        plan_id = live.get("/v1/plans").json()["plans"][0]["id"]
        page = Visit(browser, f"{live.client.base_url}/plans/{plan_id}").page
        assert "no layout fits" in page.locator("h1").inner_text()
        assert broken_rules(page) == []


def test_nothing_for_axe_to_find(
    browser: Any, settings: Settings, journal: Path
) -> None:
    """No page breaks a rule of axe-core, in the light and in the dark, on a desk and on a phone."""
    with running(settings, Rich(journal)) as live:
        ids = [
            live.plan(plan_body(job=job(global_batch_size=size))).json()["id"]
            for size in (8, 16)
        ]
        live.post(f"/v1/plans/{ids[0]}/measurements", measured_run(ids[0]))
        paths = (
            *("/", "/plans", f"/plans/{ids[0]}", "/runs", "/atlas"),
            *(f"/compare?left={ids[0]}&right={ids[1]}", "/models", "/devices"),
            *("/docs", "/problems/not-found", "/?batch=0"),
        )
        for width, scheme in ((1280, "light"), (390, "dark")):
            options = {"viewport": {"width": width, "height": 900}}
            for path in paths:
                address = f"{live.client.base_url}{path}"
                visit = Visit(browser, address, color_scheme=scheme, **options)
                visit.page.evaluate(UNFOLD)
                assert visit.page.evaluate(WIDTH) <= width, path
                assert broken_rules(visit.page) == [], (path, scheme)
                visit.page.close()


def test_markup_in_a_name_stays_text(
    browser: Any, settings: Settings, journal: Path
) -> None:
    """A model that is called like a script is shown so; the browser runs nothing and reports nothing."""
    with running(settings, Rich(journal)) as live:
        plan_id = live.plan(plan_body(four_equal_layers(MARKUP))).json()["id"]
        visit = Visit(browser, f"{live.client.base_url}/plans/{plan_id}")
        assert visit.page.locator("h1").inner_text() == f"{MARKUP} on 1 of 2 devices"
        assert visit.page.locator("script:not([src])").count() == 0
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
