"""Check that every internal link of the built pages leads to a page, and to an anchor that is there.

    python docs/check_links.py docs/_build/html

Sphinx warns of references it cannot resolve, but not of every link that was written by hand, nor of links in
the Markdown twins. Nothing is fetched.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARKDOWN_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of what a tag leads to, and of what leads to it."""
        values = dict(attrs)
        self.anchors.update(filter(None, (values.get("id"), values.get("name") if tag == "a" else None)))
        link = values.get("href" if tag in {"a", "link"} else "src")
        if link:
            self.links.append(link)


def broken(root: Path) -> list[str]:
    """Return the links of a folder of built pages that lead nowhere."""
    return [
        f"{path.relative_to(root)}: {link}: {why}" for path, link, why in (*_of_pages(root), *_of_twins(root))
    ]


def _of_pages(root: Path) -> Iterator[tuple[Path, str, str]]:
    pages = {path: Page(path) for path in root.rglob("*.html")}
    for path, link in [(path, link) for path, page in pages.items() for link in page.links]:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_file():
            yield path, link, "no such page"
        elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
            yield path, link, "no such anchor"


def _of_twins(root: Path) -> Iterator[tuple[Path, str, str]]:
    for path in [*root.rglob("*.md"), root / "llms.txt"]:
        for link in _MARKDOWN_LINK.findall(_shown(path.read_text(encoding="utf-8"))):
            parts = urlsplit(link)
            if not (parts.scheme or parts.netloc or (path.parent / unquote(parts.path)).exists()):
                yield path, link, "no such file"


def _shown(page: str) -> str:
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    page = re.sub(r"^(`{3,}).*?^\1\s*$", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", page)


if __name__ == "__main__":
    links = broken(Path(sys.argv[1]).resolve())
    print(*links, f"{len(links)} broken links", sep="\n")
    sys.exit(bool(links))
