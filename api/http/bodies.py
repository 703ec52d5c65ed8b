"""Request bodies: parsed strictly, validated once, and large ones off the event loop.

A route of class `DocumentRoute` gets its body as the document that its endpoint
declares. Beyond RFC 8259, a body must be UTF-8 without duplicate keys, NaN, lone
surrogates or control characters; text is normalised to NFC.
"""

from __future__ import annotations

import asyncio
import json
import re
import typing
import unicodedata
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from pydantic import BaseModel, RootModel

from planner.api.errors import LimitError, MediaTypeError, ServiceError
from planner.api.http.body_errors import Located, LocatedError, json_pointer, validated
from planner.api.limits import (
    BYTES_PER_VALUE,
    LONGEST_TEXT,
    MOST_DEPTH,
    MOST_KEYS,
    MOST_LARGE_BODIES,
    SMALL_BODY_BYTES,
)
from planner.errors import DocumentError, Problem
from planner.spec.document import Location, path_of

FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except tab and line ends, and lone surrogates."""


class LargeBodies:
    """Admits a few large bodies at a time, so that their memory is bounded."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MOST_LARGE_BODIES)

    async def parse(self, raw: bytes, kind: type[BaseModel]) -> BaseModel:
        """Parse and validate a body; a large one on another thread.

        Raises:
            ServiceError, DocumentError: see `document_of`.
        """
        if len(raw) <= SMALL_BODY_BYTES:
            return document_of(raw, kind)
        async with self._places:
            return await run_in_threadpool(document_of, raw, kind)


class _ParsedRequest(Request):
    """A request whose body has been parsed and validated."""

    document: BaseModel

    async def json(self) -> BaseModel:
        """Return the document, which FastAPI accepts without validating it again."""
        return self.document


class DocumentRoute(APIRoute):
    """A route whose body, if its endpoint declares one, is a document."""

    def get_route_handler(
        self,
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the route, which parses the body first."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind = _body_kind(self.endpoint)

        async def parse_and_handle(request: Request) -> Response:
            parsed = _ParsedRequest(request.scope, request.receive)
            _check_media_type(request)
            large_bodies: LargeBodies = request.app.state.large_bodies
            parsed.document = await large_bodies.parse(await parsed.body(), kind)
            return await handle(parsed)

        return parse_and_handle


def _body_kind(endpoint: Callable[..., Any]) -> type[BaseModel]:
    """The type of the endpoint's parameter `body`."""
    kind: type[BaseModel] = typing.get_type_hints(endpoint)["body"]
    return kind


def _check_media_type(request: Request) -> None:
    """Raise `MediaTypeError` unless the body is JSON."""
    sent = request.headers.get("content-type")
    if sent is None and request.headers.get("content-length", "0") == "0":
        return  # reported as a missing body
    message = Message()
    message["content-type"] = sent or ""
    subtype = message.get_content_subtype()
    is_json = subtype == "json" or subtype.endswith("+json")
    if message.get_content_maintype() == "application" and is_json:
        return
    raise MediaTypeError(
        f"the body was sent as {sent or 'no type'!r}.",
        field="Content-Type",
        hint="send the header Content-Type: application/json.",
        headers={"Accept": "application/json"},
    )


def document_of(raw: bytes, kind: type[BaseModel]) -> BaseModel:
    """Parse and validate a body.

    Args:
        raw: the body.
        kind: a document type, or a root model that chooses one by `kind_of`.

    Raises:
        DocumentError: the body is no JSON.
        LimitError: it has too many values, keys or levels.
        LocatedError: it is no document of this kind.
    """
    data = parsed_json(raw)
    document = validated(kind, data)
    if issubclass(kind, RootModel) and not isinstance(document, kind):
        return kind.model_construct(document)
    return document


def parsed_json(raw: bytes) -> Any:
    """Parse a JSON body strictly.

    Raises:
        DocumentError: it is empty, is no JSON in UTF-8, or has a forbidden character or
            a duplicate key.
        LimitError: it has too many values, keys or levels.
    """
    if not raw:
        raise DocumentError("the request has no body.", hint="send a JSON document.")
    _check_number_of_values(raw)
    try:
        text = unicodedata.normalize("NFC", raw.decode())
        data = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        _refuse(f"{error.msg} (character {error.pos})")
    except UnicodeDecodeError as error:
        _refuse(f"{error.reason} in UTF-8 (byte {error.start})")
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # of this module, or a number of thousands of digits
        _refuse(str(error))
    _check_texts(data, [])
    return data


def _refuse(message: str) -> NoReturn:
    raise DocumentError(
        f"the body is not valid JSON: {message}.", hint="send one JSON document."
    ) from None


def _check_number_of_values(raw: bytes) -> None:
    """Raise `LimitError` for many tiny values: parsed, each needs up to 200 bytes."""
    most = max(len(raw), SMALL_BODY_BYTES) // BYTES_PER_VALUE
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values <= most:
        return
    raise LimitError(
        f"the body has {values} values in {len(raw)} bytes.",
        hint=f"send at most one value per {BYTES_PER_VALUE} bytes.",
        limits={"max_body_values": most},
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values.

    Raises:
        ValueError: a key appears twice.
        LimitError: there are too many keys.
    """
    if len(pairs) > MOST_KEYS:
        raise LimitError(
            f"an object of the body has {len(pairs)} keys, the first {pairs[0][0]!r}.",
            hint=f"send at most {MOST_KEYS} keys in one object.",
            limits={"max_keys": MOST_KEYS},
        )
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_texts(value: Any, location: list[int | str]) -> None:
    """Check every string, including keys, and the depth.

    Raises:
        LimitError: a string is too long, or the value is nested too deeply.
        LocatedError: a string has a forbidden character.
    """
    if isinstance(value, str):
        _check_text(value, location)
        return
    if not isinstance(value, dict | list):
        return
    if len(location) >= MOST_DEPTH:
        raise _too_deep()
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(key, str):
            _check_text(key, location)
        location.append(key)
        _check_texts(item, location)
        location.pop()


def _check_text(text: str, location: list[int | str]) -> None:
    if text.isascii() and text.isprintable() and len(text) <= LONGEST_TEXT:
        return
    place = tuple(location)
    if len(text) > LONGEST_TEXT:
        limit = LimitError(
            "",
            limits={"max_text_characters": LONGEST_TEXT},
        )
        message = f"has {len(text)} characters."
        _refuse_text(place, message, f"send at most {LONGEST_TEXT}.", limit)
    found = FORBIDDEN.search(text)
    if found is not None:
        message = f"has the character {found[0]!r}."
        _refuse_text(place, message, "send text without control characters.")
    if not unicodedata.is_normalized("NFC", text):
        _refuse_text(place, f"is not in NFC: {text[:80]!r}.", "normalise the text.")


def _refuse_text(
    place: Location, message: str, hint: str, cause: ServiceError | None = None
) -> NoReturn:
    located: Located = (Problem(path_of(place), message, hint), json_pointer(place))
    raise LocatedError([located], cause)


def _too_deep() -> LimitError:
    return LimitError(
        f"the body has more than {MOST_DEPTH} levels of nested values.",
        hint=f"send at most {MOST_DEPTH} levels.",
        limits={"max_depth": MOST_DEPTH},
    )
