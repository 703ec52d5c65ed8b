"""Pages for people: a plan's, a miss', a job's, the form; each is whole, escaped, and leads on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from planner.api.pages.fields import (
    FIELDS,
    answers_of,
    field_of,
    filled,
    request_of,
)
from planner.api.pages.rendering import web
from planner.api.settings import Settings
from planner.errors import Problem
from planner.export import TARGETS
from planner.profiler.counted import counted_profile
from planner.replan.searches import service_search
from planner.search import make_request
from planner.spec import Cluster, Job, Options, Plan
from planner.spec.calibration import shipped
from tests.api.documents import cluster, four_equal_layers, job, plan_body
from tests.api.fakes import MARKUP, Gated, Instant, Rich, Unfit
from tests.api.live import Live, running, until
from tests.api.proxy import proxied
from tests.api.read_page import Page, read_page
from tests.api.test_plans import measured_run

SettingsOf = Callable[..., Settings]
FORM = {
    "model": "gpt2",
    "devices": "8xa100-sxm4-80gb",
    "batch": "64",
    "sequence": "1024",
    "fix": "tp=1,2; micro_batch_size=..4\nzero_stage=1",
}


def marked_body() -> dict[str, object]:
    """A request with markup wherever words go."""
    body = plan_body(
        four_equal_layers(MARKUP), job=job(constraints={"schedule": MARKUP})
    )
    for layer in body["profile"]["layers"]:
        layer["name"] += MARKUP
    body["profile"]["device"] = body["cluster"]["name"] = MARKUP
    body["cluster"]["node_groups"][0]["name"] = MARKUP
    body["cluster"]["node_groups"][0]["device"]["id"] = MARKUP
    return body


def test_a_request_that_fits_nowhere_can_be_changed(
    settings: Settings, journal: Path
) -> None:
    """The page leads back to the form with the answers that were sent."""
    with running(settings, Unfit(journal)) as live:
        asked: dict[str, object] = {"model": "gpt2", "devices": "2xa100-sxm4-80gb"}
        asked |= {"batch": 32, "sequence": 1024, "runtime": "megatron-core"}
        assert live.plan(asked).status_code == 200
        (row,) = live.get("/v1/plans").json()["plans"]
        page = read_page(live.get(f"/plans/{row['id']}"))
        (change,) = [
            link.attributes["href"]
            for link in page.all("a")
            if link.text == "Change this request"
        ]
        read_page(live.get(change))
        answers = dict(parse_qsl(urlsplit(change).query))
        assert answers["runtime"] == "megatron-core"
        assert post(live, answers) == (303, f"/plans/{row['id']}")


def post(live: Live, answers: dict[str, str]) -> tuple[int, str]:
    """Send the form; the status, and where it leads."""
    answer = live.client.post("/plan", data=answers)
    return answer.status_code, answer.headers.get("location", "")


def test_a_plan_has_a_page_of_all_that_it_says(
    settings: Settings, journal: Path
) -> None:
    """Layout, time, memory, stages, alternatives and the rest stand there, escaped, and every link leads somewhere."""
    with running(settings, Rich(journal)) as live:
        plan_id = live.plan(marked_body()).json()["id"]
        live.post(
            f"/v1/plans/{plan_id}/measurements", measured_run(plan_id, devices=MARKUP)
        )
        page = read_page(live.get(f"/plans/{plan_id}"))
        assert page.all("h1")[0].text == f"{MARKUP} on 1 of 2 devices"
        words = page.all("main")[0].text
        assert "data 1 x tensor 1 x pipeline 1" in words
        assert "Optimal, proven" in words
        assert "left out: context degree (4)" in words
        assert "2.00 per million tokens" in words
        assert f"16 chunks {MARKUP}" in words
        assert words.count(MARKUP) > 8
        for caption, cell in (
            ("Parts of one step", "500 ms"),
            ("Pipeline stages", f"block0{MARKUP} .. block3{MARKUP}"),
            ("best plans of other layouts", f"slower {MARKUP}"),
            ("best plans of other layouts", f"unsupported {MARKUP}"),
            ("best plans of other layouts", "-20.0 %"),
            ("Values that are combined", f"4: too short {MARKUP}"),
            ("Errors of the inputs", "alternative 1 at -23 %"),
            ("Fastest plans by", "1.00 s"),
            ("under relaxed limits", f"4 GiB more {MARKUP}"),
            ("Medians of the steps", "20.0 %"),
            ("other runtimes", next(iter(TARGETS.values())).title),
        ):
            assert cell in page.table(caption), caption
        assert f"/plans/{plan_id}" in read_page(live.get("/")).links()
        assert [
            link
            for link in sorted(set(page.links()))
            if live.get(link).status_code != 200
        ] == []
        assert (
            live.get(f"/v1/plans/{plan_id}", Accept="text/html").json()["id"] == plan_id
        )


def test_targets_that_refuse_the_plan_say_why(
    settings: Settings, journal: Path
) -> None:
    """Every target stands on the page: with a link that works, or with the reason why there is none."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        page = read_page(live.get(f"/plans/{plan_id}"))
        for name in TARGETS:
            url = f"/v1/plans/{plan_id}/exports/{name}"
            assert (live.get(url).status_code == 200) == (url in page.links()), name
        assert page.table("other runtimes").count("not supported: ") == sum(
            f"/v1/plans/{plan_id}/exports/{name}" not in page.links()
            for name in TARGETS
        )


