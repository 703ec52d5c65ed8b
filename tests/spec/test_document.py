"""Reading documents: every mistake is reported once, with field, value and hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from planner.errors import DocumentError, Problem
from planner.spec import (
    SCHEMAS,
    Cluster,
    Job,
    ModelProfile,
    Plan,
    canonical_json,
    digest,
    parse,
    read,
)
from planner.spec.kinds import recognise
from tests.builders import layer, profile
from tests.strategies import models

GROUP: dict[str, Any] = {"device": "a100-sxm4-80gb", "nodes": 1, "devices_per_node": 8}
DEVICE: dict[str, Any] = {"id": "mine", "memory_bytes": 1}


def mistakes(kind: Any, data: Any) -> list[tuple[str, str, str]]:
    """(field, message, hint) of every problem."""
    with pytest.raises(DocumentError) as caught:
        parse(kind, data)
    return [
        (problem.field, problem.message, problem.hint)
        for problem in caught.value.problems
    ]


def test_unknown_field_is_named_with_those_that_are_known() -> None:
    """The problem has its value, and the hint lists the fields of that document."""
    [(field, message, hint)] = mistakes(
        Cluster, {"node_groups": [GROUP | {"nodse": 3}]}
    )
    assert field == "node_groups[0].nodse"
    assert "unknown field (value 3)" in message
    assert "devices_per_node" in hint
    assert "global_batch_size" not in hint


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        ("80 GB", "valid integer", "unit that the field's name ends with"),
        (-4, "greater than 0, got -4", "more than 0"),
        (1.5, "valid integer", "unit that the field's name ends with"),
    ],
)
def test_a_mistake_inside_a_union_is_reported_once(
    value: Any, message: str, hint: str
) -> None:
    """A device is an id or a data sheet; only the wrong field of the sheet is named."""
    [found] = mistakes(
        Cluster, {"node_groups": [GROUP | {"device": DEVICE | {"memory_bytes": value}}]}
    )
    assert found[0] == "node_groups[0].device.memory_bytes"
    assert message in found[1]
    assert hint in found[2]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"min": 5, "max": 2}, "min 5 is above max 2"),
        (1.5, "give true or false, a whole number, a word, named values or a list."),
        ([1, 2.5], "give true or false, a whole number or a word."),
    ],
)
def test_a_value_of_no_type_of_a_union_is_reported_once(value: Any, said: str) -> None:
    """A constraint takes many types; one problem has the rule, or all the types."""
    [found] = mistakes(
        Job, {"global_batch_size": 8, "constraints": {"micro_batch_size": value}}
    )
    assert found[0].startswith("constraints.micro_batch_size")
    assert said in " ".join(found)


@pytest.mark.parametrize("headroom", [1, 5, 100])
def test_a_headroom_in_per_cent_is_no_bytes(headroom: float) -> None:
    """A 5 for 5 % was read as 5 bytes."""
    [found] = mistakes(Job, {"global_batch_size": 8, "memory_headroom": headroom})
    assert found[0] == "memory_headroom"
    assert f"{headroom / 100:g} for {headroom} %" in found[2]


def test_every_mistake_is_reported() -> None:
    """Two mistakes are two problems."""
    assert {field for field, _, _ in mistakes(Job, {"sequence_length": -1})} == {
        "global_batch_size",
        "sequence_length",
    }


def read_problems(kind: Any, path: Path) -> list[Problem]:
    """The problems of a file."""
    with pytest.raises(DocumentError) as caught:
        read(kind, path)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("name", "text", "line", "column"),
    [
        ("job.yaml", "global_batch_size: 8\nsequence_length: 8: 9\n", 2, 19),
        ("job.yaml", "a: [1,\n  2\nb: 3\n", 3, 2),
        ("job.yaml", "a: 1\n\tb: 2\n", 2, 1),
        ("job.yaml", "a: 1\nb: \x07\n", 2, 4),
        ("job.json", '{"a": 1,\n "b": }', 2, 7),
        ("job.toml", "a = 1\nb = \n", 2, 5),
    ],
)
def test_a_syntax_error_names_file_line_and_column(
    tmp_path: Path, name: str, text: str, line: int, column: int
) -> None:
    """The field is the file; the message has the place in it, and the hint the line."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    [problem] = read_problems(Job, path)
    assert problem.field == str(path)
    assert f"line {line}, column {column}: " in problem.message
    assert "unicode string" not in problem.message
    assert f"line {line}" in problem.hint


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"- 1\n- 2\n", b"word"])
def test_a_file_without_fields_is_one_problem(tmp_path: Path, content: bytes) -> None:
    """Binary, empty and list files are named, without a field of the document."""
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    [problem] = read_problems(Job, path)
    assert problem.field == str(path)
    assert problem.hint


