"""Predicted and measured timelines show every action at its time, in every format."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise

import pytest

from planner.errors import DocumentError, SpecError
from planner.schedule import Durations, HeldBytes, build, simulate
from planner.schedule.timeline import (
    EventKind,
    Timeline,
    TimelineEvent,
    ascii,
    chrome_trace,
    from_measured,
    from_simulation,
    html,
    svg,
)
from planner.schedule.units import Axis, format_seconds
from planner.spec import MeasuredRun

SVG = "{http://www.w3.org/2000/svg}"


def predicted(name: str = "1f1b", **durations: float) -> Timeline:
    """A small step, with everything that can stand in a timeline."""
    schedule = build(name, ranks=2, micro_batches=3)
    times = Durations.uniform(
        schedule.stages,
        **{"forward": 0.1, "backward_input": 0.1, "backward_weight": 0.1, **durations},
    )
    after = [[(EventKind.REDUCE, 0.05), (EventKind.OPTIMIZER, 0.02)]] * 2
    return from_simulation(simulate(schedule, times), after=after)


def measured(actions: list[tuple[int, str, float, float]]) -> MeasuredRun:
    """A run that recorded these actions."""
    keys = ("rank", "action", "start_seconds", "end_seconds")
    return MeasuredRun.model_validate(
        {
            "plan_id": "x",
            "model": "m",
            "devices": "cpu",
            "steps": 1,
            "losses": [1.0],
            "step_seconds": [1.0],
            "median_step_seconds": 1.0,
            "tokens_per_second": 1.0,
            "ranks": [],
            "actions": [dict(zip(keys, action, strict=True)) for action in actions],
        }
    )


def test_simulated_actions_keep_their_times() -> None:
    """Bars are the simulation's events; recompute is cut off the front of the backward."""
    schedule = build("1f1b", ranks=2, micro_batches=3)
    made = simulate(schedule, Durations.uniform(2, recompute=5))
    timeline = from_simulation(made)
    for row, events in zip(timeline.ranks, made.events, strict=True):
        whole = {
            (bar.label, bar.end_seconds)
            for bar in row
            if bar.kind is not EventKind.RECOMPUTE
        }
        assert whole == {(str(event.action), event.end_seconds) for event in events}
        again = [bar for bar in row if bar.kind is EventKind.RECOMPUTE]
        assert [bar.end_seconds - bar.start_seconds for bar in again] == [5, 5, 5]
    assert timeline.step_seconds == made.makespan
    assert timeline.bubble_fraction == pytest.approx(made.bubble_fraction)


def test_transfers_stand_beside_compute() -> None:
    """One for every activation and gradient that changes rank, from its producer's end; they are no work."""
    timeline = predicted(transfer=0.01)
    sent = [
        [bar.label for bar in row if bar.kind is EventKind.TRANSFER]
        for row in timeline.ranks
    ]
    assert [sorted(row) for row in sent] == [
        ["0F0 to stage 1", "0F1 to stage 1", "0F2 to stage 1"],
        ["1B0 to stage 0", "1B1 to stage 0", "1B2 to stage 0"],
    ]
    busy = sum(
        bar.end_seconds - bar.start_seconds
        for row in timeline.ranks
        for bar in row
        if bar.kind is not EventKind.TRANSFER
    )
    assert timeline.bubble_fraction == pytest.approx(
        1 - busy / (2 * timeline.step_seconds)
    )


def test_no_transfer_at_the_turn_of_the_v() -> None:
    """Stages on one rank hand over without one, and weight gradients are not sent."""
    labels = [
        bar.label
        for row in predicted("zb-v", transfer=0.01).ranks
        for bar in row
        if bar.kind is EventKind.TRANSFER
    ]
    assert not any(label.startswith(("1F", "2I")) or "W" in label for label in labels)
    assert len(labels) == 3 * 4


