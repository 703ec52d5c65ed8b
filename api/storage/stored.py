"""Stored documents, which an earlier version may have written by other rules."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from planner.api.errors import OutdatedError

Model = TypeVar("Model", bound=BaseModel)


def read_stored(kind: type[Model], document: str, *, name: str, hint: str) -> Model:
    """Read a stored document.

    Args:
        kind: what it is.
        document: JSON.
        name: what the error calls it.
        hint: how to replace it.

    Raises:
        OutdatedError: this version does not accept it any more.
    """
    try:
        return kind.model_validate_json(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise OutdatedError(
            f"an earlier version stored {name}, which this one refuses: "
            f"{place}: {first['msg']}.",
            hint=hint,
        ) from None
