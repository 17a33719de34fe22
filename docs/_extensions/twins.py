"""Pictures and files of the Markdown twins: they lie where those of the pages do, and the twins say so."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_LINK: Final = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_AFTER_THE_TWINS: Final = 900


def _mend(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.name != "html":
        return
    root = Path(app.outdir)
    for path in [*root.rglob("*.md"), root / "llms-full.txt"]:

        def mended(found: re.Match[str], folder: Path = path.parent) -> str:
            # Downloads are named from the root.
            is_download = found[2].startswith("_downloads/")
            file = root / found[2] if is_download else root / "_images" / Path(found[2]).name
            is_mended = is_download or (found[1].startswith("!") and file.exists())
            return f"{found[1]}{os.path.relpath(file, folder) if is_mended else found[2]}{found[3]}"

        page = path.read_text(encoding="utf-8")
        path.write_text(_LINK.sub(mended, page), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx; takes `sphinx_llm.txt`, which writes the twins."""
    app.connect("build-finished", _mend, priority=_AFTER_THE_TWINS)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