def test_no_plan_has_a_page_too(settings: Settings, journal: Path) -> None:
    """Reasons and nearest misses, by how much each misses; an unproven one says that there may be a plan."""
    with running(settings, Unfit(journal, proven=False)) as live:
        live.plan(plan_body(four_equal_layers(MARKUP)))
        url = live.get("/v1/plans").json()["plans"][0]["url"].removeprefix("/v1")
        page = read_page(live.get(url))
        assert page.all("h1")[0].text == f"{MARKUP} on 2 devices: no layout fits"
        assert "2.1 GB" in page.table("Minimum memory of each layout")
        assert "Fits on 4 GPUs: 1.50 s" in page.all("main")[0].text
        assert "There may be a plan" in page.all("main")[0].text
        assert "no layout fits" in read_page(live.get("/")).table("Plans")


def test_a_form_becomes_the_plan_that_it_asks_for(
    settings: Settings, journal: Path
) -> None:
    """The form's plan is the one of the same document; asked again it is known; its page fills in the form."""
    with running(settings, Instant(journal)) as live:
        status, place = post(live, FORM)
        assert (status, place.startswith("/jobs/")) == (303, True)
        until(lambda: live.get(place).status_code == 303)
        status, plan_page = post(live, FORM)
        assert (status, live.get(place).headers["location"]) == (303, plan_page)
        request = live.get(f"/v1{plan_page}").json()["request"]
        assert request["model"] == "gpt2"
        assert request["job"]["constraints"] == {
            "tensor_parallel_degree": [1, 2],
            "micro_batch_size": {"min": None, "max": 4},
            "zero_stage": 1,
        }
        again = next(
            link
            for link in read_page(live.get(plan_page)).links()
            if link.startswith("/?")
        )
        form = read_page(live.get(again))
        answers = typed(form)
        chosen = [
            found.attributes["value"]
            for found in form.all("option")
            if "selected" in found.attributes
        ]
        assert chosen == [
            *("gpt2", "a100-sxm4-80gb", "planner"),
            *("bf16-mixed", "adamw", "step_time"),
        ]
        assert (answers["devices"], answers["time_limit_seconds"]) == ("8", "60")
        assert "micro_batch_size=..4" in form.all("textarea")[0].text
        assert len(journal.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"devices": "many"}, "mixed", "'many'"),
        ({"devices": "0xh100-sxm5-80gb"}, "devices", "no device"),
        ({"devices": "800000xh100-sxm5-80gb"}, "devices", "800000 devices"),
        ({"devices_per_node": "0"}, "devices_per_node", "at least 1"),
        ({"devices_per_node": "x"}, "devices_per_node", "'x'"),
        ({"batch": ""}, "batch", "missing"),
        ({"sequence": "1e9"}, "sequence", "'1e9'"),
        ({"sequence": "4096"}, "sequence", "1024"),
        ({"precision": MARKUP}, "precision", "'bf16-mixed'"),
        ({"runtime": "megatron"}, "runtime", "megatron-core"),
        ({"price_per_hour": "cheap"}, "price_per_hour", "'cheap'"),
        ({"devices": "8xh1000"}, "device", "h1000"),
        ({"model": MARKUP}, "model", "catalogue"),
        (
            {"objective": "devices"},
            "deadline_seconds",
            "the objective devices needs it",
        ),
        ({"time_limit_seconds": "1e6"}, "time_limit_seconds", "at most"),
        ({"fix": "tensor=2"}, "fix", "tensor_parallel_degree"),
        ({"fix": "zero_stage=9"}, "fix", "zero_stage"),
        ({"fix": f"zero_stage={MARKUP}"}, "fix", "zero_stage"),
    ],
)
def test_mistakes_stand_beside_their_fields(
    form_service: Live, changes: dict[str, str], field: str, words: str
) -> None:
    """A wrong answer comes back as it was typed, with what is wrong and what to write."""
    page = read_page(form_service.client.post("/plan", data=FORM | changes), status=422)
    wrong = {
        found.attributes["id"]: found.text
        for found in page.elements
        if found.attributes.get("class") == "wrong" and "id" in found.attributes
    }
    assert words in wrong[f"{field}-wrong"], wrong
    (control,) = [
        found for found in page.elements if found.attributes.get("id") == field
    ]
    assert control.attributes["aria-invalid"] == "true"
    assert f"{field}-wrong" in control.attributes["aria-describedby"]
    assert typed(page)[field] == filled((FORM | changes).items())[field]


