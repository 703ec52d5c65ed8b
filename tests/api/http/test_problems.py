"""Where a mistake stands in a request's body."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.api.http.body_errors import json_pointer


def resolve(pointer: str, document: object) -> object:
    """Follow a JSON pointer, as RFC 6901, section 4 says."""
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        document = document[int(name)] if isinstance(document, list) else document[name]  # type: ignore[index]
    return document


@given(st.lists(st.text() | st.integers(0, 3), max_size=5))
def test_a_pointer_leads_back(path: list[str | int]) -> None:
    """Whatever the names, the pointer of a path finds the value at that path."""
    document: object = "here"
    for part in reversed(path):
        document = (
            {part: document} if isinstance(part, str) else [None] * part + [document]
        )
    assert resolve(json_pointer(tuple(path)), document) == "here"
