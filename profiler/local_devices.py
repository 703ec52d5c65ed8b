"""The GPUs of this machine, as a catalogue device and a number, without torch."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterable
from typing import Literal

from planner.errors import DocumentError
from planner.spec import DeviceSpec
from planner.spec.devices import catalogue

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 30.0
MIB = 1 << 20
EXAMPLE = "64xh100-sxm5-80gb"
MEMORY_TOLERANCE = 0.1
"""Relative to the catalogue. Drivers differ by up to 2 %, nvidia-smi reports up to 3 % more than torch, and a GPU with
GDDR memory up to 8 % more without ECC."""

FormFactor = Literal["SXM", "PCIE", "NVL"]
FORM_FACTORS: tuple[FormFactor, ...] = ("SXM", "PCIE", "NVL")


def local_devices(*, field: str = "devices") -> str:
    """This machine's GPUs as ``COUNTxDEVICE``, as nvidia-smi lists them.

    Args:
        field: name of the argument that would replace the look-up, in error messages.

    Raises:
        DocumentError: there is no GPU, or one that the catalogue does not have, or GPUs
            of several kinds.
    """
    gpus = _query()
    if not gpus:
        raise DocumentError(
            "this machine has no NVIDIA GPU to plan for.",
            field=field,
            hint=_hint(field),
        )
    known = [match_catalogue(name, memory_bytes) for name, memory_bytes in gpus]
    ids = {spec.id if spec else "" for spec in known}
    if len(ids) > 1 or "" in ids:
        names = ", ".join(dict.fromkeys(name for name, _ in gpus))
        raise DocumentError(
            f"this machine's GPUs ({names}) are not one device of the catalogue.",
            field=field,
            hint=_hint(field),
        )
    return f"{len(gpus)}x{ids.pop()}"


def _hint(field: str) -> str:
    """How to name devices, spelled as an option of the command line or as an argument of Python."""
    is_option = field.startswith("-")
    example = f"{field} {EXAMPLE}" if is_option else f'{field}="{EXAMPLE}"'
    return f"name the devices to plan for, e.g. {example}; see `planner devices`."


def _query() -> list[tuple[str, int]]:
    """Name and total memory in bytes of every GPU; empty without nvidia-smi or a driver.

    Memory that nvidia-smi does not know (``[N/A]``) is 0, which matches no device.
    """
    try:
        done = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [
        (name, int(mebibytes) * MIB if mebibytes.isdecimal() else 0)
        for name, mebibytes in rows
    ]


def match_catalogue(name: str, memory_bytes: int) -> DeviceSpec | None:
    """The catalogue device that torch calls `name`; of several sizes, the one with this memory. None when unsure.

    >>> match_catalogue("NVIDIA H100 80GB HBM3", 85_000_000_000).id
    'h100-sxm5-80gb'
    """
    words = _words(name)
    form = _form_factor(words)
    # Server GPUs of the SXM form are called by their bare name.
    forms = (None, "SXM") if form is None else (form,)
    fitting = [
        known.spec
        for known in catalogue().values()
        if _model(known.spec.name) in words
        and _form_factor(_words(known.spec.name)) in forms
    ]
    near = [
        spec
        for spec in fitting
        if memory_bytes and abs(spec.memory_bytes / memory_bytes - 1) < MEMORY_TOLERANCE
    ]
    return min(
        near, key=lambda spec: abs(spec.memory_bytes - memory_bytes), default=None
    )


def _words(name: str) -> tuple[str, ...]:
    return tuple(re.split(r"[\s\-()]+", name.upper()))


def _model(name: str) -> str:
    """The first word with a digit: H100, A10G, 4090."""
    return next(
        word for word in _words(name) if any(letter.isdigit() for letter in word)
    )


def _form_factor(words: Iterable[str]) -> FormFactor | None:
    return next(
        (form for form in FORM_FACTORS for word in words if word.startswith(form)), None
    )
