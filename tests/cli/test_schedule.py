"""`planner schedule` prints the results of the simulator."""

import json
from pathlib import Path

import pytest

from tests.cli.support import Command


def test_contract_of_json(planner: Command) -> None:
    """The keys that outsiders rely on."""
    ended = planner(
        "schedule", "1f1b", "--stages", "4", "--micro-batches", "8", "--json"
    )
    assert ended.code == 0
    assert set(ended.json) == {
        "makespan",
        "span",
        "bubble_fraction",
        "peak_in_flight",
        "actions",
    }
    assert (ended.json["makespan"], ended.json["span"]) == (33, 33)
    assert ended.json["bubble_fraction"] == pytest.approx(9 / 33)
    assert ended.json["peak_in_flight"] == [4, 3, 2, 1]
    assert ended.json["actions"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]


@pytest.mark.parametrize(
    ("name", "micro_batches", "more", "makespan"),
    [
        ("GPipe", 8, (), 33),
        ("torchgpipe", 8, (), 40),
        ("torchgpipe", 8, ("--recompute-mode", "never"), 33),
        ("1f1b-overlap", 8, (), 33),
        ("vpp", 8, ("--virtual", "2"), 57),
        ("seqpipe", 8, ("--sequence-chunks", "2"), 57),
        ("seqvpp", 4, ("--virtual", "2", "--sequence-chunks", "2"), 57),
        ("zb-h1", 8, (), 27),
        ("zb-v", 8, (), 51),
        ("zero-bubble-v", 8, (), 54),
        ("dualpipe", 8, (), 26),
    ],
)
def test_step_times(
    planner: Command,
    name: str,
    micro_batches: int,
    more: tuple[str, ...],
    makespan: int,
) -> None:
    """Unit durations, names of other frameworks, and as few virtual stages as the schedule has."""
    ended = planner(
        "schedule",
        name,
        "--stages",
        "4",
        "--micro-batches",
        str(micro_batches),
        "--json",
        *more,
    )
    assert (ended.code, ended.json["makespan"]) == (0, makespan)


def test_durations_per_stage(planner: Command) -> None:
    """A comma list has one value per stage, for transfers one per boundary."""
    words = (
        "--forward",
        "1,5",
        "--backward-input",
        "2",
        "--backward-weight",
        "0",
        "--transfer",
        "3",
        "--json",
    )
    ended = planner(
        "schedule", "gpipe", "--stages", "2", "--micro-batches", "1", *words
    )
    assert ended.json["makespan"] == 1 + 3 + 5 + 2 + 3 + 2


def test_durations_per_chunk(planner: Command) -> None:
    """With sequence chunks, a list may have a value for each chunk of each stage."""
    words = (
        "--sequence-chunks",
        "2",
        "--forward",
        "1,2",
        "--backward-input",
        "0",
        "--backward-weight",
        "0",
        "--json",
    )
    ended = planner(
        "schedule", "seqpipe", "--stages", "1", "--micro-batches", "3", *words
    )
    assert ended.json["makespan"] == 9


def test_blocking_transfers(planner: Command) -> None:
    """The mode reaches the simulator."""
    words = (
        "schedule",
        "1f1b",
        "--stages",
        "4",
        "--micro-batches",
        "8",
        "--transfer",
        "1",
        "--json",
    )
    assert (
        planner(*words, "--transfer-mode", "blocking").json["makespan"]
        > planner(*words).json["makespan"]
    )


@pytest.mark.parametrize(
    ("option", "values", "says"),
    [
        ("--forward", "1,2,3", "3 values for 4 stages"),
        ("--transfer", "1,2", "2 values for 3 boundaries"),
        ("--overlap", "1", "1f1b: no actions are paired"),
        ("--time-limit", "5", "only the schedule synthesized is searched"),
    ],
)
def test_wrong_lists(planner: Command, option: str, values: str, says: str) -> None:
    """The error names the option or field, and exits with 2."""
    ended = planner(
        "schedule", "1f1b", "--stages", "4", "--micro-batches", "8", option, values
    )
    assert ended.code == 2
    assert says in ended.err
    assert option.removeprefix("--") in ended.err


