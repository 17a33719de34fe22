"""Docstrings of this project as reStructuredText: their indented examples become code blocks.

An example in a docstring stands indented after a blank line, as in Markdown. reStructuredText would take it for
a quotation. Public names are documented under the package they are imported from, and not under the private
module in which they happen to be written.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from msgspec import Struct
from sphinx.domains.python import PyObject
from sphinx.ext.napoleon.docstring import GoogleDocstring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from docutils import nodes
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

PACKAGES: Final = ("sampling_async.simulator", "sampling_async.matching", "sampling_async")
"""The last one counts where a name is in several."""

_WHAT: Final = 3
"""The place of the argument of napoleon that says what a docstring is of."""

_SECTIONS: Final = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:", "Example:")


def with_code_blocks(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with its indented examples marked as code."""
    return list(_marked(lines))


def _marked(lines: list[str]) -> Iterator[str]:
    under, in_example = "", False
    for number, line in enumerate(lines):
        if line and not line.startswith(" "):
            under, in_example = line.strip(), False
        starts = line.startswith("    ") and not in_example and number > 0 and not lines[number - 1].strip()
        if starts and not under.endswith("::") and under not in _SECTIONS:
            language = "text" if any(sign in line for sign in "├└│") else "python"
            yield from (f".. code-block:: {language}", "")
            in_example = True
        yield line


def under_public_names() -> dict[str, str]:
    """Have every public name belong to the package it is imported from; return where each is now."""
    homes: dict[str, str] = {}
    for package in PACKAGES:
        module = import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            homes[name] = package
            if getattr(thing, "__module__", "").startswith("sampling_async."):
                if isinstance(thing, type) and issubclass(thing, Struct):
                    # In the other module their types are not found. And these are without msgspec's bounds.
                    thing.__annotations__ = get_type_hints(thing)
                thing.__module__ = package
    return homes


def _as_functions(make: Callable[..., None]) -> Callable[..., None]:
    """Have docstrings of properties read as those of functions: in ours, what is before a colon is no type."""

    def made(self: GoogleDocstring, *arguments: Any, what: str = "", **named: Any) -> None:
        if len(arguments) > _WHAT:
            before, what, after = arguments[:_WHAT], arguments[_WHAT], arguments[_WHAT + 1 :]
            arguments, named = before, {**named, **dict(zip(("name", "obj", "options"), after, strict=False))}
        make(self, *arguments, what="function" if what == "property" else what, **named)

    return made


def _process(_app: Sphinx, _what: str, _name: str, _thing: object, _options: object, lines: list[str]) -> None:
    lines[:] = with_code_blocks(lines)


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Find a public name however it was written: alone, or with the private module it stands in."""
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"])
    name = target.rpartition(".")[2] if target.startswith("sampling_async.") else target.partition("(")[0]
    home = app.sampling_homes.get(name)  # type: ignore[attr-defined]
    if home is None or node.get("reftarget") == f"{home}.{name}":
        return None
    domain: Any = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"{home}.{name}", node, content)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.sampling_homes = under_public_names()  # type: ignore[attr-defined]
    GoogleDocstring.__init__ = _as_functions(GoogleDocstring.__init__)  # type: ignore[method-assign]
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # what the docstrings call them
    app.connect("autodoc-process-docstring", _process, priority=1)  # before napoleon
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
