"""Options of commands: how each is written, groups of them as objects, and those for how results are shown."""

from __future__ import annotations

import inspect
from functools import wraps
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import typer
from attrs import field, fields

from sampling_async import InvalidRequestError
from sampling_async._cli import _rendering as show

if TYPE_CHECKING:
    from collections.abc import Callable


_OPTION: Final = "option"
SHOWN: Final = 40
"""The most characters of a wrong value that an error shows."""
_MOST: Final = 10**9  # of seconds, the sleeps and waits of some systems take hardly more


def beyond(value: float, *, is_count: bool) -> str:
    """Return what is wrong with a number that no option can mean: "is not finite"; empty if nothing is."""
    if isinstance(value, int):
        most, least = (2**31 - 1 if is_count else 2**63 - 1), 0.0
    elif isfinite(value):
        most, least = _MOST, 1 / _MOST
    else:
        return "is not a finite number"
    if abs(value) > most:
        return f"is more than {most:,}" if value > 0 else f"is less than {-most:,}"
    return "is too close to 0" if 0 < abs(value) < least else ""


def is_plain(text: str) -> bool:
    """Return whether Python reads a number in a text as others do: it would take 1_5 for 15."""
    return text.isascii() and "_" not in text


def option(
    metavar: str, help_text: str, *names: str, default: Any = None, panel: str | None = None, **more: Any
) -> Any:
    """Return an option with a value, ... as its default for one that is needed.

    `panel` is the part of the help in which it stands.
    """
    return typer.Option(default, *names, help=help_text, metavar=metavar, rich_help_panel=panel, **more)


def flag(help_text: str, *names: str, default: bool = False, **more: Any) -> Any:
    """Return an option without a value. An empty metavar keeps the type out of the help."""
    return option("", help_text, *names, default=default, **more)


def given(metavar: str, help_text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return a field of a group of options, see `takes`: an option with its default."""
    made = option(metavar, help_text, *names, default=default, **more)
    return field(default=default, metadata={_OPTION: made})


def argument(metavar: str, help_text: str, *, default: Any = ..., **more: Any) -> Any:
    """Return an argument, needed if it has no default."""
    return typer.Argument(default, help=help_text, metavar=metavar, **more)


MEMBER: Final = argument("MEMBER", "The member's code in your panel.")
JSON_LINES: Final = "Print JSON lines, on a terminal too."


def _flag_of_many(name: str, help_text: str, *names: str) -> inspect.Parameter:
    made = flag(help_text, *names)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=bool, default=made)


_QUIET: Final = _flag_of_many(
    "quiet", "Write no progress, notes and summaries to stderr. Warnings and errors remain.", "--quiet", "-q"
)
_CSV: Final = _flag_of_many(
    "as_csv", "Print CSV, on a terminal too. Cells are not changed: open it with all columns as text.", "--csv"
)


def takes(
    *, json: str | None = None, csv: bool = False, quiet: bool = False, **groups: type[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a command, after its own.

    First come those that say how it shows its result, for `show.wanted`: `json` is the help of --json; a
    command that prints rows gets --csv; one that writes progress, notes or a summary to stderr gets --quiet.
    Then come groups, in their order: `@takes(service=ServiceOptions)` passes one `service`. A group is an attrs
    class whose fields were made by `given`.
    """
    options = {name: _parameters(cls) for name, cls in groups.items()}
    common = [_CSV] * csv + [_QUIET] * quiet
    if json is not None:
        common.insert(0, _flag_of_many("as_json", json, "--json"))

    def with_groups(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name not in groups]
        parameters = [*own, *common, *(each for some in options.values() for each in some)]

        @wraps(command)
        def grouped(**values: Any) -> None:
            as_json, as_csv, is_quiet = (values.get(each, False) for each in ("as_json", "as_csv", "quiet"))
            show.wanted.set(json=as_json, csv=as_csv, quiet=is_quiet)
            if as_json and as_csv:
                raise InvalidRequestError("give --json or --csv, not both")
            made = {
                name: groups[name](**{each.name: values[each.name] for each in some})
                for name, some in options.items()
            }
            command(**made, **{each.name: values[each.name] for each in own})

        # typer reads the options from these two attributes, so they must describe the wrapper.
        grouped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        grouped.__annotations__ = {each.name: each.annotation for each in parameters}
        return grouped

    return with_groups


def _parameters(cls: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(cls)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[each.name],
            default=each.metadata[_OPTION],
        )
        for each in fields(cls)
        if _OPTION in each.metadata
    ]


def names_in(cls: type[Any], panel: str) -> list[str]:
    """Return the names of a group's options that stand in one part of the help."""
    options = {each.name: each.metadata.get(_OPTION) for each in fields(cls)}
    return [name for name, option in options.items() if option and option.rich_help_panel == panel]