def test_memory_limit(planner: Command) -> None:
    """Exit 3 when a rank holds more, and say which."""
    words = (
        "schedule",
        "gpipe",
        "--stages",
        "2",
        "--micro-batches",
        "4",
        "--memory-limit",
    )
    assert planner(*words, "4").code == 0
    over = planner(*words, "3")
    assert over.code == 3
    assert "rank 0 holds 4" in over.err


def test_actions_in_the_terminal(planner: Command) -> None:
    """`--actions` lists every rank."""
    ended = planner(
        "schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--actions"
    )
    assert "rank 1: 1F0 1B0 1F1 1B1" in ended.out
    assert (
        "rank"
        not in planner("schedule", "1f1b", "--stages", "2", "--micro-batches", "2").out
    )


def test_comparison(planner: Command) -> None:
    """The same work of every rank, divided among its stages and chunks."""
    names = "gpipe,1f1b,vpp,zb-h1,zb-v,dualpipev"
    ended = planner(
        "schedule",
        "--compare",
        names,
        "--stages",
        "4",
        "--micro-batches",
        "8",
        "--json",
    )
    rows = {row["name"]: row for row in ended.json["schedules"]}
    assert {name: row["makespan"] for name, row in rows.items()} == {
        "gpipe": 33,
        "1f1b": 33,
        "interleaved-1f1b": 28.5,
        "zb-h1": 27,
        "zb-v": 25.5,
        "dualpipev": 27,
    }
    assert max(rows["interleaved-1f1b"]["peak_micro_batches"]) == 5.5
    table = planner(
        "schedule", "--compare", names, "--stages", "4", "--micro-batches", "8"
    ).out
    assert table.splitlines()[2].split()[:2] == ["1f1b", "33"]


def test_comparison_reports_what_is_refused(planner: Command) -> None:
    """A schedule that does not take the numbers, or the memory limit, is left out with its reason."""
    words = ("--stages", "4", "--micro-batches", "5", "--memory-limit", "4")
    ended = planner("schedule", "gpipe", "--compare", "1f1b,zb-h2", *words)
    assert ended.code == 0
    assert [line.split()[0] for line in ended.out.splitlines()[1:]] == ["1f1b"]
    assert "gpipe: holds 5 micro-batches" in ended.err
    assert "zb-h2: zb-h2 on 4 ranks needs" in ended.err


def test_synthesis(planner: Command) -> None:
    """The best order for unequal stages, with its proof."""
    words = (
        "--forward",
        "10,15,10,10",
        "--backward-input",
        "12,18,12,12",
        "--backward-weight",
        "8,12,8,8",
    )
    options = (
        "--stages",
        "4",
        "--micro-batches",
        "8",
        "--transfer",
        "1",
        "--memory-limit",
        "4",
    )
    ended = planner("schedule", "synthesized", *options, *words, "--json")
    assert ended.code == 0
    assert (
        ended.json["makespan"],
        ended.json["lower_bound"],
        ended.json["optimal"],
    ) == (374, 374, True)
    assert max(ended.json["peak_in_flight"]) <= 4
    shown = planner("schedule", "synthesized", *options, *words).out
    assert "proven optimal" in shown
    assert "zb-h1 takes 389" in shown


def test_impossible_synthesis(planner: Command) -> None:
    """No order keeps the limit: exit 3. Transfers that the search does not support, and pairs: exit 2."""
    words = (
        "schedule",
        "synthesized",
        "--stages",
        "2",
        "--micro-batches",
        "4",
        "--virtual",
        "2",
    )
    assert planner(*words, "--memory-limit", "1").code == 3
    assert planner(*words, "--transfer", "1", "--transfer-mode", "queued").code == 2
    assert planner(*words, "--overlap", "1").code == 2


