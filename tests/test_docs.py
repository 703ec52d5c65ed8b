"""The documentation: commands parse, links work, pages are short, and outputs are real."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from docs.generate import out_of_date, pictures, reference
from docs.outputs import (
    Shown,
    console_blocks,
    folder_of,
    is_repeatable,
    missing_line,
    run,
)
from planner.api.documents import CalibrationCreate, PlanCreate
from planner.api.http.bodies import document_of
from planner.cli.main import VERBS
from planner.spec import Job, read
from planner.spec.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
WRITTEN = sorted({*DOCS.rglob("*.md")} - {*REFERENCE})
"""Pages that people write; the reference is generated."""
PAGES = [*sorted(ROOT.glob("*.md")), *WRITTEN, *REFERENCE]

MOST_PAGES = 24
MOST_WORDS = 1500
MOST_LINES_OF_README = 90

RUN_AGAIN = [
    "README.md",
    "docs/guides/deploy.md",
    "docs/guides/elastic.md",
    "docs/guides/fine-tune.md",
    "docs/guides/first-plan.md",
    "docs/guides/megatron-lm.md",
    "docs/guides/other-frameworks.md",
    "docs/guides/torchtitan.md",
    "docs/guides/your-model.md",
    "docs/concepts/reading-a-plan.md",
    "docs/concepts/schedules.md",
    "docs/concepts/unlike-devices.md",
]
"""Pages that show what their commands print."""
PYTHON_RUNS = ["README.md", "docs/guides/first-plan.md"]
"""Pages whose Python blocks run as they are."""

MADE_BY_COMMANDS = {
    "calibration.json",
    "cluster.yaml",
    "config.json",
    "device.json",
    "job.yaml",
    "links.json",
    "measured.json",
    "plan.json",
    "profile.json",
    "trace.json",
    "train.yaml",
}
OPTIONS_OF_OTHERS = {
    # Megatron-LM
    "--expert-tensor-parallel-size",
    "--num-distributed-optimizer-instances",
    "--moe-grouped-gemm",
    "--pipeline-model-parallel-layout",
    "--recompute-modules",
    "--use-distributed-optimizer",
    # torchrun, Slurm, torchtitan
    "--node-rank",
    "--partition",
    "--constraint",
    "--config",
}
"""Options of other programs that sentences name."""

WORDS_TO_AVOID = re.compile(
    r"\b(mends?|told|tells|wish|wishes|wished|dealt|dealing|contenders?|leanest|"
    r"twins?|roster|rivals|struck|remed(?:y|ies)|alike|standings|contest|tally|"
    r"likewise|theirs|whoever)\b",
    re.IGNORECASE,
)
MENTIONS_OF_THE_ALIAS = {"CHANGELOG.md": ["mend"], "docs/reference/http.md": ["mend"]}


def name_of(page: Path) -> str:
    """Return the path of a page as tests print it."""
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    """Return the text of a page."""
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, text_of(page), re.MULTILINE | re.DOTALL)


def prose_of(page: Path) -> str:
    """Return the text of a page outside of code blocks."""
    pattern = r"^```.*?^```"
    return re.sub(pattern, "", text_of(page), flags=re.MULTILINE | re.DOTALL)


# Limits


def test_there_are_few_pages() -> None:
    """People write at most 24 pages."""
    assert len(WRITTEN) <= MOST_PAGES


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_pages_are_short(page: Path) -> None:
    """A page has at most 1,500 words, its tables and outputs included."""
    words = [word for word in text_of(page).split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS


def test_readme_is_short() -> None:
    """The README has at most 90 lines."""
    assert len(text_of(ROOT / "README.md").splitlines()) <= MOST_LINES_OF_README


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_use_standard_terms(page: Path) -> None:
    """No page uses a word that the field has a better one for, but for the alias."""
    found = [match[0].lower() for match in WORDS_TO_AVOID.finditer(text_of(page))]
    assert found == MENTIONS_OF_THE_ALIAS.get(name_of(page), [])


# Links


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_work(page: Path) -> None:
    """Every relative link names a file that exists, and a heading that it has."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose_of(page)):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors_of(linked), target


def test_every_page_is_linked_from_the_index() -> None:
    """No page of the docs is an orphan."""
    index = DOCS / "index.md"
    targets = re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", text_of(index))
    linked = {(DOCS / target).resolve() for target in targets}
    assert {*WRITTEN, *REFERENCE} - {index} <= linked


# Generated files


def test_the_reference_is_up_to_date() -> None:
    """The committed reference is what `make docs` writes."""
    assert out_of_date(reference()) == []


