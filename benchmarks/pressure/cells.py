"""The matrix: which services, loads and clients are put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pressure.service import Service, Trouble

if TYPE_CHECKING:
    from collections.abc import Iterator

Clients: TypeAlias = Literal["one", "views", "shares"]

_WORKERS: Final = 4
_RATE: Final = 40.0
_AT: Final = 5.0
"""When trouble begins."""

_AFTER: Final = 9.0
"""Seconds of a trial from its end on."""


@dataclass(frozen=True)
class Cell:
    """One trial.

    Attributes:
        service: The service.
        load: The clicks, by what the service can take; 0 for none.
        deadline: The seconds that each click has.
        has_bulk: Whether a fan-out runs all the time.
        width: `max_concurrency`.
        clients: One client; two views of one, that share its gate; or four shares of one.
        seconds: For how long clicks come and the fan-out runs.
        is_cancelled: Whether clicks have no `deadline`, and the host cancels them after their time.
        is_short: Whether the short version has it.
    """

    service: Service
    load: float = 0.0
    deadline: float = 2.0
    has_bulk: bool = False
    width: int = 8
    clients: Clients = "one"
    seconds: float = 12.0
    is_short: bool = False
    is_cancelled: bool = False

    @property
    def name(self) -> str:
        """The cell in words."""
        load = f"clicks of {self.deadline:g} s at {self.load:.2g}" if self.load else ""
        load += ", cancelled by their host" if self.is_cancelled else ""
        bulk = "a fan-out" if self.has_bulk else ""
        what = " beside ".join(each for each in (load, bulk) if each)
        who = {"one": "", "views": ", two views", "shares": ", four shares"}[self.clients]
        return f"{self.service.name}; {what}; {self.width} wide{who}"

    @property
    def rate(self) -> float:
        """Clicks a second."""
        return self.load * self.service.capacity(self.width)


def _storm(status: Literal["429", "503"], seconds: float, retry_after: int | None = None) -> Service:
    header = "" if retry_after is None else f", Retry-After {retry_after}"
    return Service(
        f"storm of {status}, {seconds:g} s{header}",
        workers=((0.0, _WORKERS if seconds < 10 else 2 if seconds < 30 else 1),),  # for time of CPU
        retry_after=retry_after,
        trouble=Trouble(_AT, _AT + seconds, status),
    )


def _fewer(name: str, *workers: int, each: float, until: float | None = None) -> Service:
    """Return a service whose workers change from the sixth second on; with `until`, that is a trouble."""
    steps = ((0.0, _WORKERS), *((_AT + each * number, count) for number, count in enumerate(workers)))
    return Service(name, workers=steps, trouble=None if until is None else Trouble(_AT, until, "slow"))


FREE: Final = Service("any number of workers")
WORKERS: Final = Service("4 workers", workers=((0.0, _WORKERS),))
RATE: Final = Service("40 a second", rate=((0.0, _RATE),))
RATE_HELD: Final = replace(RATE, name="40 a second, Retry-After 1", retry_after=1)
BOTH: Final = Service("4 workers and 30 a second", workers=((0.0, _WORKERS),), rate=((0.0, 30.0),))
LIMITER: Final = Service("20 a second, burst 5", rate=((0.0, 20.0),), burst=5)
CHANCE: Final = replace(WORKERS, name="2 % refused by chance", chance=0.02)
CHANCE_HELD: Final = replace(CHANCE, name="2 % refused by chance, Retry-After 1", retry_after=1)
TAILS: Final = replace(WORKERS, name="1 % take ten times as long", slow=0.01)
STEP_DOWN: Final = _fewer("4 workers, then 2", 2, each=0.0)
STEP_UP: Final = _fewer("4 workers, then 8", 8, each=0.0)
RATE_DOWN: Final = Service("40 a second, then 20", rate=((0.0, _RATE), (_AT, 20.0)))
RATE_UP: Final = Service("20 a second, then 40", rate=((0.0, 20.0), (_AT, _RATE)))
RAMP: Final = _fewer("ramp from 4 workers to 1 and back", 3, 2, 1, 2, 3, 4, each=1.5)
BROWN_OUT: Final = _fewer("brown-out: 1 worker of 4 for 6 s", 1, 4, each=6.0, until=_AT + 6.0)
SHORT_STORM: Final = _storm("429", 4)
STORM_OF_503: Final = _storm("503", 4)
STORMS: Final = (
    *(_storm("429", seconds) for seconds in (0.5, 4, 20, 60)),
    *(_storm("503", seconds) for seconds in (0.5, 4, 20, 60)),
    *(_storm("429", seconds, 1) for seconds in (0.5, 4, 20)),
)
OUTAGES: Final = tuple(
    replace(WORKERS, name=f"away for {seconds} s", trouble=Trouble(_AT, _AT + seconds, "away"))
    for seconds in (4, 20)
)
WIDE: Final = Service("64 workers, 0.4 s", workers=((0.0, 64),), seconds=0.4)

_A_FEW_SECONDS: Final = (SHORT_STORM, STORM_OF_503, OUTAGES[0])
_LOADS: Final = (0.1, 0.5, 1.0, 2.0, 10.0)
_CHANGES: Final = (STEP_DOWN, STEP_UP, RATE_DOWN, RATE_UP, RAMP)
_STEADY: Final = (WORKERS, RATE, RATE_HELD, BOTH, CHANCE, CHANCE_HELD, TAILS)


def seconds_of(service: Service) -> float:
    """Return how long trials of a service take."""
    if service.trouble is not None:
        return service.trouble.end + _AFTER
    return 13.0 if service in _CHANGES else 8.0


def matrix() -> list[Cell]:
    """Return all cells, each once."""
    return list(dict.fromkeys([*_each_service(), *_overloads(), *_cancelled(), *_neighbours(), *_of_today()]))


def _each_service() -> Iterator[Cell]:
    """Yield each service with each load. Times, widths and clients take turns, in rounds of unlike lengths."""
    deadlines = cycle((2.0, 0.3, 5.0, 1.0, 0.5))
    widths = cycle((8, 64, 8, 1, 256, 8, 64))
    clients: Iterator[Clients] = cycle(("one", "views", "one", "shares"))
    for service in (*_STEADY, *_CHANGES, BROWN_OUT, *STORMS, *OUTAGES):
        for load in _LOADS:
            # Ten times the load takes seconds of CPU, so not all changes and troubles have it.
            if load == 10 and service not in (*_STEADY, STEP_DOWN, RAMP, BROWN_OUT, *_A_FEW_SECONDS):
                continue
            yield _cell(service, load, next(deadlines), next(widths), next(clients))
        for load in (0.0, 0.5, 2.0):
            cell = _cell(service, load, next(deadlines), next(widths), next(clients))
            yield replace(cell, has_bulk=True)


def _cell(service: Service, load: float, deadline: float, width: int, clients: Clients) -> Cell:
    # Each share has a place.
    width = max(width, 4) if clients == "shares" else width
    seconds = 5.0 if load == 10 and service in _STEADY else seconds_of(service)
    return Cell(service, load, deadline, width=width, clients=clients, seconds=seconds)


def _overloads() -> Iterator[Cell]:
    """Yield overload for each width and time of a click, and a service as wide as its client."""
    for load in (2.0, 10.0):
        for width in (1, 8, 64, 256):
            for deadline in (0.3, 1.0, 2.0, 5.0):
                is_short = width == 8 and deadline in {0.3, 2.0}
                yield Cell(WORKERS, load, deadline, width=width, seconds=5.0, is_short=is_short)
    yield Cell(WIDE, 2.0, 2.0, width=64, seconds=16.0)
    for clients in ("one", "views", "shares"):
        yield Cell(
            SHORT_STORM, 0.5, 2.0, clients=clients, has_bulk=True, seconds=20.0, is_short=clients == "one"
        )


def _cancelled() -> Iterator[Cell]:
    """Yield clicks without a deadline, whose host gives them up after their time, as with `asyncio.timeout`."""
    for deadline in (0.3, 2.0):
        for load in (2.0, 10.0):
            yield Cell(WORKERS, load, deadline, seconds=5.0, is_cancelled=True)
        for service in (SHORT_STORM, STORM_OF_503, OUTAGES[0], BROWN_OUT):
            yield Cell(service, 0.5, deadline, seconds=seconds_of(service), is_cancelled=True)
    yield Cell(SHORT_STORM, 0.5, 2.0, True, seconds=seconds_of(SHORT_STORM), is_cancelled=True)


def _neighbours() -> Iterator[Cell]:
    """Yield clicks of an idle service, alone and beside a fan-out."""
    for width, seconds in ((8, 0.1), (64, 0.4)):
        service = replace(FREE, seconds=seconds)
        for has_bulk in (False, True):
            load = 5.0 / service.capacity(width)  # five clicks a second
            yield Cell(service, load, 2.0, has_bulk, width, seconds=40.0, is_short=width == 8)


def _of_today() -> Iterator[Cell]:
    """Yield the limiter and the refusals by chance, with a fan-out, for a minute."""
    for service in (LIMITER, replace(LIMITER, name=f"{LIMITER.name}, Retry-After 1", retry_after=1)):
        for width in (8, 64):
            yield Cell(service, has_bulk=True, width=width, seconds=60.0, is_short=width == 8)
    for service in (CHANCE, CHANCE_HELD):
        yield Cell(service, has_bulk=True, seconds=60.0, is_short=True)


FOR_PEERS: Final = (
    Cell(WORKERS, 0.5, 2.0, seconds=10.0, is_short=True),
    Cell(WORKERS, 2.0, 0.3, seconds=8.0),
    Cell(WORKERS, 2.0, 2.0, seconds=8.0, is_short=True),
    Cell(WORKERS, 10.0, 2.0, seconds=8.0),
    Cell(RATE, 2.0, 1.0, seconds=10.0),
    Cell(LIMITER, has_bulk=True, seconds=10.0),
    Cell(CHANCE, has_bulk=True, seconds=20.0),
    Cell(SHORT_STORM, 0.5, 2.0, seconds=20.0),
    Cell(SHORT_STORM, 0.5, 2.0, has_bulk=True, seconds=20.0, is_short=True),
    Cell(STORM_OF_503, 0.5, 2.0, has_bulk=True, seconds=20.0),
    Cell(BROWN_OUT, 1.0, 2.0, seconds=22.0),
    Cell(TAILS, 1.0, 1.0, seconds=10.0),
    Cell(OUTAGES[0], 0.5, 2.0, has_bulk=True, seconds=20.0),
)
"""Cells that the other clients are put through as well."""
