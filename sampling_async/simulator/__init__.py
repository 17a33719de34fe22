"""A simulated sampling service for tests and demos: seeded, stateful, with faults and a ledger.

    from sampling_async.simulator import Fault, Simulator

    sim = Simulator(seed=7, surveys=50, members=200)
    sim.faults.add(Fault.status(503, retry_after=1).on("bulk_invite", every=10))
    async with sim.client() as client:
        ...
    assert sim.ledger.check(outcomes).ok

It needs the extra `simulator`: `pip install 'sampling-async[simulator]'`. Names are loaded on first use, so
that the pytest plugin in this package costs nothing in test runs that do not use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sampling_async._contract.extras import install

if TYPE_CHECKING:
    from sampling_async._contract.records import AGE_BANDS, Participation
    from sampling_async.simulator._clock import Latency, VirtualClock
    from sampling_async.simulator._faults import Fault, FaultPlan, read_faults
    from sampling_async.simulator._generator import generate_inventory
    from sampling_async.simulator._ledger import Ledger, LedgerEntry, Lie, RequestRecord, Requests, Verdict
    from sampling_async.simulator._members import ProfileAnswer, SimulatedMember, generate_members
    from sampling_async.simulator._outbox import Notifying, Outbox, Posting
    from sampling_async.simulator._service import SimulatedPanel
    from sampling_async.simulator._simulator import Simulator
    from sampling_async.simulator._transport import SimulatorTransport

__all__ = [
    "AGE_BANDS",
    "Fault",
    "FaultPlan",
    "Latency",
    "Ledger",
    "LedgerEntry",
    "Lie",
    "Notifying",
    "Outbox",
    "Participation",
    "Posting",
    "ProfileAnswer",
    "RequestRecord",
    "Requests",
    "SimulatedMember",
    "SimulatedPanel",
    "Simulator",
    "SimulatorTransport",
    "Verdict",
    "VirtualClock",
    "generate_inventory",
    "generate_members",
    "read_faults",
]

_HOMES: Final = {
    "_clock": ("Latency", "VirtualClock"),
    "_faults": ("Fault", "FaultPlan", "read_faults"),
    "_generator": ("generate_inventory",),
    "_ledger": ("Ledger", "LedgerEntry", "Lie", "RequestRecord", "Requests", "Verdict"),
    "_members": ("AGE_BANDS", "Participation", "ProfileAnswer", "SimulatedMember", "generate_members"),
    "_outbox": ("Notifying", "Outbox", "Posting"),
    "_service": ("SimulatedPanel",),
    "_simulator": ("Simulator",),
    "_transport": ("SimulatorTransport",),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as exc:
        # The extra installs starlette. Any other missing module is a different error, and is raised unchanged.
        if (exc.name or "").partition(".")[0] != "starlette":
            raise
        raise ImportError(f"starlette is missing: {install('simulator')}") from exc


def __dir__() -> list[str]:
    return __all__