def test_the_pictures_are_up_to_date() -> None:
    """The committed pictures are what `make docs` draws."""
    assert out_of_date(pictures()) == []


def test_every_picture_is_shown() -> None:
    """Every picture is shown by a page."""
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text_of(page))
    }
    assert shown == {*(DOCS / "images").iterdir()}


# Commands


def shown_by(page: Path) -> list[list[Shown]]:
    """Return the commands of a page by console block."""
    return console_blocks(text_of(page))


def planner_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every `planner` command of a page, without `planner`."""
    for block in shown_by(page):
        for command in block:
            if command.words[0] == "planner":
                yield command.words[1:]


def command_of(verb: str) -> click.Command:
    """Return the Click command of a verb."""
    command: click.Command = importlib.import_module(f"planner.cli.{verb}").command
    return command


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse(page: Path) -> None:
    """Every command is read without an error, and files that it names exist."""
    for verb, *words in planner_commands(page):
        context = command_of(verb).make_context(verb, list(words))
        values = [value for value in context.params.values() if isinstance(value, str)]
        for value in values:
            if re.search(r"\.(yaml|json)$", value):
                is_made = Path(value).name in MADE_BY_COMMANDS
                assert is_made or (ROOT / value).is_file(), value


def options_of(verb: str) -> set[str]:
    """Return every option of a command."""
    command = command_of(verb)
    parameters = command.get_params(click.Context(command))
    return {name for parameter in parameters for name in parameter.opts}


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_options_in_sentences_are_options(page: Path) -> None:
    """An option in a sentence is one of the command beside it, or of some command."""
    benchmarks = "".join(text_of(path) for path in (ROOT / "benchmarks").glob("*.py"))
    known = {*re.findall(r'"(--[a-z][a-z0-9-]*)"', benchmarks), *OPTIONS_OF_OTHERS}
    for verb in VERBS:
        known |= options_of(verb)
    for span in re.findall(r"`([^`\n]+)`", prose_of(page)):
        if "python -m" in span:
            continue
        named = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", span))
        words = span.split()
        is_command = words[0] == "planner" and words[1:2] and words[1] in VERBS
        assert named <= (options_of(words[1]) if is_command else known), span


@pytest.mark.parametrize("page", RUN_AGAIN)
def test_outputs_are_real(page: str, tmp_path: Path) -> None:
    """Commands of a page print the lines shown below them, in that order.

    `python -m docs.outputs` writes what they print today.
    """
    blocks = [block for block in shown_by(ROOT / page) if is_repeatable(block)]
    assert blocks
    with folder_of(ROOT / page, tmp_path):
        for command in [command for block in blocks for command in block]:
            out, err = run(command.words)
            assert missing_line(command, err + out) is None, command.text


# Code and documents


@pytest.mark.parametrize("page", PYTHON_RUNS)
def test_python_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Python of a page runs as it is printed."""
    monkeypatch.chdir(tmp_path)
    examples = blocks(ROOT / page, "python")
    assert examples
    for code in examples:
        exec(compile(code, page, "exec"), {"__name__": "__main__"})


def test_documents_in_the_text_are_valid(tmp_path: Path) -> None:
    """The job of the first guide and the device of the examples can be read."""
    (job,) = blocks(DOCS / "guides" / "first-plan.md", "yaml")
    (tmp_path / "job.yaml").write_text(job, encoding="utf-8")
    assert read(Job, tmp_path / "job.yaml").objective == "devices"
    shutil.copy(ROOT / "examples" / "device.yaml", tmp_path)
    cluster = "node_groups:\n  - {device: device.yaml, nodes: 1, devices_per_node: 8}\n"
    (tmp_path / "cluster.yaml").write_text(cluster, encoding="utf-8")
    assert read_cluster(tmp_path / "cluster.yaml").devices == 8


KIND_OF_BODY = {"/v1/plans": PlanCreate, "/v1/calibrations": CalibrationCreate}


@pytest.mark.parametrize("page", ["README.md", "docs/guides/serve.md"])
def test_bodies_of_requests_are_valid(page: str) -> None:
    """The service reads every JSON body on the page."""
    text = text_of(ROOT / page)
    sent = 0
    for command in text.split("curl ")[1:]:
        body = re.search(r"-d '(\{.*?\})'", command, re.DOTALL)
        path = re.search(r"(/v1/[\w-]+)\s", command)
        if body is not None and path is not None:
            document_of(body[1].encode(), KIND_OF_BODY[path[1]])
            sent += 1
    assert sent
    for body in re.finditer(
        r"^```text\n(\{.*?\})\n```", text, re.MULTILINE | re.DOTALL
    ):
        document_of(body[1].encode(), PlanCreate)
