"""Packages that need the extra `panel` import this first: an ImportError says what to install."""

from __future__ import annotations

from importlib import import_module

from sampling_async._contract.extras import install

try:
    for name in ("numpy", "pyarrow"):
        import_module(name)
except ModuleNotFoundError as exc:
    # Not if an import inside one of them fails.
    if exc.name not in {"numpy", "pyarrow"}:
        raise
    raise ModuleNotFoundError(f"{exc.name} is missing: {install('panel')}", name=exc.name) from exc
