"""Public names in the text of a page lead to the reference: `RetryPolicy`, `client.get_quotas()`.

Pages write plain code in backticks, so that they read well on a repository host too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref

import sampling_async

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_NAME: Final = re.compile(r"([A-Z]\w+|from_json|to_json|make_converter)(?:\.(\w+))?(?:\(.*\))?(?:\[.*\])?")
_CALL: Final = re.compile(r"(?:await |async (?:for \w+ in|with) )?client\.([a-z_]+)\b.*")
_OPAQUE: Final = (nodes.reference, nodes.title, desc_signature, pending_xref)
_GENERIC: Final = frozenset({"Quota", "Layer", "Price", "Setting", "Survey", "Result", "Invite"})
"""Words of the wire, too: the text mostly means these."""


def target_of(text: str, homes: dict[str, str]) -> str | None:
    """Return what a piece of code in the text names, if that is in the reference."""
    call = _CALL.fullmatch(text)
    if call and hasattr(sampling_async.SamplingClient, call[1]):
        return f"sampling_async.SamplingClient.{call[1]}"
    name = _NAME.fullmatch(text)
    if name is None or name[1] not in homes or name[1] in _GENERIC:
        return None
    path = f"{homes[name[1]]}.{name[1]}"
    return f"{path}.{name[2]}" if name[2] else path


def _link(app: Sphinx, doctree: nodes.document) -> None:
    page = app.env.docname
    if page.startswith("reference/") and page != "reference/index":
        return
    for literal in list(doctree.findall(nodes.literal)):
        if any(isinstance(parent, _OPAQUE) for parent in _parents(literal)):
            continue
        target = target_of(literal.astext(), app.sampling_homes)  # type: ignore[attr-defined]
        if target is not None:
            link = pending_xref(
                refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refdoc=page, refwarn=False
            )
            literal.replace_self(link)
            link += literal


def _parents(node: nodes.Node) -> list[nodes.Node]:
    found = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx; takes `docstrings`, which knows where public names are."""
    app.connect("doctree-read", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
