"""Tests behind real proxies: `nox -s proxies`. They are skipped if a proxy is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "faults"))  # the fault server stands behind the proxies