def test_phases_follow_the_last_action() -> None:
    """Reduction, then optimizer, without a gap."""
    row = predicted().ranks[0]
    assert [bar.kind for bar in row[-2:]] == [EventKind.REDUCE, EventKind.OPTIMIZER]
    assert row[-1].start_seconds == row[-2].end_seconds
    assert row[-2].start_seconds == row[-3].end_seconds


def test_measured_rows_are_the_ranks_that_recorded() -> None:
    """Grouped by global rank, in order of time, whatever the order in the file; unknown work is shown as other."""
    run = measured(
        [
            (3, "1B0", 0.5, 0.9),
            (0, "reduce", 0.9, 1.0),
            (3, "1F0", 0.1, 0.4),
            (0, "0F0", 0.0, 0.1),
            (0, "gc", 0.2, 0.3),
        ]
    )
    timeline = from_measured(run)
    assert timeline.rank_names == ("rank 0", "rank 3")
    assert [[(bar.label, bar.kind.value) for bar in row] for row in timeline.ranks] == [
        [("0F0", "F"), ("gc", "other"), ("reduce", "reduce")],
        [("1F0", "F"), ("1B0", "B")],
    ]
    assert timeline.step_seconds == 1.0


def test_measured_waits_have_a_track_of_their_own() -> None:
    """As predicted transfers have: in the trace and in the picture. They are no work, and name whom they waited for."""
    run = measured(
        [
            (0, "0F0", 0.0, 0.2),
            (1, "1F0", 0.5, 0.7),
            (1, "1B0", 0.7, 0.9),
            (0, "0I0", 0.95, 1.0),
        ]
    )
    waits = [(1, "1F0", 0.0, 0.5), (0, "0I0", 0.2, 0.95), (1, "sends", 0.9, 0.95)]
    timeline = from_measured(run.model_copy(update={"waits": measured(waits).actions}))
    told = [
        [bar.label for bar in row if bar.kind is EventKind.WAIT]
        for row in timeline.ranks
    ]
    assert told == [["0I0 waits for stage 1"], ["1F0 waits for stage 0", "sends waits"]]
    assert timeline.bubble_fraction == from_measured(run).bubble_fraction
    trace = chrome_trace([timeline])["traceEvents"]
    assert [event["tid"] for event in trace if event.get("cat") == "wait"] == [1, 1, 1]
    threads = {
        event["args"]["name"] for event in trace if event["name"] == "thread_name"
    }
    assert threads == {"compute", "waits for tensors"}
    picture = svg([timeline])
    assert picture.count("waiting for a tensor") == 1 + len(waits), (
        "in the legend, and over every bar"
    )
    assert (
        ascii([timeline]).splitlines()[1:]
        == ascii([from_measured(run)]).splitlines()[1:]
    )


def test_a_run_without_actions_is_refused() -> None:
    """The error says what to do."""
    with pytest.raises(DocumentError, match="planner run"):
        from_measured(measured([]))


def test_overlapping_events_are_busy_once() -> None:
    """A reduction beside a backward does not make a rank more than busy."""
    timeline = from_measured(
        measured(
            [(0, "0B0", 0.0, 0.6), (0, "reduce", 0.2, 0.5), (0, "optimizer", 0.8, 1.0)]
        )
    )
    assert timeline.bubble_fraction == pytest.approx(0.2)


def test_clocks_that_run_ahead() -> None:
    """An event before the step's start belongs to the step."""
    timeline = from_measured(measured([(0, "0F0", -0.5, 0.0), (0, "0B0", 0.0, 0.5)]))
    assert (timeline.step_seconds, timeline.bubble_fraction) == (1.0, 0.0)
    assert ElementTree.fromstring(svg([timeline])) is not None


