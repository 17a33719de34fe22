"""The simulator: a sampling service to work against, whole in one object."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import anyio

from sampling_async.simulator._app import ServiceApp
from sampling_async.simulator._faults import Fault, FaultPlan
from sampling_async.simulator._generator import generate_inventory
from sampling_async.simulator._latency import Latency, WorkQueue
from sampling_async.simulator._ledger import Ledger
from sampling_async.simulator._live import LiveInventory, LiveQuota
from sampling_async.simulator._members import SimulatedMember, generate_members
from sampling_async.simulator._panels import PanelState, SimulatedPanel, new_panel
from sampling_async.simulator._service import Service, recontact_quota_ids
from sampling_async.simulator._transport import SimulatorTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from starlette.applications import Starlette

    from sampling_async import SamplingClient
    from sampling_async._models import Quotas
    from sampling_async.simulator._transport import Sleep

KEPT_REQUESTS: Final = 10_000


class Simulator:
    """A sampling service with an inventory, panels, faults and a ledger of everything it did.

        sim = Simulator(seed=7, surveys=50, faults=[Fault.cut(when="after").on("bulk_invite", every=10)])
        async with sim.client() as client:              # in process
            result = await client.bulk_invite(...)
        assert sim.ledger.check(result).ok

        with sim.serve() as base_url:                   # over a real socket
            ...

    Everything follows from the seed and the order of the requests: Guids, inventory, members, invites and which
    requests faults strike. Only `CacheExpires` and the scheduled dates are fixed.

    Args:
        seed: What everything follows from.
        surveys: The size of the generated inventory: surveys, with two to three quotas each on average.
        members: How many members to generate, or the members themselves; of the first panel.
        inventory: An inventory to use as it is, in place of a generated one.
        latency: What calls cost in time.
        faults: The first faults of the plan.
        sleep: What lets time pass, for latency and faults.
        clock: The seconds that the queue of the latency's workers goes by.
        recontact_page_size: How many member codes a page holds when the request does not say.
        keep_requests: How many of the latest requests the ledger keeps; 0 or False for none.
        gzip: Whether bodies over 1 KB are compressed for clients that accept it.

    Attributes:
        faults: The plan of faults; add and clear at any time.
        ledger: What was done.
        app: The service as an ASGI application.
        base_url: The base URL for use in process, by way of `transport()`.
    """

    def __init__(
        self,
        seed: int | str = 0,
        *,
        surveys: int = 20,
        members: int | Iterable[SimulatedMember] = 200,
        inventory: Quotas | None = None,
        latency: Latency | None = None,
        faults: Iterable[Fault] = (),
        sleep: Sleep = anyio.sleep,
        clock: Callable[[], float] = time.monotonic,
        recontact_page_size: int = 10_000,
        keep_requests: int | bool = KEPT_REQUESTS,
        gzip: bool = True,
    ) -> None:
        if surveys < 0 or recontact_page_size < 1 or (isinstance(members, int) and members < 0):
            raise ValueError("surveys and members are at least 0, recontact_page_size is at least 1")
        self._seed = seed
        self._inventory = generate_inventory(seed, surveys=surveys) if inventory is None else inventory
        self._live = LiveInventory(self._inventory)
        self.ledger: Final = Ledger(
            seed, keep_requests=KEPT_REQUESTS if keep_requests is True else keep_requests
        )
        self.faults: Final = FaultPlan(faults, seed=seed)
        self._service = Service(self._live, self.ledger, recontact_page_size=recontact_page_size)
        self._panels: list[PanelState] = []
        self._members_made = 0
        self.base_url: Final = "http://localhost"
        self.app: Final[Starlette] = ServiceApp(
            self._service,
            ledger=self.ledger,
            faults=self.faults,
            queue=WorkQueue(latency or Latency(), clock=clock),
            sleep=sleep,
            gzip=gzip,
            seed=seed,
        ).starlette()
        self.add_panel(members=members)

    def __repr__(self) -> str:
        size = f"quotas={len(self._live)} panels={len(self._panels)}"
        return f"<Simulator seed={self._seed!r} {size} {self.ledger!r}>"

    @property
    def panel_guid(self) -> str:
        """The Guid of the first panel."""
        return self._panels[0].panel.panel_guid

    @property
    def api_key(self) -> str:
        """The key of the first panel."""
        return self._panels[0].panel.api_key

    @property
    def members(self) -> Mapping[str, SimulatedMember]:
        """The members of the first panel, by member code."""
        return self._panels[0].panel.members

    @property
    def panels(self) -> tuple[SimulatedPanel, ...]:
        """All panels, the first one first."""
        return tuple(state.panel for state in self._panels)

    @property
    def inventory(self) -> Quotas:
        """What Get Quotas would return now: open quotas only, with their present counts."""
        with self._service.lock:
            return self._live.now()

    @property
    def recontact_quota_ids(self) -> tuple[int, ...]:
        """The quotas of recontact surveys."""
        return recontact_quota_ids(self._live)

    def add_panel(self, *, members: int | Iterable[SimulatedMember] = 200) -> SimulatedPanel:
        """Add a panel with a Guid and key of its own; it shares the inventory and its counts.

        Generated members have codes that no other generated member of this simulator has.
        """
        number = len(self._panels)
        if isinstance(members, int):
            first = self._members_made + 1
            self._members_made += members
            seed = f"{self._seed}/{number}"
            members = generate_members(seed, members=members, inventory=self._inventory, first=first)
        panel = new_panel(self._seed, number, members)
        state = PanelState(panel, quotas=len(self._live), recontacts=self.recontact_quota_ids, seed=self._seed)
        self._panels.append(state)
        self.ledger.know_panel(panel.panel_guid)
        self._service.register(state)
        return panel

    def eligible(self, member_code: str, quota_id: int, *, panel_guid: str | None = None) -> int:
        """Return the result code that a request for the pair would get now; nothing is created.

        Args:
            member_code: The member.
            quota_id: The quota.
            panel_guid: The member's panel, if not the first.
        """
        return self._service.code(self._panel(panel_guid), member_code, quota_id)

    def close_quota(self, quota_id: int) -> None:
        """Close a quota: QUOTA_NOT_LIVE from now on, and out of Get Quotas.

        Raises:
            KeyError: There is no such quota.
        """
        with self._service.lock:
            quota = self._live.named(quota_id)
            quota.is_live = False
            self._live.moved(quota)

    def open_quota(self, quota_id: int, *, remaining: int | None = None) -> None:
        """Open a closed quota again.

        Args:
            quota_id: The quota.
            remaining: Completes that remain to it from now on, for instance to reopen a full one. Its survey is
                given at least as many. By default the counts stay as they are.

        Raises:
            KeyError: There is no such quota.
        """
        with self._service.lock:
            quota = self._live.named(quota_id)
            quota.is_live = True
            _give(quota, quota.remaining if remaining is None else remaining)
            self._live.moved(quota)

    def set_recontact_members(
        self, quota_id: int, member_codes: Iterable[str], *, panel_guid: str | None = None
    ) -> None:
        """Replace the recontact list of a quota of a recontact survey.

        Args:
            quota_id: The quota.
            member_codes: The codes wanted; they need not be members of the panel.
            panel_guid: The panel whose list it is, if not the first.

        Raises:
            ValueError: The quota is not one of a recontact survey.
        """
        if quota_id not in self.recontact_quota_ids:
            raise ValueError(f"quota {quota_id} is not of a recontact survey; see sim.recontact_quota_ids")
        with self._service.lock:
            self._panel(panel_guid).set_recontact(quota_id, member_codes)

    def transport(self) -> SimulatorTransport:
        """Return an httpx transport that asks the service in process, on asyncio or trio."""
        return SimulatorTransport(self.app)

    def client(self, **overrides: Any) -> SamplingClient:
        """Return a client of the first panel that works in process.

        Args:
            **overrides: Further arguments of `SamplingClient`, or other values for those given here.
        """
        from sampling_async import SamplingClient  # noqa: PLC0415  the service needs no client

        arguments: dict[str, Any] = {
            "panel_guid": self.panel_guid,
            "api_key": self.api_key,
            "transport": self.transport(),
            **overrides,
        }
        return SamplingClient(arguments.pop("base_url", self.base_url), **arguments)

    def serve(self, *, port: int = 0) -> AbstractContextManager[str]:
        """Serve over HTTP on 127.0.0.1, from a thread, as long as the block lasts; gives the base URL.

        Args:
            port: The port; 0 for a free one.
        """
        from sampling_async.simulator._server import served  # noqa: PLC0415  uvicorn is for sockets only

        return served(self.app, port=port)

    def run(self, *, port: int = 8000, host: str = "127.0.0.1") -> None:
        """Serve over HTTP in this thread until a signal (Ctrl-C) ends it."""
        from sampling_async.simulator._server import run  # noqa: PLC0415  uvicorn is for sockets only

        run(self.app, host=host, port=port)

    def _panel(self, panel_guid: str | None) -> PanelState:
        return self._panels[0] if panel_guid is None else self._service.panel(panel_guid)


def _give(quota: LiveQuota, remaining: int) -> None:
    quota.remaining = remaining
    quota.survey.remaining = max(quota.survey.remaining, remaining)
