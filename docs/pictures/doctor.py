"""Set up services with one thing wrong each, and show what `sampling-async doctor` says, in 80 columns.

    python docs/pictures/doctor.py            # prints the blocks
    python docs/pictures/doctor.py --write    # and puts them into docs/howto/doctor.md

The command runs in a terminal of tmux, and the screen is what is printed. It takes tmux and nginx.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "howto" / "doctor.md"
COLUMNS, LINES = 80, 60

sys.path += [str(ROOT / "tests" / folder) for folder in ("cli", "proxies")]
import broken_services  # noqa: E402  beside the tests that use it too


def screen_of(environment: dict[str, str]) -> str:
    """Run `doctor` in a terminal of 80 columns, and return what stands on the screen."""
    tmux = ["tmux", "-L", f"doctor-{os.getpid()}"]
    program = Path(sys.executable).parent / "sampling-async"
    command = f"{shlex.quote(str(program))} doctor; echo exit code $?; sleep 60"
    variables = [part for name, value in environment.items() for part in ("-e", f"{name}={value}")]
    size = ["-x", str(COLUMNS), "-y", str(LINES)]
    subprocess.run([*tmux, "-f", os.devnull, "new-session", "-d", *size, *variables, command], check=True)
    try:
        for _ in range(300):
            shown = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True)
            if "exit code" in shown.stdout:
                return shown.stdout.rstrip()
            time.sleep(0.1)
        raise TimeoutError("doctor did not end within 30 seconds")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def block(title: str) -> str:
    """Return what the page shows for a service."""
    service = {"all is in order": broken_services.in_order, **broken_services.BROKEN}[title]
    with service() as environment:
        shown = screen_of(environment)
    return f"```text\n$ sampling-async doctor\n{shown}\n```"


def main() -> None:
    """Print the block of each service, and write the page if that is wanted."""
    page = PAGE.read_text()
    for title in re.findall(r"^<!-- run: (.+) -->$", page, re.MULTILINE):
        made = block(title)
        print(f"{title}\n\n{made}\n")
        mark = f"<!-- run: {title} -->\n"
        before, _, after = page.partition(mark)
        _, _, after = after.partition("\n```\n")
        page = f"{before}{mark}{made}\n{after}"
    if "--write" in sys.argv:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
