"""Words that a page is found by, though they are not its title: `keywords:` in its front matter.

They become main entries of the index, which the search puts before everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sphinx import addnodes

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx


def _enter(app: Sphinx, doctree: nodes.document) -> None:
    words = app.env.metadata[app.env.docname].get("keywords")
    if words:
        entries = [("single", word.strip(), "", "main", None) for word in words.split(",")]
        doctree.insert(0, addnodes.index(entries=entries))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("doctree-read", _enter)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
