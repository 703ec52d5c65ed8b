"""`planner init`: write the documents of a planning request, to edit and keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from planner.cli.console import data, to_json, write
from planner.cli.failures import DONE
from planner.cli.inputs import fix_option, read_question, request_options
from planner.cli.options import option, verb
from planner.errors import DocumentError
from planner.profiler.resolve import Question
from planner.spec import Document

HEADERS = {
    "cluster": "The devices to plan for. `planner devices` lists the catalogue; `planner "
    "links` measures links.",
    "job": "What is to be trained. `planner schema job` describes every field.",
}


@verb("init", json_help="Print the paths as JSON")
@request_options
@fix_option
@option(
    "--directory",
    "-d",
    default=".",
    metavar="DIR",
    help="Folder of the documents",
)
@option("--overwrite", is_flag=True, help="Replace documents that exist")
def command(
    fixed: tuple[str, ...],
    directory: str,
    overwrite: bool,
    as_json: bool,
    **request: Any,
) -> int:
    """Write cluster.yaml, job.yaml and, unless MODEL is a catalogue name, profile.json.

    The documents stand for the same request as the options, and give the same plan.
    """
    question = read_question(fixed=fixed, **request)
    folder = Path(directory)
    texts = _documents(question)
    if not overwrite:
        _check_free(folder, texts)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write(str(folder / name), text)
    paths = {Path(name).stem: str(folder / name) for name in texts}
    if as_json:
        data(to_json({"model": question.model, **paths}))
    else:
        data(f"Next: {_next_command(question, paths)}")
    return DONE


def _documents(question: Question) -> dict[str, str]:
    texts = {
        "cluster.yaml": _yaml("cluster", question.cluster),
        "job.yaml": _yaml("job", question.job),
    }
    if question.model is None:
        texts["profile.json"] = to_json(question.profile)
    return texts


def _yaml(name: str, document: Document) -> str:
    """A document as YAML; fields without a value are left out."""
    fields = document.model_dump(mode="json", by_alias=True, exclude_none=True)
    text = yaml.safe_dump(fields, sort_keys=False, width=88)
    return f"# {HEADERS[name]}\n{text}".rstrip("\n")


def _check_free(folder: Path, names: dict[str, str]) -> None:
    """Refuse to replace documents that exist."""
    for name in names:
        if (folder / name).exists():
            raise DocumentError(
                "exists.",
                field=str(folder / name),
                hint="choose another --directory, or pass --overwrite.",
            )


def _next_command(question: Question, paths: dict[str, str]) -> str:
    model = question.model or f"--profile {paths['profile']}"
    return f"planner plan {model} --cluster {paths['cluster']} --job {paths['job']}"