@pytest.fixture(scope="module")
def form_service(tmp_path_factory: pytest.TempPathFactory) -> object:
    """One service for all mistakes."""
    directory = tmp_path_factory.mktemp("forms")
    settings = Settings(port=0, database=directory / "planner.db", spare_solvers=0)
    with running(settings, Instant(directory / "journal")) as live:
        yield live


def typed(page: Page) -> dict[str, str]:
    """What stands in the fields of a form."""
    answers = {
        found.attributes["name"]: found.attributes["value"]
        for found in page.all("input")
    }
    answers |= {found.attributes["name"]: found.text for found in page.all("textarea")}
    selects = [found for found in page.elements if found.name in ("select", "option")]
    name = ""
    for found in selects:
        if found.name == "select":
            name = found.attributes["name"]
        elif "selected" in found.attributes:
            answers[name] = found.attributes["value"]
    return answers


def test_a_form_that_is_none_is_refused(form_service: Live) -> None:
    """Other bodies than a form's are 415; fields in thousands are 422, not work."""
    assert form_service.client.post("/plan", json=FORM).status_code == 415
    many = "&".join(f"batch={number}" for number in range(1000)).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert (
        form_service.client.post("/plan", content=many, headers=headers).status_code
        == 422
    )
    assert (
        form_service.client.post(
            "/plan", content=b"model=%ff%00&batch=%zz", headers=headers
        ).status_code
        == 422
    )