def test_values_nested_too_deeply_are_a_document_error(tmp_path: Path) -> None:
    """A text of ten thousand brackets is no crash of the parser."""
    path = tmp_path / "job.json"
    path.write_text("[" * 100_000 + "]" * 100_000, encoding="utf-8")
    [problem] = read_problems(Job, path)
    assert "JSON" in problem.message


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    """The hint names the file of the folder with the nearest name."""
    (tmp_path / "cluster.yaml").write_text("name: c\n", encoding="utf-8")
    [problem] = read_problems(Cluster, tmp_path / "clustr.yaml")
    assert str(tmp_path / "cluster.yaml") in problem.hint


JOB = {"global_batch_size": 8, "sequence_length": 64, "precision": "bf16-mixed"}
LINK = {"latency_seconds": 1e-6, "bandwidth_bytes_per_second": 1e9}


@pytest.mark.parametrize(
    ("wanted", "data", "kinds", "command"),
    [
        ("plan", JOB, ("job", "plan"), "planner plan MODEL --job {path}"),
        (
            "plan",
            {"name": "c", "node_groups": [GROUP]},
            ("cluster", "plan"),
            "planner plan MODEL --cluster {path}",
        ),
        ("job", {"node_groups": [GROUP]}, ("cluster", "job"), "--cluster"),
        ("cluster", JOB, ("job", "cluster"), "--job"),
        ("layout", JOB, ("job", "layout"), "--job"),
        ("plan", {"tensor_parallel_degree": 8}, ("layout", "plan"), "planner plan"),
        ("links", LINK, ("link", "links"), "planner links"),
        ("profile", DEVICE, ("device", "profile"), "planner profile"),
    ],
)
def test_a_document_of_another_kind_is_one_problem(
    tmp_path: Path, wanted: str, data: Any, kinds: tuple[str, str], command: str
) -> None:
    """Both kinds are named, and the hint says what to do with the file."""
    path = tmp_path / "document.json"
    path.write_text(canonical_json(data), encoding="utf-8")
    [problem] = read_problems(SCHEMAS[wanted], path)
    assert problem.field == str(path)
    assert [kind for kind in kinds if kind not in problem.message] == []
    assert command.format(path=path) in problem.hint


@pytest.mark.parametrize("found", sorted(SCHEMAS))
@pytest.mark.parametrize("wanted", sorted(SCHEMAS))
def test_a_document_is_never_of_another_kind_than_its_own(
    wanted: str, found: str
) -> None:
    """The fields of a kind are recognised as that kind, or as none."""
    fields = SCHEMAS[found].model_fields.items()
    data = {field.alias or name: object() for name, field in fields}
    expected = {None} if wanted == found else {found, None}
    assert recognise(data, SCHEMAS[wanted]) in expected


@pytest.mark.parametrize(
    "data",
    [
        {"global_batch_siez": 8},
        {"global_batch_size": -1, "sequence_length": 64},
        {"global_batch_size": 8, "node_groups": []},
        {"anything": 1, "else": 2},
        {},
    ],
)
def test_a_faulty_job_is_still_a_job(data: Any) -> None:
    """Misspelled, wrong and unknown fields are reported as such."""
    assert all("not a job" not in message for _, message, _ in mistakes(Job, data))


def test_a_misspelled_field_gets_a_suggestion() -> None:
    """The hint names the nearest field of that document."""
    found = mistakes(Job, {"global_batch_size": 8, "sequence_lenght": 64})
    [(field, _, hint)] = found
    assert field == "sequence_lenght"
    assert "'sequence_length'" in hint


def test_many_missing_fields_are_one_problem() -> None:
    """A nearly empty plan is one problem that lists what is missing."""
    [(field, message, hint)] = mistakes(Plan, {"id": "x"})
    required = {
        name for name, each in Plan.model_fields.items() if each.is_required()
    } - {"id"}
    assert field == ""
    assert [name for name in required if name not in message] == []
    assert str(len(required)) in message
    assert hint


