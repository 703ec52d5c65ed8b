"""A client of the planner's own service, for the commands that ask it or tell it something."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException
from typing import IO, Any

from planner.errors import DocumentError, RunError

WAIT_SECONDS = 60.0
"""For which the service is asked to hold a request open, at most; it answers within twice as long, or is not there."""
SCHEMES = ("http://", "https://")
KEY_VARIABLE = "PLANNER_API_KEY"
"""Of the environment: the API key, where the service asks for one. No option: other users would see it."""
REDIRECTS = (301, 302, 303, 307, 308)


class _AsItIs(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would GET where a document was to be posted, and lose it."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        """None: the answer becomes an error."""
        return None


_OPENER = urllib.request.build_opener(_AsItIs)


def check_address(address: str | None, *, option: str) -> None:
    """Refuse what is no address; None is none given.

    Raises:
        DocumentError: naming the option.
    """
    if address is not None and not address.startswith(SCHEMES):
        raise DocumentError(
            f"{address!r} is no address of a service.",
            field=option,
            hint="give http://HOST:PORT.",
        )


def exchange(url: str, body: Any = None, **headers: str) -> tuple[int, Message, Any]:
    """POST a JSON document, or GET where there is none; returns status, headers and the answer: a document, or
    text where it is none.

    Raises:
        RunError: no answer, or a problem document.
    """
    encoded = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(
            url, encoded, {"Content-Type": "application/json", **_key(), **headers}
        )
        with _OPENER.open(request, timeout=2 * WAIT_SECONDS) as response:
            text = response.read().decode()
            is_json = response.headers.get_content_type() == "application/json"
            return (
                response.status,
                response.headers,
                json.loads(text) if is_json else text,
            )
    except urllib.error.HTTPError as error:
        if error.code in REDIRECTS:
            where = error.headers.get("Location")
            raise RunError(
                f"redirects to {where}.",
                field=url,
                hint="give the address of the service itself.",
            ) from None
        raise RunError(f"answered {error.code}: {_detail(error)}", field=url) from None
    except (OSError, ValueError, HTTPException) as error:
        raise RunError(
            f"does not answer: {error}.",
            field=url,
            hint="start it with `planner serve`, or correct the address.",
        ) from None


def _key() -> dict[str, str]:
    """Nothing where there is no key."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def _detail(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