def test_a_job_has_a_page_that_renews_itself_until_it_ends(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """It shows incumbent, bound and gap; once there is a plan it leads there, and then asks no more."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        _, place = post(live, FORM)
        until(lambda: "1.00 s" in live.get(place).text)
        page = read_page(live.get(place))
        refresh = [
            found
            for found in page.all("meta")
            if found.attributes.get("http-equiv") == "refresh"
        ]
        assert [found.attributes["content"] for found in refresh] == ["2"]
        assert all(
            words in page.all("dl")[0].text
            for words in ("1.00 s", "250 ms", "75.0 %", "2 of 10")
        )
        assert page.all("h1")[0].text == "gpt2 on 8 devices: running"
        start = read_page(live.get("/"))
        assert place in start.links()
        assert "gpt2 on 8 devices: running" in start.all("main")[0].text
        (tmp_path / "gate").touch()
        until(lambda: live.get(place).status_code == 303)
        assert live.get(live.get(place).headers["location"]).status_code == 200


def test_the_page_of_a_job_follows_its_events_behind_a_proxy(
    settings_of: SettingsOf, journal: Path, tmp_path: Path
) -> None:
    """Addresses of events, script and button begin with the proxy's prefix."""
    settings = settings_of(root_path="/planner")
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        _, place = post(live, FORM)
        page = read_page(live.get(place.removeprefix("/planner")))
        (progress,) = [
            found for found in page.elements if "data-events" in found.attributes
        ]
        job_id = place.rpartition("/")[2]
        events = progress.attributes["data-events"]
        assert events == f"/planner/v1/jobs/{job_id}/events"
        assert page.all("script")[0].attributes["src"].startswith("/planner/static/")
        (form,) = page.all("form")
        assert form.attributes["action"] == f"/planner/jobs/{job_id}/cancel"


def test_a_job_can_be_cancelled_from_its_page(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """The button ends the solve; the page then offers to ask again, and renews itself no more."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        _, place = post(live, FORM)
        (form,) = read_page(live.get(place)).all("form")
        answer = live.client.post(form.attributes["action"])
        assert (answer.status_code, answer.headers["location"]) == (303, place)
        page = read_page(live.get(place))
        assert "cancelled" in page.all("h1")[0].text
        assert not any("http-equiv" in found.attributes for found in page.all("meta"))
        (again,) = [link for link in page.links() if link.startswith("/?")]
        assert typed(read_page(live.get(again)))["batch"] == "64"


def test_a_full_queue_is_reported_above_the_form(
    settings_of: SettingsOf, journal: Path, tmp_path: Path
) -> None:
    """429 with Retry-After, and the form as it was filled in."""
    with running(
        settings_of(queue_length=0), Gated(journal, tmp_path / "gate")
    ) as live:
        post(live, FORM)
        answer = live.client.post("/plan", data=FORM | {"devices": "16xa100-sxm4-80gb"})
        assert int(answer.headers["retry-after"]) >= 1
        page = read_page(answer, status=429)
        assert "1 jobs are running" in page.all("main")[0].text
        assert typed(page)["devices"] == "16"


def test_browsers_get_pages_for_errors(form_service: Live) -> None:
    """Under a page's path; documents stay documents, whoever asks."""
    page = read_page(
        form_service.get("/plans/<b>none", Accept="text/html,*/*"), status=404
    )
    assert "there is no plan '<b>none'" in page.all("main")[0].text
    assert form_service.get("/plans/none").json()["code"] == "not-found"
    assert (
        form_service.get("/v1/plans/none", Accept="text/html").json()["code"]
        == "not-found"
    )


@pytest.mark.parametrize(
    ("path", "answer"),
    [("/models", "model=llama-3.1-70b"), ("/devices", "device=h100-sxm5-80gb")],
)
def test_catalogues_lead_to_the_form(
    form_service: Live, path: str, answer: str
) -> None:
    """Every entry stands there, and its link fills it in."""
    page = read_page(form_service.get(path))
    listed = form_service.get(f"/v1{path}").json()[path.strip("/")]
    assert len(page.all("tr")) == 1 + len(listed)
    (way,) = [link for link in page.links() if answer in link.split("?")[-1].split("&")]
    assert answer.partition("=")[2] in typed(read_page(form_service.get(way))).values()


def test_old_plans_are_reached_from_the_start(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start page leads to the list of all plans, and that to those before them."""
    monkeypatch.setattr("planner.api.pages.start.LISTED_PLANS", 1)
    with running(settings, Instant(journal)) as live:
        assert "No plans yet" in read_page(live.get("/")).all("main")[0].text
        ids = [
            live.plan(plan_body(job=job(global_batch_size=8 * size))).json()["id"]
            for size in (1, 2)
        ]
        start = read_page(live.get("/")).links()
        assert all(f"/plans/{plan_id}" in start for plan_id in ids)
        first = read_page(live.get("/plans")).links()
        assert f"/plans/{ids[1]}" in first
        assert f"/plans/{ids[0]}" not in first
        (older,) = [link for link in first if link.startswith("/plans?cursor=")]
        assert f"/plans/{ids[0]}" in read_page(live.get(older)).links()


def test_behind_a_proxy_all_links_hold(settings_of: SettingsOf, journal: Path) -> None:
    """Under a prefix that the proxy strips, every link, picture, form and Location leads back through the proxy."""
    with (
        running(
            settings_of(root_path="/planner", allowed_hosts="inside.example"),
            Instant(journal),
        ) as live,
        proxied(live.client, "/planner") as outside,
    ):
        answer = outside.post(
            "/planner/v1/plans", json=plan_body(), headers={"Prefer": "wait=60"}
        )
        plan_id = answer.json()["id"]
        assert outside.get(answer.headers["content-location"]).json()["id"] == plan_id
        made = outside.post(
            f"/planner/v1/plans/{plan_id}/measurements", json=measured_run(plan_id)
        )
        assert made.headers["location"] == made.json()["url"]
        stored = outside.post("/planner/v1/profiles", json=plan_body()["profile"])
        assert stored.headers["location"] == stored.json()["url"]
        host = outside.base_url.netloc.decode()
        (form,) = read_page(outside.get("/planner/plan")).all("form")
        sent = outside.post(
            form.attributes["action"], data=FORM, headers={"Origin": f"http://{host}"}
        )
        until(lambda: outside.get(sent.headers["location"]).status_code == 303)
        pages = [
            read_page(outside.get(f"/planner{path}"))
            for path in ("/", "/plan", "/models", f"/plans/{plan_id}")
        ]
        links = {link for page in pages for link in page.links()}
        links |= {
            found.attributes["src"] for page in pages for found in page.all("img")
        }
        links |= {
            plan["url"] for plan in outside.get("/planner/v1/plans").json()["plans"]
        }
        links |= {
            made.json()["url"],
            stored.json()["url"],
            outside.get(sent.headers["location"]).headers["location"],
        }
        links.add(
            outside.get(sent.headers["location"].replace("/jobs", "/v1/jobs")).json()[
                "plan_url"
            ]
        )
        some = {link for link in links if "?model=" not in link}
        assert [
            link for link in sorted(some) if outside.get(link).status_code != 200
        ] == []
        refused = outside.post(
            form.attributes["action"],
            data=FORM,
            headers={"Origin": "http://elsewhere.example"},
        )
        assert refused.status_code == 403


def test_commands_plan_by_a_service_behind_a_proxy(
    settings_of: SettingsOf,
    journal: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`planner run --planner` follows the job through the prefix to the plan."""
    monkeypatch.setattr("planner.client.flows.LONGEST_WAIT_SECONDS", 0.0)
    gate, settings = (
        tmp_path / "gate",
        settings_of(root_path="/planner", allowed_hosts="inside.example"),
    )
    gate.touch()
    with (
        running(settings, Gated(journal, gate)) as live,
        proxied(live.client, "/planner") as outside,
    ):
        plan = Plan.model_validate(live.plan(plan_body()).json())
        gate.unlink()
        opener = threading.Timer(0.5, gate.touch)
        opener.start()
        found = service_search(plan, str(outside.base_url.join("/planner")))(
            Cluster.model_validate(cluster(devices=4))
        )
        opener.join()
        assert isinstance(found, Plan)
        assert (found.request.cluster.devices, found.id != plan.id) == (4, True)


def test_a_plan_is_made_for_another_runtime(settings: Settings, journal: Path) -> None:
    """The button asks for the same plan with another runtime, and leaves the margin of memory to that runtime."""
    with running(settings, Instant(journal)) as live:
        _, place = post(live, FORM)
        until(lambda: live.get(place).status_code == 303)
        plan_page = live.get(place).headers["location"]
        runtime = f"{plan_page}/runtime"
        refused = live.client.post(runtime, data={"runtime": "megatron"})
        assert (refused.status_code, "megatron-core" in refused.text) == (422, True)
        answer = live.client.post(runtime, data={"runtime": "torchtitan"})
        job_page = answer.headers["location"]
        until(lambda: live.get(job_page).status_code == 303)
        _, wanted = post(live, FORM | {"runtime": "torchtitan"})
        assert live.get(job_page).headers["location"] == wanted
        assert (
            live.client.post(runtime, data={"runtime": "torchtitan"}).headers[
                "location"
            ]
            == wanted
        )


def test_two_plans_are_compared(settings: Settings, journal: Path) -> None:
    """Figures with their difference, the fields that differ and no others, and two stage maps."""
    with running(settings, Instant(journal)) as live:
        ids = [
            live.plan(plan_body(job=job(global_batch_size=size))).json()["id"]
            for size in (8, 16)
        ]
        chosen = read_page(live.get(f"/compare?left={ids[0]}"))
        values = [found.attributes["value"] for found in chosen.all("option")]
        assert set(values) == set(ids)
        page = read_page(live.get(f"/compare?left={ids[0]}&right={ids[1]}"))
        changed = page.table("Fields that differ")
        assert "request.job.global_batch_size" in changed
        assert "sequence_length" not in changed
        titles = [found.text for found in page.all("title")]
        assert "Stage map of the first plan" in titles
        assert "Stage map of the second plan" in titles
        assert "+0.0 %" in page.all("main")[0].text
        same = read_page(live.get(f"/compare?left={ids[0]}&right={ids[0]}"))
        assert "Both plans are equal" in same.all("main")[0].text
        read_page(
            live.get(f"/compare?left={ids[0]}&right=none", Accept="text/html"), 404
        )


def test_measured_runs_stand_beside_their_predictions(
    settings: Settings, journal: Path
) -> None:
    """The page lists every run of every plan with its error, and draws it."""
    with running(settings, Instant(journal)) as live:
        assert "No measured runs yet" in read_page(live.get("/runs")).source
        plan_id = live.plan(plan_body()).json()["id"]
        live.post(f"/v1/plans/{plan_id}/measurements", measured_run(plan_id))
        page = read_page(live.get("/runs"))
        row = page.table("Median measured step")
        error = live.get(f"/v1/plans/{plan_id}/measurements").json()["measurements"]
        assert f"{100 * error[0]['error']:.1f} %" in row
        assert f"/plans/{plan_id}" in page.links()
        assert len(page.all("circle")) == 1


def test_the_atlas_has_the_errors_that_the_calibration_stores(
    form_service: Live,
) -> None:
    """Runs by runtime and architecture, and the interval of held-out runs; it says that the runs are not there."""
    page = read_page(form_service.get("/atlas"))
    table = shipped()
    assert "not part of this release" in page.all("main")[0].text
    rows = page.table("Runs by runtime and architecture")
    counted = table.rows.runtime_architecture
    assert all(name.partition(" x ")[0] in rows for name in counted)
    low = math.exp(table.intervals["runtime"].time.low)
    assert f"{low:.2f}" in page.table("Measured / predicted")


def test_scripts_and_styles_are_files_of_the_service(form_service: Live) -> None:
    """Pages load nothing else; browsers revalidate; the script has at most 200 lines."""
    page = read_page(form_service.get("/"))
    (script,) = page.all("script")
    answer = form_service.get(script.attributes["src"])
    assert answer.headers["content-type"].startswith("text/javascript")
    assert len(answer.text.splitlines()) <= 200
    etag = answer.headers["etag"]
    again = form_service.get(script.attributes["src"], **{"If-None-Match": etag})
    assert again.status_code == 304
    assert form_service.get("/static/other.js").status_code == 404


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("write e.g. 8xa100; see `planner devices`.", "see the page devices."),
        ("assumed (planner links measures them)", "assumed"),
        ("plan with --fix tp=1, or with --fix zero_stage=1", "with zero_stage=1 fixed"),
        ("export with --to deepspeed", "export for deepspeed"),
        ("`planner predict` prices a layout", "POST /v1/predictions prices"),
    ],
)
def test_messages_on_pages_name_no_command(text: str, shown: str) -> None:
    """What the command line would do, a page does another way."""
    found = web(text)
    assert shown in found
    assert "--" not in found
    assert "`planner" not in found


def test_a_mistake_on_the_form_names_no_command(form_service: Live) -> None:
    """The hint of an unknown device leads to the page of devices."""
    page = form_service.client.post("/plan", data=FORM | {"devices": "many"}).text
    assert "page devices" in page
    assert "planner devices" not in page


def test_a_plan_of_few_devices_says_so(settings: Settings, journal: Path) -> None:
    """The heading of a plan that uses one of two devices has both numbers."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        page = read_page(live.get(f"/plans/{plan_id}"))
        assert page.all("h1")[0].text == "four-equal-layers on 1 of 2 devices"


def test_the_defaults_of_the_form_are_a_request() -> None:
    """The form as first shown is a valid request; a problem of a field finds its field."""
    answers = filled([])
    request = request_of(answers)
    assert request.model == "gpt2"
    assert request.cluster.devices == 8
    named = {field.name: field_of(Problem(field.name, ""), answers) for field in FIELDS}
    assert named == {name: name for name in named}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("cluster.node_groups[0].nodes", "devices"),
        ("node_groups[0].price_per_hour", "price_per_hour"),
        ("job.global_batch_size", "batch"),
        ("sequence_length", "sequence"),
        ("job.constraints.zero_stage.min", "fix"),
        ("tensor_parallel_degree", "fix"),
        ("options.time_limit_seconds", "time_limit_seconds"),
        ("elsewhere", ""),
    ],
)
def test_problems_find_their_fields(path: str, field: str) -> None:
    """A problem with the path of a document belongs to the field that it came from."""
    assert field_of(Problem(path, ""), filled([])) == field


def test_requests_without_a_form_fill_in_none() -> None:
    """Inline devices, nodes of several sizes and profiles of clients are not in the form."""
    profile = counted_profile("gpt2", sequence_length=1024, dtype="bf16")
    wanted = Job(global_batch_size=8, sequence_length=1024)
    group = {"device": "a100-sxm4-80gb", "nodes": 1, "devices_per_node": 8}
    half_node = group | {"devices_per_node": 4}
    for groups, model, has_form in (
        ([group], "gpt2", True),
        ([group, group], "gpt2", True),
        ([half_node | {"nodes": 2}], "gpt2", True),
        ([group, half_node | {"nodes": 2}], "gpt2", False),
        ([group], None, False),
    ):
        request = make_request(
            profile,
            Cluster.model_validate({"node_groups": groups}),
            wanted,
            Options(),
            model=model,
        )
        assert (answers_of(request) is not None) == has_form
    inline = make_request(
        profile, Cluster.model_validate(cluster()), wanted, Options(), model="gpt2"
    )
    assert answers_of(inline) is None