def test_chrome_trace_has_every_event_once() -> None:
    """Complete events in microseconds; a process per timeline and rank; transfers on their own thread; valid JSON."""
    first, second = (
        predicted(transfer=0.01),
        from_measured(measured([(0, "0F0", 0.25, 0.5)])),
    )
    trace = json.loads(json.dumps(chrome_trace([first, second])))["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace
        if event["name"] == "process_name"
    }
    assert names == {0: "predicted rank 0", 1: "predicted rank 1", 2: "measured rank 0"}
    bars = [event for event in trace if event["ph"] == "X"]
    assert len(bars) == sum(
        len(row) for timeline in (first, second) for row in timeline.ranks
    )
    assert {event["tid"] for event in bars if event["cat"] == "transfer"} == {1}
    assert {event["tid"] for event in bars if event["cat"] != "transfer"} == {0}
    (last,) = (event for event in bars if event["pid"] == 2)
    assert (last["ts"], last["dur"], last["args"]) == (
        250000,
        250000,
        {"stage": 0, "micro_batch": 0},
    )


def test_bars_of_one_thread_follow_each_other() -> None:
    """As the format asks, also in whole nanoseconds: slow transfers overlap each other, and durations are no fractions
    of powers of two."""
    times = Durations.uniform(
        4,
        forward=1e-3 / 3,
        backward_input=1e-3 / 7,
        backward_weight=1e-3 / 9,
        transfer=1e-3 / 0.7,
    )
    made = simulate(build("1f1b", ranks=4, micro_batches=8), times)
    bars = [
        event
        for event in chrome_trace([from_simulation(made)])["traceEvents"]
        if event["ph"] == "X"
    ]
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for bar in bars:
        start, length = (
            int(bar["ts"] * 1000),
            int(bar["dur"] * 1000),
        )  # as Perfetto reads them
        rows.setdefault((bar["pid"], bar["tid"]), []).append((start, start + length))
    assert all(
        end <= start
        for row in rows.values()
        for (_, end), (start, _) in pairwise(sorted(row))
    )
    assert {bar["tid"] for bar in bars if bar["cat"] == "transfer"} > {1, 2}


def test_svg_draws_every_event_to_scale() -> None:
    """As many bars as events, with hover text; widths in proportion to times; numbers are micro-batches."""
    timeline = predicted()
    root = ElementTree.fromstring(svg([timeline], width=1000))
    bars = {
        str(title.text).partition(":")[0]: bar
        for bar in root.iter(f"{SVG}rect")
        if (title := bar.find(f"{SVG}title")) is not None
    }
    wanted = {bar.label: bar for row in timeline.ranks for bar in row}
    assert set(bars) == set(wanted)
    scale = {
        round(
            float(bars[label].attrib["width"]) / (bar.end_seconds - bar.start_seconds),
            0,
        )
        for label, bar in wanted.items()
    }
    assert len(scale) == 1
    numbers = Counter(
        text.text for text in root.iter(f"{SVG}text") if str(text.text).isdigit()
    )
    assert numbers == {"0": 4, "1": 4, "2": 4}


def test_svg_stays_inside_itself() -> None:
    """No bar and no tick leaves the picture, and nothing is loaded from outside."""
    picture = svg([predicted(transfer=0.01), predicted("zb-v")], width=700)
    root = ElementTree.fromstring(picture)
    height = float(root.attrib["height"])
    for bar in root.iter(f"{SVG}rect"):
        left, top = float(bar.get("x", 0)), float(bar.get("y", 0))
        assert 0 <= left <= left + float(bar.attrib["width"]) <= 700
        assert 0 <= top <= top + float(bar.attrib["height"]) <= height
    assert (
        re.findall(r"(?:href|src)=|https?://(?!www\.w3\.org/2000/svg)", picture) == []
    )


def test_legend_names_what_occurs() -> None:
    """Kinds that are not drawn are not in the legend."""
    words = {
        text.text
        for text in ElementTree.fromstring(svg([predicted()])).iter(f"{SVG}text")
    }
    assert {"forward", "backward", "gradient reduction", "optimizer", "bubble"} <= words
    assert not {"recompute", "transfer", "other"} & words


