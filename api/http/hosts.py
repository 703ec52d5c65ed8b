"""Host names of the service: protection against DNS rebinding.

The owner of a site can let its name resolve to any address, including 127.0.0.1. A
browser on this machine then treats the service as that site, and pages of the site can
send requests and read the answers. The ``Host`` header of such requests has the name of
the site. Therefore the service accepts these hosts only:

    addresses, `localhost`, `*.localhost`    always
    the names in the setting `allowed_hosts` `*.example.org` for subdomains, `*` for any
    any name                                 if `allowed_hosts` is empty and the service
                                             has API keys or is reachable from other
                                             machines anyway
"""

from __future__ import annotations

import ipaddress
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

LOCAL = ("localhost", "*.localhost")
ANY = ("*",)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(allowed_hosts: str, *, host: str, has_keys: bool) -> tuple[str, ...]:
    """Patterns of accepted host names.

    Args:
        allowed_hosts: the setting, comma-separated; empty: the default.
        host: address that the service listens on.
        has_keys: whether the service requires API keys.
    """
    names = [name.strip().lower() for name in allowed_hosts.split(",")]
    allowed = tuple(name for name in names if name)
    if allowed:
        return (*LOCAL, *allowed)
    return LOCAL if is_loopback(host) and not has_keys else ANY


def is_own(header: str, names: tuple[str, ...]) -> bool:
    """Whether a ``Host`` header is accepted; browsers always send one, so none is too."""
    if not header or "*" in names:
        return True
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:  # brackets without an address
        return False
    name = name.removesuffix(".")
    return _is_address(name) or any(fnmatchcase(name, pattern) for pattern in names)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