def test_many_missing_fields_inside_a_document_name_their_place() -> None:
    """The problem's field is the path of the inner document."""
    [(field, message, _)] = mistakes(
        Cluster, {"node_groups": [GROUP | {"device": DEVICE, "intra_node": {}}, {}]}
    )[-1:]
    assert field.startswith("node_groups[1]")
    assert "missing" in message


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"global_batch_size": 8', "is not valid JSON"),
        ("a.json", '{"global_batch_size": NaN}', "NaN is not a JSON number"),
        ("a.yaml", "a: [1", "is not valid YAML"),
        ("a.toml", "a = ", "is not valid TOML"),
    ],
)
def test_corrupted_files_name_their_format(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    """The problem of a file that cannot be parsed names its format."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DocumentError, match=said):
        read(Job, path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A path that leads nowhere is named."""
    with pytest.raises(DocumentError, match="there is no such file"):
        read(Job, tmp_path / "none.json")


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".toml"])
def test_the_same_document_in_every_format(tmp_path: Path, suffix: str) -> None:
    """JSON, YAML and TOML say the same."""
    texts = {
        ".json": '{"global_batch_size": 8, "sequence_length": 64}',
        ".yaml": "global_batch_size: 8\nsequence_length: 64\n",
        ".toml": "global_batch_size = 8\nsequence_length = 64\n",
    }
    path = tmp_path / f"job{suffix}"
    path.write_text(texts[suffix], encoding="utf-8")
    assert read(Job, path) == Job(global_batch_size=8, sequence_length=64)


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    """The hash is of the canonical text."""
    assert canonical_json({"b": 1, "a": [1.5, None]}) == '{"a":[1.5,null],"b":1}'
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})


def test_skip_edges_must_go_forward_and_name_layers() -> None:
    """An edge to an unknown or an earlier layer is refused by name."""
    row = {
        "micro_batch_size": 1,
        "sequence_length": 0,
        "forward_flops": 1,
        "backward_input_flops": 1,
        "backward_weight_flops": 1,
        "activation_bytes": 1,
        "output_bytes": 1,
        "temporary_bytes": 0,
        "source": "counted",
    }
    layers = [
        {"name": name, "kind": "k", "parameters": 1, "measurements": [row]}
        for name in "ab"
    ]
    document = {"model": "m", "device": "counted", "layers": layers}
    for edge, said in (
        ({"from": "a", "to": "c"}, "'c', which is not in layers"),
        ({"from": "b", "to": "a"}, "'b' must come before 'a'"),
    ):
        [(_, message, _)] = mistakes(
            ModelProfile, document | {"edges": [edge | {"bytes": 1}]}
        )
        assert said in message


@settings(max_examples=20)
@given(models())
def test_profiles_write_shared_rows_once(model: ModelProfile) -> None:
    """The text of a profile, joined from its parts, is that of its plain data."""
    rows = {layer.kind: layer.measurements for layer in model.layers}
    layers = tuple(
        layer.model_copy(update={"measurements": rows[layer.kind]})
        for layer in model.layers
    )
    for each in (model, model.model_copy(update={"layers": layers})):
        plain = each.model_dump(mode="json", by_alias=True)
        assert canonical_json(each) == canonical_json(plain)
        assert digest(each) == digest(plain)


def test_profiles_keep_their_ids_without_a_reason_for_whole_sequences() -> None:
    """A newer field of profiles enters the id only if it has a value."""
    plain = profile(layer())
    assert "whole_sequences" not in plain.canonical_json()
    reasoned = plain.model_copy(update={"whole_sequences": "attends to later tokens"})
    assert '"whole_sequences":"attends to later tokens"' in reasoned.canonical_json()
    assert digest(reasoned) != digest(plain)


def test_numbers_that_no_machine_has() -> None:
    """Absurd numbers of bytes and samples are refused; they caused an OverflowError."""
    with pytest.raises(DocumentError, match="global_batch_size"):
        parse(Job, {"global_batch_size": 10**100})
    group = {
        "device": {"id": "mine", "memory_bytes": 10**30},
        "nodes": 1,
        "devices_per_node": 8,
    }
    with pytest.raises(DocumentError, match="memory_bytes"):
        parse(Cluster, {"node_groups": [group]})


def test_fields_are_described() -> None:
    """A field's docstring is its description in the JSON Schema and openapi.json."""
    assert (
        "Samples per optimizer step"
        in Job.model_json_schema()["properties"]["global_batch_size"]["description"]
    )
