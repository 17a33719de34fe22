"""The shape of the code: lengths of functions, shares of comments and docstrings, by package.

python benchmarks/shape.py [FOLDER]
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "sampling_async"
DIRECTIVES = ("# noqa", "# type:", "# pyright", "# pragma")


@dataclass
class Shape:
    """The counts of some files, in lines."""

    lines: int = 0
    comments: int = 0
    docstrings: int = 0
    functions: list[int] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Count a file."""
        self.lines += text.count("\n")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and token.line.strip() == token.string:
                self.comments += not token.string.startswith(DIRECTIVES)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                documented = ast.get_docstring(node, clean=False) is not None
                first = node.body[0] if documented else None
                self.docstrings += first.end_lineno - first.lineno + 1 if first else 0
                if not isinstance(node, ast.Module | ast.ClassDef):
                    start = first.end_lineno + 1 if first else node.lineno  # the function without its docstring
                    self.functions.append(max(1, node.end_lineno - start + 1))

    def row(self, name: str) -> str:
        """Return a line of the table."""
        lengths = sorted(self.functions) or [0]
        most = lengths[int(0.9 * (len(lengths) - 1))]
        shares = f"{self.comments / self.lines:6.1%} {self.docstrings / self.lines:6.1%}"
        counts = f"{self.lines:6} {len(self.functions):5} {statistics.median(lengths):6.0f} {most:5}"
        return f"{name:14} {counts} {shares}"


def main() -> None:
    """Count and print."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    shapes: dict[str, Shape] = defaultdict(Shape)
    for path in sorted(folder.rglob("*.py")):
        parts, text = path.relative_to(folder).parts, path.read_text(encoding="utf-8")
        if text:
            shapes[parts[0]].add(text)
            shapes["all of it"].add(text)
    print(f"{'':14} {'lines':>6} {'funcs':>5} {'median':>6} {'90 %':>5} {'comm.':>6} {'docs':>6}")
    for name, shape in shapes.items():
        print(shape.row(name))


if __name__ == "__main__":
    main()
