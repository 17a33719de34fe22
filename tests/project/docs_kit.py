"""The Python examples of the README and of docs/: where they are, and how they are written to files.

    python tests/project/docs_kit.py FOLDER

writes all of them into a folder, for a type checker to read. An example whose first line is `# name.py` is a
file of that name; others are named after their page and line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from attrs import frozen
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
)
_NAME = re.compile(r"# (\w+\.py)\n")


@frozen
class PageExample:
    """An example on a page."""

    page: Path
    line: int
    text: str

    @property
    def is_test(self) -> bool:
        """Whether it is for pytest."""
        return "def test_" in self.text

    @property
    def is_service(self) -> bool:
        """Whether it is an ASGI application, which a server runs."""
        return "\napp = " in self.text

    @property
    def name(self) -> str:
        """The name of its file."""
        named = _NAME.match(self.text)
        if named:
            return named[1]
        prefix = "test_" if self.is_test else ""
        return f"{prefix}{self.page.stem.replace('-', '_')}_{self.line}.py"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"


def examples_of(page: Path) -> list[PageExample]:
    """Return the examples of a page, in its order."""
    found = Sybil([PythonCodeBlockParser()]).parse(page).examples()
    return [PageExample(page, each.line, str(each.parsed)) for each in found]


def write_all(folder: Path) -> int:
    """Write every example into a folder; return how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    examples = [each for page in PAGES for each in examples_of(page)]
    for each in examples:
        path = folder / each.name
        if path.exists():
            raise FileExistsError(f"{each}: another example is called {each.name}")
        path.write_text(each.text)
    return len(examples)


if __name__ == "__main__":
    sys.stdout.write(f"{write_all(Path(sys.argv[1]))} examples\n")
