"""Limits on requests, besides those that the settings state.

Answers that meet a limit name it in `limits` of their problem document.
"""

from __future__ import annotations

KIBIBYTE = 1 << 10
MEBIBYTE = 1 << 20

MOST_PROBLEMS = 20
"""Problems that one answer lists."""
MOST_KEYS = 1000
"""Keys of one JSON object."""
MOST_DEPTH = 32
"""Levels of nested arrays and objects in a body."""
LONGEST_TEXT = 64 * KIBIBYTE
"""Characters of one string in a body."""
LONGEST_NAME = 200
"""Characters of a stored calibration's name."""
MOST_FITTED_RUNS = 1000
"""Measured runs that the service fits a calibration to; each takes about 0.03 s."""
BYTES_PER_VALUE = 8
"""A body of N bytes may have N / BYTES_PER_VALUE values; real documents have 11."""
SMALL_BODY_BYTES = 64 * KIBIBYTE
"""Larger bodies are parsed and validated off the event loop."""
MOST_LARGE_BODIES = 2
"""Large bodies that are parsed at the same time; others wait."""

DEFAULT_BODY_BYTES = MEBIBYTE
BODY_BYTES = {
    "/v1/profiles": 32 * MEBIBYTE,
    "/v1/plans": 16 * MEBIBYTE,
    "/v1/predictions": 16 * MEBIBYTE,
}
"""Largest body by path; `Settings.max_body_bytes` lowers all of them."""
MEASUREMENT_BODY_BYTES = 8 * MEBIBYTE

HEADER_SECONDS = 10.0
"""From the first byte of a connection, or of a request, to the end of its headers."""
WRITE_SECONDS = 60.0
"""Time for a client to read the part of an answer that has been sent."""
MOST_CONNECTIONS = 512
"""Open connections; above, the one that has waited longest for its client is closed."""
BODY_SECONDS = 20.0
"""From the headers to the end of the body, in addition to its bytes at
`BODY_BYTES_PER_SECOND`."""
BODY_BYTES_PER_SECOND = 50_000


def body_bytes(path: str) -> int:
    """Largest body of a path, in bytes."""
    if path.startswith("/v1/plans/"):
        return MEASUREMENT_BODY_BYTES
    return BODY_BYTES.get(path, DEFAULT_BODY_BYTES)
