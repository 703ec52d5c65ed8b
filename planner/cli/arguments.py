"""Options shared by several verbs, and the types of their values; a wrong value says what is right."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from typing import Any

from planner.errors import DocumentError

SECONDS_HINT = "give plain seconds, without a unit, e.g. 30"


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, least=1)


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, least=0)


def positive_ints(text: str) -> tuple[int, ...]:
    """``1,2,4`` -> (1, 2, 4), each at least 1, in rising order, none twice."""
    return tuple(sorted({_whole(part, least=1) for part in text.split(",")}))


def module_names(text: str) -> tuple[str, ...]:
    """``encoder.layer.*,head`` -> the names, none empty."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(all(name.split(".")) for name in names):
        raise argparse.ArgumentTypeError(
            f"{text!r} holds an empty name; give qualified names, e.g. encoder.layer.*"
        )
    return names


def positive_seconds(text: str) -> float:
    """A finite number of seconds above 0."""
    value = _number(text, SECONDS_HINT)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0; {SECONDS_HINT}")
    return value


def positive_number(text: str) -> float:
    """A finite number above 0."""
    value = _number(text, "give a plain number, e.g. 0.001")
    if value <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not above 0; give a positive number"
        )
    return value


def number_from_0(text: str) -> float:
    """A finite number of at least 0."""
    hint = "give a plain number of at least 0, e.g. 0.1"
    value = _number(text, hint)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative; {hint}")
    return value


def below_1(text: str) -> float:
    """A number from 0 to below 1."""
    value = _number(text, "give a plain number, e.g. 0.9")
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not from 0 to below 1; give e.g. 0.9"
        )
    return value


def costs(text: str) -> tuple[float, ...]:
    """``10,40,30`` -> costs of layers, each finite and at least 0; whole numbers stay whole."""
    return tuple(_cost(part) for part in text.split(","))


def _cost(text: str) -> float:
    hint = "give a plain number of at least 0"
    try:
        value: float = int(text)
    except ValueError:
        value = _number(text, hint)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative; {hint}")
    return value


def _whole(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least {least}"
        )
    return value


def _number(text: str, hint: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; {hint}")
    return value


def refuse(
    arguments: argparse.Namespace, names: Iterable[str], message: str, hint: str
) -> None:
    """Refuse options that would be ignored.

    Args:
        names: as the namespace has them.
        hint: in which OPTION stands for the option.

    Raises:
        DocumentError: naming the first that was given.
    """
    for name in names:
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise DocumentError(
                message, field=option, hint=hint.replace("OPTION", option)
            )


def add_json(
    parser: argparse.ArgumentParser, what: str = "print the result as JSON"
) -> None:
    """``--json``, which every verb has."""
    parser.add_argument("--json", action="store_true", help=what)


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """``-o FILE``; ``-o -`` is stdout."""
    parser.add_argument("-o", "--output", metavar="FILE", help=f"{what} ('-': stdout)")


def add_question(parser: argparse.ArgumentParser) -> None:
    """The three documents of a question: model or profile, cluster, job."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--profile", metavar="FILE", help="profile.json, as `planner profile` writes it"
    )
    model.add_argument(
        "--model",
        metavar="MODEL",
        help="catalogue name, config.json, or package.module:callable",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        required=True,
        help="cluster document (YAML, TOML or JSON)",
    )
    parser.add_argument(
        "--job", metavar="FILE", required=True, help="job document (YAML, TOML or JSON)"
    )


def add_option(
    parser: argparse._ActionsContainer,
    name: str,
    kind: Callable[[str], Any],
    **settings: Any,
) -> None:
    """An option whose help tells its default."""
    if settings.get("default") is not None:
        settings["help"] += f" (default: {settings['default']})"
    parser.add_argument(name, type=kind, **settings)
