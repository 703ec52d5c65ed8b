"""One HTTP request to the planner's service, and its errors."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import IO, Any, NamedTuple

from planner.errors import DocumentError, RunError

WAIT_SECONDS = 60.0
"""Longest wait that a request asks for. The connection times out after twice as long."""
SCHEMES = ("http://", "https://")
KEY_VARIABLE = "PLANNER_API_KEY"
"""Environment variable with the API key, if the service needs one.

There is no command-line option for the key: other users of the machine would see it.
"""
REDIRECTS = (301, 302, 303, 307, 308)
LONGEST_DETAIL = 500
"""Characters of an error page that an error message quotes."""


class Response(NamedTuple):
    """What the service answered."""

    status: int
    headers: Message
    body: Any
    """A JSON document; text if the response is not JSON."""


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Turn a redirect into an error: urllib would repeat a POST as a GET without its body."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return None, which makes urllib raise `HTTPError`."""
        return None


_OPENER = urllib.request.build_opener(_RefuseRedirects)


def check_address(address: str | None, *, option: str) -> None:
    """Refuse an address that is not a URL of the web; accept None.

    Args:
        address: of the service.
        option: that the address was passed with, for the error message.

    Raises:
        DocumentError: naming the option.
    """
    if address is None or address.startswith(SCHEMES):
        return
    raise DocumentError(
        f"{address!r} is not the address of a service.",
        field=option,
        hint="pass http://HOST:PORT.",
    )


def exchange(url: str, body: Any = None, **headers: str) -> Response:
    """POST a JSON document, or GET if there is no body, and return the response.

    Raises:
        RunError: no response, or the response is an error.
    """
    encoded = None if body is None else json.dumps(body).encode()
    sent_headers = {"Content-Type": "application/json", **_authorization(), **headers}
    try:
        request = urllib.request.Request(url, encoded, sent_headers)
        with _OPENER.open(request, timeout=2 * WAIT_SECONDS) as response:
            return _read(response)
    except urllib.error.HTTPError as error:
        raise _error_of(error, url) from None
    except (OSError, ValueError, HTTPException) as error:
        raise RunError(
            f"does not answer: {error}.",
            field=url,
            hint="start the service with `planner serve`, or correct the address.",
        ) from None


def _read(response: HTTPResponse) -> Response:
    text = response.read().decode()
    is_json = response.headers.get_content_type() == "application/json"
    body = json.loads(text) if is_json else text
    return Response(response.status, response.headers, body)


def _error_of(error: urllib.error.HTTPError, url: str) -> RunError:
    if error.code in REDIRECTS:
        return RunError(
            f"redirects to {error.headers.get('Location')}.",
            field=url,
            hint="pass the address of the service itself.",
        )
    return RunError(f"answered {error.code}: {_detail(error)}", field=url)


def _authorization() -> dict[str, str]:
    """The header with the API key; empty if there is no key."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def _detail(error: urllib.error.HTTPError) -> str:
    """The detail of a problem document; of any other response, its first characters."""
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return text[:LONGEST_DETAIL]