def test_what_is_searched_can_be_chosen(planner: Command) -> None:
    """Objective, placement and sequence chunks reach the search."""
    words = (
        "schedule",
        "synthesized",
        "--stages",
        "2",
        "--micro-batches",
        "4",
        "--json",
    )
    assert planner(*words, "--objective", "span").json["objective"] == "span"
    looped = planner(*words, "--virtual", "2", "--placement", "loop").json
    assert {text[0] for text in looped["actions"][0]} == {"0", "2"}
    assert {
        text[0] for text in planner(*words, "--virtual", "2").json["actions"][0]
    } == {"0", "3"}
    assert planner(*words, "--sequence-chunks", "2").json["makespan"] == 8 * 3 + 1


def test_synthesis_in_a_comparison(planner: Command) -> None:
    """It is compared within the same memory, with its proof."""
    words = (
        "--stages",
        "4",
        "--micro-batches",
        "8",
        "--memory-limit",
        "4",
        "--transfer",
        "1",
    )
    times = (
        "--forward",
        "10,15,10,10",
        "--backward-input",
        "12,18,12,12",
        "--backward-weight",
        "8,12,8,8",
    )
    ended = planner(
        "schedule", "--compare", "zb-h1,synthesized,gpipe", *words, *times, "--json"
    )
    rows = {row["name"]: row for row in ended.json["schedules"]}
    assert {name: row["makespan"] for name, row in rows.items()} == {
        "zb-h1": 389,
        "synthesized": 374,
    }
    assert (rows["synthesized"]["lower_bound"], rows["synthesized"]["optimal"]) == (
        374,
        True,
    )
    assert [row["name"] for row in ended.json["refused"]] == ["gpipe"]
    assert "synthesized: makespan at least 374, gap 0.0 %" in ended.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("torchgpipe", "--recompute", "1", "--recompute-mode", "never"),
            "--recompute: torchgpipe:",
        ),
        (
            ("1f1b", "--recompute-mode", "always"),
            "--recompute-mode: 1f1b: only torchgpipe has it",
        ),
        (
            ("1f1b", "--transfer-mode", "blocking"),
            "--transfer-mode: 1f1b: nothing is sent",
        ),
        (
            ("1f1b", "--objective", "span"),
            "--objective: 1f1b: only the schedule synthesized",
        ),
        (
            ("1f1b", "--placement", "loop"),
            "--placement: 1f1b: only the schedule synthesized",
        ),
        (("1f1b", "--virtual", "2"), "--virtual: 1f1b puts exactly 1 stages"),
        (("1f1b", "--sequence-chunks", "2"), "--sequence-chunks: 1f1b does not cut"),
        (
            ("--compare", "1f1b,gpipe", "--virtual", "2"),
            "--virtual: 1f1b, gpipe: none puts 2 stages",
        ),
        (
            ("--compare", "1f1b,gpipe", "--sequence-chunks", "2"),
            "--sequence-chunks: 1f1b, gpipe: none splits the sequence",
        ),
        (
            ("--compare", "1f1b,gpipe", "--overlap", "1"),
            "--overlap: 1f1b, gpipe: no actions are paired",
        ),
        (
            ("--compare", "1f1b,gpipe", "--recompute-mode", "always"),
            "--recompute-mode: 1f1b, gpipe",
        ),
        (
            ("--compare", "1f1b,gpipe", "--time-limit", "1"),
            "--time-limit: 1f1b, gpipe: only the schedule synthesized",
        ),
        (("--compare", "1f1b", "--virtual", "2"), "--virtual: 1f1b: none puts 2"),
        (
            ("--compare", "1f1b,gpipe", "--actions"),
            "--actions",
        ),
    ],
)
def test_nothing_is_accepted_and_ignored(
    planner: Command, words: tuple[str, ...], says: str
) -> None:
    """An option that would change nothing is refused, with the reason."""
    ended = planner("schedule", *words, "--stages", "4", "--micro-batches", "8")
    assert ended.code == 2
    assert says in ended.err


