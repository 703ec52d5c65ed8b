"""Click commands and options in the way of this package.

`--help` of a verb shows its common options; `--help-all` shows all of them in groups. Old
spellings work and warn. Usage errors are errors like all others: what is wrong with which
value, and a hint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from planner.cli.console import note
from planner.errors import DocumentError, PlannerError, SpecError, UnknownNameError
from planner.spec.words import suggestion

Function = TypeVar("Function", bound=Callable[..., Any])

GENERAL = "Options"
"""Group of options that belong to no other one."""
STDOUT_HINT = "'-': stdout"


class Option(click.Option):
    """An option with a group; an advanced one is shown by `--help-all` only."""

    def __init__(
        self,
        param_decls: Sequence[str],
        *,
        group: str = GENERAL,
        advanced: bool = False,
        several_words: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(param_decls, **settings)
        self.group = group
        self.advanced = advanced
        self.several_words = several_words
        """Takes all of ``FIELD=V FIELD=V ...`` that follow it; all words, if the command
        has no arguments."""


class Verb(click.Command):
    """A command with grouped help, old spellings, and options of several words.

    Args:
        renamed: old spelling of an option -> the spelling of today.
    """

    def __init__(
        self, *arguments: Any, renamed: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self.renamed = dict(renamed or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command line."""
        return super().parse_args(ctx, self._repeat_options(self._rename_options(args)))

    def _rename_options(self, words: Sequence[str]) -> list[str]:
        """Replace old spellings, with a warning each."""
        result = []
        for word in words:
            name, equals, value = word.partition("=")
            new = self.renamed.get(name)
            if new is not None:
                note(
                    f"warning: {name} is now {new}; the old spelling will go with the next release"
                )
            result.append(f"{new or name}{equals}{value}")
        return result

    def _repeat_options(self, words: Sequence[str]) -> list[str]:
        """``--layout[=| ]a=1 b=2`` -> ``--layout a=1 --layout b=2``, for options of several words.

        Words without ``=`` are left to the arguments of a command that has some.
        """
        several = {
            name
            for each in self.params
            if isinstance(each, Option) and each.several_words
            for name in each.opts
        }
        has_arguments = any(isinstance(each, click.Argument) for each in self.params)
        result: list[str] = []
        option = ""
        for word in words:
            if word.startswith("-"):
                name, _, _ = word.partition("=")
                option = name if name in several else ""
            elif option and result[-1] != option:
                is_value = "=" in word or not has_arguments
                if is_value:
                    result.append(option)
            result.append(word)
        return result

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the common options, or all of them in groups."""
        wants_all = bool(ctx.meta.get("help_all"))
        groups: dict[str, list[tuple[str, str]]] = {}
        hidden = 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or isinstance(param, click.Argument):
                continue
            if getattr(param, "advanced", False) and not wants_all:
                hidden += 1
                continue
            group = getattr(param, "group", GENERAL) if wants_all else GENERAL
            groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=34)
        if hidden:
            formatter.write(
                f"\n{hidden} more options: planner {self.name} --help-all\n"
            )


def verb(
    name: str,
    *,
    renamed: Mapping[str, str] | None = None,
    json_help: str = "Print the result as JSON",
) -> Callable[[Callable[..., int]], Verb]:
    """Make a verb of a function that returns an exit code; every verb has `--json`.

    Args:
        name: of the verb; its module has it under the name `command`.
        renamed: old spelling of an option -> the spelling of today.
        json_help: help of `--json`.
    """

    def decorate(function: Callable[..., int]) -> Verb:
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 96}
        made = click.command(
            name, cls=Verb, renamed=renamed, context_settings=settings
        )(function)
        made.params += [
            click.Option(["--json", "as_json"], is_flag=True, help=json_help),
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all_help,
                help="Show all options and exit.",
            ),
        ]
        return made

    return decorate


def _show_all_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta["help_all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def option(*names: str, **settings: Any) -> Callable[[Function], Function]:
    """A Click option; see `Option` for `group`, `advanced` and `several_words`."""
    default = settings.get("default")
    if isinstance(default, float) and default.is_integer():
        settings["default"] = int(default)  # 60 instead of 60.0 in the help
    shows = default not in (None, False, (), "") and not settings.get("is_flag")
    settings.setdefault("show_default", shows)
    return click.option(*names, cls=Option, **settings)


def output_option(help_text: str, **settings: Any) -> Callable[[Function], Function]:
    """``-o FILE``; ``-o -`` is stdout."""
    return option(
        "-o",
        "--output",
        metavar="FILE",
        help=f"{help_text} ({STDOUT_HINT})",
        **settings,
    )


def plan_argument(function: Function) -> Function:
    """The argument ``plan.json``."""
    return click.argument("plan_path", metavar="plan.json")(function)


def nearest(name: str, known: Collection[str], otherwise: str) -> str:
    """``did you mean 'plan'?``, or `otherwise` if nothing is near."""
    return suggestion(name, known).rstrip() or otherwise


def error_of_usage(error: click.UsageError) -> PlannerError:
    """A usage error of Click as an error of this package."""
    verb = error.ctx.command_path if error.ctx else "planner"
    see_help = f"see `{verb} --help`."
    if isinstance(error, click.NoSuchOption):
        close = error.possibilities or []
        hint = f"did you mean {close[0]}?" if close else see_help
        return SpecError(f"no option {error.option_name}.", field=verb, hint=hint)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = _parameter_name(error.param)
        return SpecError("is missing.", field=name, hint=f"give it; {see_help}")
    if isinstance(error, click.BadParameter) and error.param is not None:
        message = error.message.rstrip(".")
        what, _, hint = message.partition("; ")
        return DocumentError(
            f"{what}.",
            field=_parameter_name(error.param),
            hint=f"{hint or see_help}".rstrip(".") + ".",
        )
    return SpecError(
        f"{error.format_message().rstrip('.')}.", field=verb, hint=see_help
    )


def _parameter_name(param: click.Parameter) -> str:
    if isinstance(param, click.Argument):
        return param.make_metavar(click.Context(click.Command("planner")))
    return max(param.opts, key=len)


def refuse(values: Mapping[str, Any], message: str, hint: str) -> None:
    """Refuse options that would be ignored.

    Args:
        values: option -> its value; None, False and () mean that it was not given.
        message: why it cannot be given.
        hint: what to do; OPTION stands for the option.

    Raises:
        DocumentError: names the first that was given.
    """
    for name, value in values.items():
        is_absent = value is None or value is False or value == ()
        if not is_absent:  # 0 is a value
            raise DocumentError(message, field=name, hint=hint.replace("OPTION", name))


class Number(click.ParamType[Any]):
    """A finite number within bounds.

    Args:
        name: of the kind, in the help.
        above: the value must be larger than this.
        least: the value must be at least this.
        below: the value must be smaller than this.
        whole: take whole numbers only.
        hint: what to give instead.
    """

    def __init__(
        self,
        name: str,
        *,
        above: float = -math.inf,
        least: float = -math.inf,
        below: float = math.inf,
        whole: bool = False,
        hint: str = "give a plain number",
    ) -> None:
        self.name = name
        self._above, self._least, self._below = above, least, below
        self._kind: type[int] | type[float] = int if whole else float
        self._what = "a whole number" if whole else "a number"
        self._hint = hint

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        """The number of a text."""
        try:
            number = self._kind(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{value!r} is not {self._what}; {self._hint}", param, ctx)
        if number <= self._above:
            self.fail(
                f"{value!r} is not above {self._above:g}; {self._hint}", param, ctx
            )
        if number < self._least:
            self.fail(
                f"{value!r} is not at least {self._least:g}; {self._hint}", param, ctx
            )
        if number >= self._below:
            self.fail(
                f"{value!r} is not below {self._below:g}; {self._hint}", param, ctx
            )
        return number


class ListOf(click.ParamType[Any]):
    """Comma-separated values of one type; in rising order without duplicates if `ordered`."""

    def __init__(self, item: click.ParamType[Any], *, ordered: bool = False) -> None:
        self.name = f"{item.name},..."
        self._item, self._ordered = item, ordered

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """The values of a text such as ``1,2,4``."""
        if isinstance(value, tuple):
            return value
        items = tuple(self._item.convert(part, param, ctx) for part in value.split(","))
        return tuple(sorted(set(items))) if self._ordered else items


POSITIVE_INT = Number("N", least=1, whole=True, hint="give 1 or more")
WHOLE_NUMBER = Number("N", least=0, whole=True, hint="give 0 or more")
SECONDS = Number("SECONDS", above=0, hint="give plain seconds, without a unit, e.g. 30")
POSITIVE_NUMBER = Number("X", above=0, hint="give a positive number, e.g. 0.001")
NUMBER_FROM_0 = Number("X", least=0, hint="give a number of at least 0, e.g. 0.1")
BELOW_1 = Number(
    "X", least=0, below=1, hint="give a number from 0 to below 1, e.g. 0.9"
)
POSITIVE_INTS = ListOf(POSITIVE_INT, ordered=True)


class Cost(Number):
    """A number of at least 0; whole numbers stay whole."""

    def __init__(self) -> None:
        super().__init__("X", least=0, hint="give plain numbers of at least 0")

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        """The number of a text."""
        number = super().convert(value, param, ctx)
        try:
            return int(value)
        except ValueError:
            return number


COSTS = ListOf(Cost())


class OneOf(click.Choice[str]):
    """One of several names; a misspelled one is answered with the nearest.

    Args:
        kind: what the names are of, for the error message.
        names: the names.
    """

    def __init__(self, kind: str, names: Iterable[str]) -> None:
        super().__init__(tuple(names))
        self._kind = kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """The name.

        Raises:
            UnknownNameError: there is none of this name.
        """
        if value in self.choices:
            return str(value)
        known = f"use one of {', '.join(self.choices)}."
        raise UnknownNameError(
            f"unknown {self._kind} {value!r}.",
            field=_parameter_name(param) if param is not None else "",
            hint=nearest(str(value), self.choices, known),
        )
