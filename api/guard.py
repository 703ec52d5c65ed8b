"""Who may do what: API keys and their scopes, and nothing for pages of other sites.

All is decided here for every path, before a body is read: a new route is closed until this table opens it.

    open to all       GET /healthz, /readyz, /problems/...
    read              every other GET
    plan              every other method: ask, predict, report, cancel
    admin             DELETE of what is stored
"""

from __future__ import annotations

import base64
import binascii
import logging
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Connection

from planner.api.errors import (
    ForbiddenError,
    ForeignSiteError,
    HostError,
    ServiceError,
    UnauthorizedError,
)
from planner.api.hosts import is_own
from planner.api.keys import Key, Scope, find
from planner.api.links import path_within
from planner.api.problems import problem_response

logger = logging.getLogger("planner.api")

OPEN = frozenset({"/healthz", "/readyz"})
OPEN_FOLDER = "/problems/"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
STORED = "/v1/plans/"
CHALLENGES = ("Bearer", "Basic")
"""Bearer for programs; Basic because browsers ask for it by themselves: any user name, the key as password."""


class Guard:
    """Answers 401 without a valid key, 403 for one of too small a scope; without any keys all may do everything.

    421 for a name that is not the service's. Who asks is noted in the connection, for `client_of`.
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
        if method not in SAFE and is_foreign(headers):
            raise ForeignSiteError(
                "the request comes from a page of another site.",
                hint="open the service's own page, and send it there.",
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
                f"{method} {path} needs the scope {needed}, the key {key.name!r} has {key.scope}.",
                field="Authorization",
                hint=f"use a key of scope {needed}.",
            )
        scope["client_name"] = f"key {key.name}"
        if method not in SAFE:
            logger.info(
                "request %s: %s %s by key %s",
                scope["request_id"],
                method,
                path,
                key.name,
            )

    def _check_host(self, host: str) -> None:
        if not is_own(host, self._names):
            raise HostError(
                f"{host!r} is no name of this service.",
                field="Host",
                hint="ask for it by its address or as localhost, or add the name to allowed_hosts of the service.",
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
                hint="send Authorization: Bearer KEY; the planner's own commands take KEY from PLANNER_API_KEY.",
            )
        return key


def client_of(scope: Connection) -> str:
    """Who asks: the name of the key, else the address; behind a proxy on this machine, that of ``X-Forwarded-For``."""
    if "client_name" in scope:
        return str(scope["client_name"])
    client = scope.get("client")
    return f"address {client[0]}" if client else ""


def _private(send: Send) -> Send:
    """Lets only the client itself keep an answer: shared caches would hand it out without a key (RFC 9111, 3.5)."""

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
    """Scope that a request needs; None: it is open to all."""
    if method in SAFE:
        return None if path in OPEN or path.startswith(OPEN_FOLDER) else "read"
    return "admin" if method == "DELETE" and path.startswith(STORED) else "plan"


def presented(authorization: str) -> str:
    """The key in an ``Authorization`` header, Bearer (RFC 6750) or Basic (RFC 7617); empty where there is none."""
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
    """Did a page of another site send it? Browsers tell by ``Sec-Fetch-Site`` or ``Origin``; programs send neither.

    Behind a proxy that changes ``Host``, the proxy's ``X-Forwarded-Host`` counts too; no page can set that.
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
