"""Reading documents: every mistake is told with its field, its value and its hint, and told once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from planner.errors import DocumentError
from planner.spec import Cluster, Job, ModelProfile, canonical_json, digest, parse, read
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
    """A misspelt field is told with its value, and the fields of that very document are listed."""
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
def test_a_mistake_inside_a_choice_of_types_is_told_once(
    value: Any, message: str, hint: str
) -> None:
    """A device may be an id or a data sheet; of a wrong data sheet only the wrong field is told."""
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
def test_a_value_of_no_type_of_a_choice_is_told_once(value: Any, said: str) -> None:
    """A constraint takes values of many types; of a wrong one a rule's own words are told, else all types at once."""
    [found] = mistakes(
        Job, {"global_batch_size": 8, "constraints": {"micro_batch_size": value}}
    )
    assert found[0].startswith("constraints.micro_batch_size")
    assert said in " ".join(found)


@pytest.mark.parametrize("headroom", [1, 5, 100])
def test_a_headroom_in_per_cent_is_no_bytes(headroom: float) -> None:
    """5 for 5 % was taken for 5 bytes: no headroom at all."""
    [found] = mistakes(Job, {"global_batch_size": 8, "memory_headroom": headroom})
    assert found[0] == "memory_headroom"
    assert f"{headroom} % is {headroom / 100:g}" in found[1]


def test_every_mistake_is_told() -> None:
    """Two mistakes are two problems."""
    assert {field for field, _, _ in mistakes(Job, {"sequence_length": -1})} == {
        "global_batch_size",
        "sequence_length",
    }


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"global_batch_size": 8', "is not valid JSON"),
        ("a.json", '{"global_batch_size": NaN}', "NaN is not a JSON number"),
        ("a.yaml", "a: [1", "is not valid YAML"),
        ("a.toml", "a = ", "is not valid TOML"),
    ],
)
def test_corrupted_files_are_told_by_their_format(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    """A file that cannot be read as its name ends names the format and the place."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DocumentError, match=said):
        read(Job, path)


def test_missing_file_is_told(tmp_path: Path) -> None:
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
        ({"from": "b", "to": "a"}, "'b' must stand before 'a'"),
    ):
        [(_, message, _)] = mistakes(
            ModelProfile, document | {"edges": [edge | {"bytes": 1}]}
        )
        assert said in message


@settings(max_examples=20)
@given(models())
def test_profiles_write_shared_rows_once(model: ModelProfile) -> None:
    """The text of a profile, put together from its parts, is that of its plain data."""
    rows = {layer.kind: layer.measurements for layer in model.layers}
    layers = tuple(
        layer.model_copy(update={"measurements": rows[layer.kind]})
        for layer in model.layers
    )
    for each in (model, model.model_copy(update={"layers": layers})):
        assert canonical_json(each) == canonical_json(
            each.model_dump(mode="json", by_alias=True)
        )


def test_profiles_keep_their_ids_without_a_reason_for_whole_sequences() -> None:
    """A field that profiles did not always have counts where it says something."""
    plain = profile(layer())
    assert "whole_sequences" not in plain.canonical_json()
    told = plain.model_copy(update={"whole_sequences": "attends to later tokens"})
    assert '"whole_sequences":"attends to later tokens"' in told.canonical_json()
    assert digest(told) != digest(plain)


def test_numbers_that_no_machine_has() -> None:
    """Bytes and samples beyond all reason are refused by their field; they ended in an OverflowError."""
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
    """A field's docstring is its description in the JSON Schema, and so in openapi.json."""
    assert (
        "Samples per optimizer step"
        in Job.model_json_schema()["properties"]["global_batch_size"]["description"]
    )