def test_text_is_escaped() -> None:
    """Titles and labels are data, not markup."""
    evil = "<script>&\"'"
    timeline = Timeline(evil, ((TimelineEvent(evil, EventKind.OTHER, 0, 1),),), (evil,))
    assert "<script>" not in svg([timeline])
    assert "<script>" not in html([timeline], title=evil)
    assert evil in {
        text.text for text in ElementTree.fromstring(svg([timeline])).iter(f"{SVG}text")
    }


def test_page_is_self_contained() -> None:
    """A table row per timeline and the picture, and nothing to load."""
    page = html([predicted(), from_measured(measured([(0, "0F0", 0.0, 0.25)]))])
    assert "<td>predicted</td><td>2</td>" in page
    assert "<td>measured</td><td>1</td><td>250 ms</td><td>0.0%</td>" in page
    assert "<svg " in page
    assert re.findall(r"(?:href|src)=|@import|url\((?!#)", page) == []


def test_terminal_text() -> None:
    """Bars begin with kind and micro-batch, dots are bubbles, all rows have one width."""
    schedule = build("gpipe", ranks=2, micro_batches=2)
    timeline = from_simulation(
        simulate(schedule, Durations.uniform(2, backward_weight=0))
    )
    assert ascii([timeline], width=18).splitlines() == [
        "predicted: 6 s per step, bubble 33.3%",
        "rank 0 |F0-F1-......B0-B1-|",
        "rank 1 |...F0-F1-B0-B1-...|",
    ]


def test_sequence_chunks_are_told_apart() -> None:
    """Units of SeqPipe count chunks; every picture names the micro-batch and its chunk."""
    schedule = build("seqpipe", ranks=1, micro_batches=2, sequence_chunks=2)
    timeline = from_simulation(
        simulate(schedule, Durations.uniform(1, backward_weight=0))
    )
    assert (
        ascii([timeline], width=32).splitlines()[1]
        == "rank 0 |F0.0F0.1B0.1F1.0B0.0F1.1B1.1B1.0|"
    )
    assert ">1.1</text>" in svg([timeline])
    assert "0F3: forward of stage 0, micro-batch 1, sequence chunk 1\n" in svg(
        [timeline]
    )
    arguments = {
        event["name"]: event["args"]
        for event in chrome_trace([timeline])["traceEvents"]
    }
    assert arguments["0F3"] == {"stage": 0, "micro_batch": 1, "sequence_chunk": 1}


def test_terminal_text_of_crowded_rows() -> None:
    """However narrow, every row keeps its width."""
    for line in ascii(
        [predicted("zb-v", transfer=0.01, recompute=0.001)], width=10
    ).splitlines()[1:]:
        assert re.fullmatch(r"rank \d \|.{10}\|", line)


@pytest.mark.parametrize("draw", [svg, html, ascii])
def test_no_timeline_is_refused(draw) -> None:  # type: ignore[no-untyped-def]
    """There is nothing to draw."""
    with pytest.raises(SpecError, match="no timeline"):
        draw([])


