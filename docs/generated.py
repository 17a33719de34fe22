"""What pages say that the code knows: options, commands, result codes, measured figures, where docstrings are.

    python docs/generated.py

writes the text between `<!-- generated: NAME -->` and `<!-- end -->` on every page. It is committed, so pages
can be read without a build. A test compares it with what is generated now.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

import attrs
import typer

from sampling_async import BodyLimits, OutagePolicy, RetryPolicy, SamplingClient, Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOCS: Final = Path(__file__).parent
RESULTS: Final = DOCS.parent / "benchmarks" / "results"
MARK: Final = re.compile(r"^(<!-- generated: ([a-z-]+) -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
_PLAIN: Final = re.compile(r"\d[\d.]*|True|False|'.*'")
_ENTRY: Final = re.compile(r"^\*{0,2}(\w+): ?(.*)$")


# --- Docstrings ---------------------------------------------------------------------------------------------


def described(thing: object, section: str) -> dict[str, str]:
    """Return what a section of a Google docstring says of each name in it."""
    found: dict[str, str] = {}
    name = ""
    for line in _section(inspect.getdoc(thing) or "", section):
        entry = _ENTRY.match(line)
        if entry:
            name, found[entry[1]] = entry[1], entry[2]
        elif name:
            found[name] += " " + line.strip()
    return found


def _section(doc: str, section: str) -> list[str]:
    _, found, rest = doc.partition(f"\n{section}:\n")
    lines: list[str] = []
    for line in rest.splitlines() if found else ():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).splitlines()


def row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


# --- The client's options -----------------------------------------------------------------------------------

_POLICIES: Final = (Timeouts, RetryPolicy, OutagePolicy, BodyLimits)


def client_options() -> Iterator[str]:
    """Yield a table of the constructor's arguments, and one of each settings class."""
    about = described(SamplingClient, "Args")
    yield from (row("option", "default", "meaning"), row("---", "---", "---"))
    for name, parameter in inspect.signature(SamplingClient).parameters.items():
        yield row(f"`{name}`", _default(parameter), about[name])
    for policy in _POLICIES:
        about = described(policy, "Attributes")
        yield from ("", f"## {policy.__name__}", "", _summary(policy), "")
        yield from (row("field", "default", "meaning"), row("---", "---", "---"))
        for field in attrs.fields(policy):
            yield row(f"`{field.name}`", f"`{_shown(field.default)}`", about[field.name])


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "required"
    policy = str(parameter.annotation).partition(" |")[0]
    if policy in {each.__name__ for each in _POLICIES}:
        return f"`{policy}()`"
    shown = repr(parameter.default)  # of what autodoc may have put in its place
    if shown == "None":
        return "none"
    return f"`{shown}`" if _PLAIN.fullmatch(shown) else ""  # of a function, the meaning says it


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return "{" + ", ".join(map(str, sorted(value))) + "}"
    return f"{value:_}" if isinstance(value, int) and value > 2**16 else repr(value)


