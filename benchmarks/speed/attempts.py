"""The duration of each request, taken from the client's log."""

from __future__ import annotations

import logging
import statistics
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PERCENTS: Final = (50, 90, 99)


class _Attempts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and isinstance(record.args[3], float):
            self.seconds.append(record.args[3])


@contextmanager
def attempts() -> Iterator[list[float]]:
    """Collect the durations of the attempts in the block. This costs CPU time, so do not measure that."""
    logger, collected = logging.getLogger("sampling_async"), _Attempts()
    logger.addHandler(collected)
    logger.setLevel(logging.DEBUG)
    try:
        yield collected.seconds
    finally:
        logger.removeHandler(collected)
        logger.setLevel(logging.NOTSET)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return milliseconds by percentile."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{percent}": round(cuts[percent - 1] * 1000, 2) for percent in PERCENTS}