def test_one_rank_sends_nothing(planner: Command) -> None:
    """One rank has no transfers."""
    ended = planner(
        "schedule", "1f1b", "--stages", "1", "--micro-batches", "8", "--transfer", "1"
    )
    assert (ended.code, "--transfer" in ended.err) == (2, True)


def test_recomputation_inside_the_backward(planner: Command) -> None:
    """What is recomputed delays the gradient: the step of 1F1B has (M + P - 1) recomputations more."""
    words = ("schedule", "1f1b", "--stages", "4", "--micro-batches", "8", "--json")
    assert (
        planner(*words, "--recompute", "1").json["makespan"]
        == planner(*words).json["makespan"] + 11
    )


def test_a_name_or_a_comparison_is_needed(planner: Command) -> None:
    """Neither is a mistake, and so is an unknown name."""
    assert planner("schedule", "--stages", "2", "--micro-batches", "2").code == 2
    unknown = planner("schedule", "2f2b", "--stages", "2", "--micro-batches", "2")
    assert unknown.code == 2
    assert "dualpipe" in unknown.err
    near = planner("schedule", "dulapipe", "--stages", "2", "--micro-batches", "2")
    assert "did you mean 'dualpipe'" in near.err


def test_pairs_save_at_most_what_they_last(planner: Command) -> None:
    """`--overlap` is for schedules with pairs, and is checked."""
    words = (
        "schedule",
        "dualpipev",
        "--stages",
        "4",
        "--micro-batches",
        "8",
        "--json",
        "--overlap",
    )
    assert (
        planner(*words, "0.5").json["makespan"] < planner(*words, "0").json["makespan"]
    )
    ended = planner(*words, "5")
    assert ended.code == 2
    assert "cannot save 5" in ended.err


def test_synthesis_of_too_much(planner: Command) -> None:
    """Refused at once, with the numbers."""
    ended = planner(
        "schedule", "synthesized", "--stages", "64", "--micro-batches", "1024"
    )
    assert ended.code == 2
    assert "196608 actions" in ended.err


def test_pictures(planner: Command, tmp_path: Path) -> None:
    """Every format, for one schedule, for several on one axis, and for the synthesized one."""
    numbers = ("--stages", "2", "--micro-batches", "3")
    assert planner("schedule", "zb-h1", *numbers, "-o", tmp_path / "one.html").code == 0
    assert "zb-h1" in (tmp_path / "one.html").read_text()
    assert (
        planner(
            "schedule", "--compare", "gpipe,1f1b", *numbers, "-o", tmp_path / "both.svg"
        ).code
        == 0
    )
    assert (tmp_path / "both.svg").read_text().count('class="memory"') == 4
    ended = planner(
        "schedule", "synthesized", *numbers, "--json", "-o", tmp_path / "best.json"
    )
    assert ended.json["optimal"]
    names = {
        each["name"]
        for each in json.loads((tmp_path / "best.json").read_text())["traceEvents"]
    }
    assert {"0F0", "1W2"} <= names


def test_picture_in_the_terminal(planner: Command) -> None:
    """`--ascii` follows the figures."""
    words = ("schedule", "gpipe", "--stages", "2", "--micro-batches", "2", "--ascii")
    lines = planner(*words).out.splitlines()
    assert lines[5] == "gpipe: 9 s per step, bubble 33.3%"
    assert lines[6].startswith("rank 0 |F0-")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ascii", "--json"), "--ascii: cannot be combined with --json"),
        (("-o", "-"), "--output: must name a file"),
        (("-o", "out.png"), "is not a picture format"),
    ],
)
def test_what_is_not_drawn(planner: Command, words: tuple[str, ...], says: str) -> None:
    """Refused before anything is simulated."""
    ended = planner(
        "schedule", "gpipe", "--stages", "2", "--micro-batches", "2", *words
    )
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err