def test_empty_timeline_is_drawn() -> None:
    """A step in which nothing takes time is empty, not an error."""
    empty = Timeline("empty", ((), ()))
    assert (empty.step_seconds, empty.bubble_fraction) == (0, 0)
    assert ElementTree.fromstring(svg([empty])) is not None
    assert ascii([empty], width=5).endswith("|.....|")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1, "1 s"),
        (83.25, "83.25 s"),
        (0.1, "100 ms"),
        (1.2345e-3, "1.234 ms"),
        (2e-6, "2 µs"),
        (3e-10, "0.3 ns"),
    ],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    """In the unit that suits."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("seconds", [1e-7, 0.003, 0.9999, 1.0, 7, 33, 86400])
def test_ticks_are_round_and_few(seconds: float) -> None:
    """From five to eleven of them, evenly spaced, inside the axis, starting at the start."""
    ticks = [at for at, _ in Axis(0.0, seconds).ticks()]
    assert ticks[0] == 0
    assert 5 <= len(ticks) <= 11
    assert ticks[-1] <= seconds * (1 + 1e-9)
    assert {text.split()[1] for _, text in Axis(0.0, seconds).ticks()} <= {
        "s",
        "ms",
        "µs",
        "ns",
    }


def test_memory_curves_of_a_simulation() -> None:
    """They count the units that the simulation holds, or bytes where these are given."""
    made = simulate(build("1f1b", ranks=2, micro_batches=3), Durations.uniform(2))
    units = from_simulation(made)
    assert [max(held for _, held in curve) for curve in units.memory] == list(
        made.peak_in_flight
    )
    in_bytes = from_simulation(made, held=HeldBytes((2**30, 2**20)))
    assert [max(held for _, held in curve) for curve in in_bytes.memory] == [
        2 * 2**30,
        2**20,
    ]
    assert "peak 2 GiB" in svg([in_bytes])
    assert "peak 1 MiB" in svg([in_bytes])


def test_memory_curves_of_a_run() -> None:
    """Measured actions tell what is held too: from the start of F to the end of B, or of W."""
    run = measured(
        [
            (0, "0F0", 0.0, 1.0),
            (0, "0F1", 1.0, 2.0),
            (0, "0B0", 2.0, 4.0),
            (0, "0I1", 4.0, 5.0),
        ]
    )
    assert from_measured(run).memory == (((0.0, 1), (1.0, 2), (4.0, 1)),)


def test_curves_stand_under_their_rank() -> None:
    """One per rank, inside the picture, below its bars and above the next rank's."""
    root = ElementTree.fromstring(svg([predicted()]))
    curves = [each for each in root.iter(f"{SVG}path") if each.get("class") == "memory"]
    idle = [
        float(each.get("y", 0))
        for each in root.iter(f"{SVG}rect")
        if each.get("fill") == "url(#idle)"
    ]
    assert len(curves) == 2
    assert "rank 0 holds at most 2 units" in "".join(curves[0].itertext())
    for curve, bars, following in zip(curves, idle, idle[1:], strict=False):
        heights = [float(y) for y in re.findall(r"V([\d.]+)", curve.get("d", ""))]
        assert all(bars + 20 < y < following for y in heights)


def test_predicted_beside_measured_share_the_axis() -> None:
    """Both have their curves, and the later end sets the scale."""
    run = measured([(0, "0F0", 0.0, 1.0), (0, "0B0", 1.0, 9.0)])
    root = ElementTree.fromstring(svg([predicted(), from_measured(run)]))
    assert (
        len([each for each in root.iter(f"{SVG}path") if each.get("class") == "memory"])
        == 3
    )


def test_chrome_trace_counts_what_is_held() -> None:
    """A counter per rank, in microseconds."""
    made = simulate(build("1f1b", ranks=1, micro_batches=1), Durations.uniform(1))
    counters = [
        each
        for each in chrome_trace([from_simulation(made)])["traceEvents"]
        if each["ph"] == "C"
    ]
    assert [(each["ts"], each["args"]) for each in counters] == [
        (0.0, {"units": 1}),
        (3e6, {"units": 0}),
    ]


def test_early_recomputation_is_drawn_before_its_backward() -> None:
    """It starts right after the action before, and the backward follows when its gradient has come."""
    made = simulate(
        build("torchgpipe", ranks=2, micro_batches=2), Durations.uniform(2, recompute=1)
    )
    row = from_simulation(made).ranks[0]
    again = [bar for bar in row if bar.kind is EventKind.RECOMPUTE]
    assert [(bar.label, bar.start_seconds, bar.end_seconds) for bar in again] == [
        ("0B0", 7, 8)
    ]
    assert from_simulation(made).bubble_fraction == pytest.approx(made.bubble_fraction)
