"""Access control: API keys with scopes, and no requests from pages of other sites.

Every request is checked here before its body is read, so that a new route is never open
by mistake.

    no key    GET /healthz, /readyz, /problems/...
    read      every other GET
    plan      every other method: plan, predict, report, cancel
    admin     DELETE of stored plans and calibrations
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Connection

from planner.api.errors import (
    ForbiddenError,
    ForeignSiteError,
    HostError,
    NotFoundError,
    ServiceError,
    UnauthorizedError,
)
from planner.api.http.hosts import is_own
from planner.api.http.keys import Key, Scope, find
from planner.api.http.links import path_within
from planner.api.http.problems import problem_response

logger = logging.getLogger("planner.api")

OPEN = frozenset({"/healthz", "/readyz"})
OPEN_FOLDER = "/problems/"
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
"""Characters that no path has; they could forge lines of the log."""
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
STORED = ("/v1/plans/", "/v1/calibrations/")
CHALLENGES = ("Bearer", "Basic")
"""Bearer for programs; Basic for browsers, with any user name and the key as password."""


class Guard:
    """Middleware that answers 401, 403 or 421 to requests that are not allowed.

    Without any keys in the settings, every request is allowed. The name of the client is
    stored in the connection for `client_of`.
    """

    def __init__(
        self, app: ASGIApp, keys: tuple[Key, ...], names: tuple[str, ...]
    ) -> None:
        self._app = app
        self._keys = keys
        self._names = names

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope, Headers(scope=scope))
        except ServiceError as error:
            response = problem_response(Request(scope), error)
            if isinstance(error, UnauthorizedError):
                for challenge in CHALLENGES:
                    response.headers.append(
                        "WWW-Authenticate", f'{challenge} realm="planner"'
                    )
            await response(scope, receive, send)
            return
        await self._app(scope, receive, _private(send) if self._keys else send)

    def _check(self, scope: Connection, headers: Headers) -> None:
        method, path = scope["method"], path_within(scope)
        if CONTROL.search(path):
            raise NotFoundError(f"no such path: {path!r}.", hint="see /docs.")
        if method not in SAFE and is_foreign(headers):
            raise ForeignSiteError(
                "the request comes from a page of another site.",
                hint="send it from a page of this service.",
            )
        needed = needed_scope(method, path)
        if needed is None:
            return
        self._check_host(headers.get("host", ""))
        if not self._keys:
            return
        key = self._key_of(headers)
        if not key.allows(needed):
            raise ForbiddenError(
                f"{method} {path} requires the scope {needed}, "
                f"but the key {key.name!r} has the scope {key.scope}.",
                field="Authorization",
                hint=f"use a key with the scope {needed}.",
            )
        scope["client_name"] = f"key {key.name}"
        if method not in SAFE:
            logger.info(
                "request %s: %s %r by key %s",
                scope["request_id"],
                method,
                path,
                key.name,
            )

    def _check_host(self, host: str) -> None:
        if not is_own(host, self._names):
            raise HostError(
                f"{host!r} is not a name of this service.",
                field="Host",
                hint="use its address or localhost, or add the name to allowed_hosts.",
            )

    def _key_of(self, headers: Headers) -> Key:
        secret = presented(headers.get("authorization", ""))
        key = find(self._keys, secret) if secret else None
        if key is None:
            raise UnauthorizedError(
                "the request has no valid API key."
                if secret
                else "the request has no API key.",
                field="Authorization",
                hint="send Authorization: Bearer KEY; "
                "planner commands read KEY from PLANNER_API_KEY.",
            )
        return key


def client_of(scope: Connection) -> str:
    """Name of the client: of its API key, else its address.

    Behind a proxy on this machine the address is that of ``X-Forwarded-For``.
    """
    if "client_name" in scope:
        return str(scope["client_name"])
    client = scope.get("client")
    return f"address {client[0]}" if client else ""


def _private(send: Send) -> Send:
    """Allow only private caches: a shared one would answer without a key (RFC 9111, 3.5)."""

    async def send_private(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Cache-Control"] = headers.get("Cache-Control", "no-cache").replace(
                "public", "private"
            )
            headers.add_vary_header("Authorization")
        await send(message)

    return send_private


def needed_scope(method: str, path: str) -> Scope | None:
    """Scope that a request requires; None: no key."""
    if method in SAFE:
        return None if path in OPEN or path.startswith(OPEN_FOLDER) else "read"
    return "admin" if method == "DELETE" and path.startswith(STORED) else "plan"


def presented(authorization: str) -> str:
    """The key in an ``Authorization`` header: Bearer (RFC 6750) or Basic (RFC 7617).

    Empty if there is none.
    """
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def is_foreign(headers: Headers) -> bool:
    """Whether a page of another site sent the request.

    Browsers send ``Sec-Fetch-Site`` or ``Origin``; programs send neither. Behind a proxy
    that changes ``Host``, the proxy's ``X-Forwarded-Host`` counts too: pages cannot set it.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    if origin is None:
        return False
    return urlsplit(origin).netloc not in (
        headers.get("host"),
        headers.get("x-forwarded-host"),
    )
