"""Names that the service goes by, so that no page of another site reads it through a name of its own.

Whoever has a site can point its name at any address, at 127.0.0.1 too (DNS rebinding): the browser of somebody on this
machine then takes the service for that site, and lets the site's pages ask and read. Only the ``Host`` header tells; it
has a name then, never an address. So these are the service's own:

    addresses, `localhost` and `*.localhost`    always
    names of the setting `allowed_hosts`        `*.example.org` for all below, `*` for any
    any name                                    where that is empty, and there are keys, which a page has not, or other
                                                machines may reach the port anyway
"""

from __future__ import annotations

import ipaddress
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

LOCAL = ("localhost", "*.localhost")
ANY = ("*",)


def is_loopback(host: str) -> bool:
    """Only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(allowed_hosts: str, *, host: str, has_keys: bool) -> tuple[str, ...]:
    """Patterns of the service's names: those of the setting, comma-separated, or the default for where it listens."""
    given = tuple(
        name.strip().lower() for name in allowed_hosts.split(",") if name.strip()
    )
    if given:
        return (*LOCAL, *given)
    return LOCAL if is_loopback(host) and not has_keys else ANY


def is_own(header: str, names: tuple[str, ...]) -> bool:
    """Is this ``Host`` header one of the service's? A request without the header comes from no browser."""
    if not header or "*" in names:
        return True
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:  # brackets that hold no address
        return False
    name = name.removesuffix(".")
    return _is_address(name) or any(fnmatchcase(name, pattern) for pattern in names)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
