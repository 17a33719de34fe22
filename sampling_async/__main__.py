"""Run the command line: `python -m sampling_async`."""

from __future__ import annotations

from sampling_async._cli import main

if __name__ == "__main__":
    main()