def _summary(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")


# --- The commands -------------------------------------------------------------------------------------------

CONNECTION: Final = "Connection"


def cli() -> Any:
    """Return the command line as its library sees it."""
    from sampling_async._cli._commands import app_for  # noqa: PLC0415  private, so named in one place

    return typer.main.get_command(app_for())


def leaves(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group and of the groups in it, each with its whole name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def commands() -> Iterator[str]:
    """Yield a section for each command, and one for the options that commands share."""
    shared: dict[str, Any] = {}
    for name, command in leaves(cli()):
        options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        own = [each for each in options if _panel(each) != CONNECTION]
        calls = [each for each in options if _panel(each) == CONNECTION]
        shared.update({each.name: each for each in calls})
        yield from (f"## {name}", "", *_paragraphs(command.help))
        usage = [f"sampling-async {name}", *map(_usage, arguments), "[OPTIONS]"]
        yield from ("```text", " ".join(usage), "```", "")
        if arguments or own:
            yield from (row("argument or option", "meaning"), row("---", "---"))
            yield from (row(f"`{_metavar(each)}`", _plain(each.help)) for each in arguments)
            yield from (_option(each) for each in own if "--help" not in each.opts)
            yield ""
        if calls:
            yield from ("It takes the [connection options](#connection-options) too.", "")
        yield from _examples(command.epilog)
    yield from ("## Connection options", "", "Every command that calls the service takes these.", "")
    yield from (row("option", "meaning"), row("---", "---"))
    yield from (_option(each) for each in shared.values())


def exit_codes() -> Iterator[str]:
    """Yield a table of the exit codes."""
    import sampling_async._cli  # noqa: PLC0415  private, so named in one place

    yield from (row("code", "meaning"), row("---", "---"))
    for code, meaning in described(sampling_async._cli, "Exit codes").items():  # noqa: SLF001
        yield row(code, meaning)


def _panel(option: Any) -> str | None:
    return getattr(option, "rich_help_panel", None)


def _metavar(argument: Any) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return f"{name}..." if argument.nargs == -1 else name


def _usage(argument: Any) -> str:
    return _metavar(argument) if argument.required else f"[{_metavar(argument)}]"


def _option(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    shown = names if option.is_flag else f"{names} {option.metavar or ''}".strip()
    meaning = _plain(option.help)
    if option.default is not None and option.default is not False and option.show_default:
        meaning += f" Default: `{option.default}`."
    if option.envvar:
        meaning += f" Environment: `{option.envvar}`."
    return row(f"`{shown}`", meaning)


def _plain(text: str | None) -> str:
    return re.sub(r"\[/?(?:bold|dim)\]", "", text or "").replace("\\[", "[")


def _paragraphs(text: str | None) -> Iterator[str]:
    for paragraph in inspect.cleandoc(_plain(text)).split("\n\n"):
        yield from (paragraph.replace("\n", " "), "")


def _examples(epilog: str | None) -> Iterator[str]:
    examples = [line.strip() for line in _plain(epilog).splitlines() if line.startswith("  ")]
    if examples:
        yield from ("```bash", *examples, "```", "")


# --- Figures ------------------------------------------------------------------------------------------------

_NO_NGINX: Final = "behind nginx"  # a row that says that it is not installed
GIST: Final[dict[str, tuple[str | tuple[str, ...], ...]]] = {
    "Truth": ("quota IDs pushed through faults", "lost: no outcome", "doubled: two outcomes", "lies"),
    "Pager": ("rows served", "lost", "doubled"),
    "Sweeps": ("cuts", "cuts that were taken for", "operations not cancelled cleanly"),
    "Interruption": ("ticks tried", "moments tried", "of these, with something wrong"),
    "Manners": ("attempts a call, 1%", "attempts a call, 10%", "attempts a call, 30%", "attempts a call, 100%"),
    "Brown-out": ("`unknown` in the brown-out",),
    "Outages and limits": ("service away", ("nginx lets", _NO_NGINX), ("the same", _NO_NGINX)),
    "Retry-After": ("trials", "trials with a request too early"),
    "Churn": ("of 20 calls afterwards, worked", "CONNECT: of 20", "absolute form: of 20"),
    "Clean-up": ("calls of all kinds", "file descriptors grown", "tasks grown", "memory slope"),
    "Kill": ("SIGKILLs", "lost", "doubled", "lies"),
    "Stalls": ("longest stall",),
    "Two processes": ("other processes let in", "pairs asked twice", "kinds of damage noticed"),
    "Bad inputs": ("bad inputs", "errors that are not"),
    "Secrecy": ("hits of the key", "hits of a member code", "hits in what"),
    "Settled": ("pairs of campaigns that were settled", "drawn pairs", "of these, settled without an invite"),
    "Odd files": ("files with drawn damage", "commands that end with a traceback", "files that reading has"),
    "Planted bugs": ("bugs that the tests find",),
}
"""Rows of the scoreboard, by section: how the title and the row begin, in one of these ways."""


def scoreboard() -> Iterator[str]:
    """Yield the gist of the scoreboard's page, with the command of each section.

    Raises:
        LookupError: The page has no such section or row any more.
    """
    sections = list(_sections((RESULTS / "scoreboard.md").read_text()))
    for title, wanted in GIST.items():
        whole, command, rows = next(each for each in sections if each[0].startswith(title))
        yield from (f"**{whole}** (`{command}`)", "", row("what", "goal", "this client", "naive"))
        yield row("---", "---:", "---:", "---:")
        chosen = [each for each in rows if any(map(each[0].startswith, wanted))]
        if missing := [name for name in wanted if not any(each[0].startswith(name) for each in chosen)]:
            raise LookupError(f"the scoreboard has no row {missing[0]!r} under {title!r}: see GIST")
        for what, goal, ours, _, naive, *_ in chosen:
            yield row(what, goal, ours, naive or "not measured")
        yield ""


def _sections(page: str) -> Iterator[tuple[str, str, list[list[str]]]]:
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        command = re.search(r"`(python [^`]+)`", body)
        yield title, "" if command is None else command[1], list(chain.from_iterable(_tables(body)))


def _tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the tables in a text as rows of cells, without the lines below their heads."""
    for is_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        if is_table:
            rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines)
            yield [each for each in rows if not set(each[0]) <= set("-:")]


def run_of(page: str) -> Iterator[str]:
    """Yield which run a page of figures is of, and how many goals it met."""
    head = (RESULTS / page).read_text().partition("\n## ")[0]
    yield from re.findall(r"^\*\*\d+ of \d+ goals met\.\*\*$", head, flags=re.MULTILINE)[:1]
    yield ""
    yield from re.findall(r"^- .+$", head, flags=re.MULTILINE)


def goals(page: str) -> Iterator[str]:
    """Yield which run a page of figures is of, and the table of its goals.

    Raises:
        LookupError: The page has no table of goals any more.
    """
    yield from (*run_of(page), "")
    for rows in _tables((RESULTS / page).read_text()):
        names = rows[0]
        if {"what", "goal", "measured", "met"} <= set(names):
            yield from (row(*names[:4]), row("---", "---:", "---:", "---"))
            yield from (row(*each[:4]) for each in rows[1:] if each[1])
            return
    raise LookupError(f"{page} has no table of goals")


# --- Where the text of the reference is ---------------------------------------------------------------------

_DIRECTIVE: Final = re.compile(r"^\.\. auto(?:class|function|exception|module)::\s+([\w.]+)", re.MULTILINE)


def sources_of(page: str) -> Iterator[str]:
    """Yield a note which files hold the docstrings of a page of the reference.

    To Sphinx, a line that begins with % is a comment; where Markdown is shown without a build, it is text.
    """
    text = (DOCS / "reference" / f"{page}.md").read_text()
    files = sorted({_file_of(name) for name in _DIRECTIVE.findall(text)})
    yield "% **Without a build**, directives stand here in place of docstrings. `nox -s docs` inserts them from"
    for file in files:
        yield f"% [{file}](../../{file}){',' if file != files[-1] else '.'}"


def _file_of(name: str) -> str:
    thing = resolve_name(name)
    source = inspect.getsourcefile(thing if inspect.ismodule(thing) else sys.modules[thing.__module__])
    return Path(source or "").relative_to(DOCS.parent).as_posix()


REFERENCE: Final = [
    path.stem for path in sorted((DOCS / "reference").glob("*.md")) if _DIRECTIVE.search(path.read_text())
]

GENERATED: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "client-options": client_options,
    "commands": commands,
    "exit-codes": exit_codes,
    "scoreboard": scoreboard,
    "run-of-scoreboard": partial(run_of, "scoreboard.md"),
    "goals-of-speed": partial(goals, "speed.md"),
    "goals-of-matching": partial(goals, "matching.md"),
    "goals-of-pressure": partial(goals, "pressure.md"),
    **{f"sources-of-{page}": partial(sources_of, page) for page in REFERENCE},
}


def filled(page: str) -> str:
    """Return a page with what is generated in it."""
    return MARK.sub(lambda mark: "\n".join([mark[1], *GENERATED[mark[2]](), "", mark[3]]), page)


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        if "_build" not in path.parts:
            path.write_text(filled(path.read_text()))
