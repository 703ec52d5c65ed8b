"""A port that is named before it is taken, for what cannot take port 0 and tell which one it got."""

from __future__ import annotations

import os
import socket

FIRST, BELOW = 20000, 32768
"""Below those that Linux gives to connections and to port 0: nothing else comes by one of these before it is taken."""


def free_port() -> int:
    """Nobody listens there; processes of this machine begin to look at different ones."""
    places = BELOW - FIRST
    for port in (FIRST + (os.getpid() + step) % places for step in range(places)):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {FIRST} to {BELOW - 1} is free")
