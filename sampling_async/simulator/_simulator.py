"""The simulator: a whole sampling service in one object."""

from __future__ import annotations

import time
from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING, Any, Final

import anyio

from sampling_async import Quotas
from sampling_async._contract.checks import require_functions, require_instance, whole_number
from sampling_async._contract.records import safe_repr
from sampling_async.simulator._app import ServiceApp
from sampling_async.simulator._clock import Latency, WorkQueue
from sampling_async.simulator._faults import Fault, FaultPlan
from sampling_async.simulator._generator import generate_inventory
from sampling_async.simulator._ledger import Ledger
from sampling_async.simulator._live import LiveInventory
from sampling_async.simulator._members import SimulatedMember, generate_members
from sampling_async.simulator._outbox import Notifying, Outbox
from sampling_async.simulator._service import PanelState, Service, SimulatedPanel, new_panel
from sampling_async.simulator._transport import SimulatorTransport, listening

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from starlette.applications import Starlette

    from sampling_async import SamplingClient
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

    Everything follows from the seed and the order of the requests: Guids, inventory, members, invites, and the
    requests that faults apply to. Dates do not depend on today: `CacheExpires` of a generated inventory is a
    fixed day, and the scheduled dates lie around it.

    Args:
        seed: The seed of all random choices.
        surveys: The size of the generated inventory: surveys, with two to three quotas each on average.
        members: How many members the first panel gets, or the members themselves.
        inventory: An inventory to use as it is, instead of a generated one.
        latency: How long calls take.
        faults: The faults to begin with.
        sleep: The function that waits, for latency and faults; see `VirtualClock`.
        clock: The clock for the latency's queue and for the times of requests, in seconds.
        recontact_page_size: How many member codes a page holds by default.
        keep_requests: How many of the latest requests the ledger keeps; 0 or False for none.
        gzip: Whether bodies over 1 KB are compressed for clients that accept it.
        notifying: What notifications are sent, and how badly they are delivered; by default none.

    Attributes:
        faults: The plan of faults. Faults can be added and cleared at any time.
        ledger: Every invite and request of the service.
        notifications: The notifications of the service, to be delivered to an inbox or sent to URLs.
        app: The service as an ASGI application.
        base_url: The base URL for use in process, together with `transport()`.
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
        notifying: Notifying | None = None,
    ) -> None:
        whole_number(surveys, "surveys", least=0)
        if not isinstance(members, Iterable):
            whole_number(members, "members", least=0)
        whole_number(recontact_page_size, "recontact_page_size")
        if not isinstance(keep_requests, bool):
            whole_number(keep_requests, "keep_requests", least=0)
        require_instance(inventory, Quotas | None, "inventory", "a Quotas, such as generate_inventory(1)")
        require_instance(latency, Latency | None, "latency", "a Latency, such as Latency(workers=4)")
        require_instance(notifying, Notifying | None, "notifying", "a Notifying")
        require_instance(faults, Iterable, "faults", "several Faults, such as [Fault.status(503)]")
        require_instance(gzip, bool, "gzip", "True or False")
        require_functions(sleep=sleep, clock=clock)
        self._seed = seed
        self._inventory = generate_inventory(seed, surveys=surveys) if inventory is None else inventory
        self._live = LiveInventory(self._inventory)
        # True equals 1 in Python, so it is compared by identity: it means the default number, not 1.
        self.ledger: Final = Ledger(
            seed, keep_requests=KEPT_REQUESTS if keep_requests is True else keep_requests
        )
        self.faults: Final = FaultPlan(faults, seed=seed)
        self.notifications: Final = Outbox(
            notifying, seed=seed, began=self._inventory.cache_expires, clock=clock, sleep=sleep
        )
        for survey in self._live.surveys:
            self.notifications.begin(survey)
        self._service = Service(self._live, self.ledger, self.notifications, recontact_page_size)
        self._members_made = 0
        self.base_url: Final = "http://localhost"
        queue = WorkQueue(latency or Latency(), clock=clock)
        random = Random(f"{seed}/alterations")  # noqa: S311  no secret
        self.app: Final[Starlette] = ServiceApp(
            self._service, self.ledger, self.faults, queue, sleep, clock, gzip, random
        ).starlette()
        self.add_panel(members=members)

    @safe_repr
    def __repr__(self) -> str:
        size = f"quotas={len(self._live)} panels={len(self._service.panels)}"
        return f"<Simulator seed={self._seed!r} {size} {self.ledger!r}>"

    @property
    def panel_guid(self) -> str:
        """The Guid of the first panel."""
        return self.panels[0].panel_guid

    @property
    def api_key(self) -> str:
        """The key of the first panel."""
        return self.panels[0].api_key

    @property
    def members(self) -> Mapping[str, SimulatedMember]:
        """The members of the first panel, by member code."""
        return self.panels[0].members

    @property
    def panels(self) -> tuple[SimulatedPanel, ...]:
        """All panels, the first one first."""
        # As a list first: another thread may add a panel meanwhile.
        return tuple(state.panel for state in list(self._service.panels.values()))

    @property
    def inventory(self) -> Quotas:
        """What Get Quotas would return now: open quotas only, with their current counts."""
        with self._service.lock:
            return self._live.now()

    @property
    def recontact_quota_ids(self) -> tuple[int, ...]:
        """The IDs of the quotas of recontact surveys."""
        return tuple(each.quota.quota_id for each in self._live if each.survey.survey.is_survey_recontact)

    def add_panel(
        self, *, members: int | Iterable[SimulatedMember] = 200, api_key: str | None = None
    ) -> SimulatedPanel:
        """Add a panel with a new Guid. All panels share the inventory and its counts.

        Args:
            members: The members, or how many to generate. Generated members get codes that no other generated
                member of this simulator has.
            api_key: The key of the panel, for example that of another one: the panels of a partner often share
                a key. Default: a new one.
        """
        number = len(self._service.panels)
        if isinstance(members, int):
            first = self._members_made + 1
            self._members_made += members
            seed = f"{self._seed}/{number}"
            members = generate_members(seed, members=members, inventory=self._inventory, first=first)
        panel = new_panel(self._seed, number, members, api_key)
        state = PanelState(panel, quotas=len(self._live), recontacts=self.recontact_quota_ids, seed=self._seed)
        self.ledger.know_panel(panel.panel_guid)
        self._service.register(state)
        return panel

    def eligible(self, member_code: str, quota_id: int, *, panel_guid: str | None = None) -> int:
        """Return the result code that a request for the pair would get now; 1 means an invite. None is made."""
        return self._service.code(self._panel(panel_guid), member_code, quota_id)

    def close_quota(self, quota_id: int) -> None:
        """Close a quota: requests get QUOTA_NOT_LIVE from now on, and Get Quotas does not show it.

        Raises:
            KeyError: There is no such quota.
        """
        with self._service.lock:
            quota = self._live.named(quota_id)
            quota.is_live = False
            self._live.moved(quota)
            self.notifications.moved(quota.survey)

    def open_quota(self, quota_id: int, *, remaining: int | None = None) -> None:
        """Open a closed quota again; `remaining` sets the completes that it needs from now on.

        With `remaining` above 0, a full quota opens too. The survey then needs at least as many. By default the
        counts stay as they are.

        Raises:
            KeyError: There is no such quota.
        """
        with self._service.lock:
            quota = self._live.named(quota_id)
            quota.is_live = True
            quota.remaining = quota.remaining if remaining is None else remaining
            # With fewer completes than its quota, the survey would be full before the quota is.
            quota.survey.remaining = max(quota.survey.remaining, quota.remaining)
            self._live.moved(quota)
            self.notifications.moved(quota.survey)

    @property
    def notification_urls(self) -> Mapping[str, str] | None:
        """The URLs that Get Settings shows for the kinds of notifications; None for made-up ones."""
        return self._service.notification_urls

    @notification_urls.setter
    def notification_urls(self, urls: Mapping[str, str] | None) -> None:
        self._service.notification_urls = urls

    def set_recontact_members(
        self, quota_id: int, member_codes: Iterable[str], *, panel_guid: str | None = None
    ) -> None:
        """Replace the recontact list of a quota of a recontact survey, by default for the first panel.

        The codes need not belong to members of the panel.

        Raises:
            ValueError: The quota does not belong to a recontact survey.
        """
        if quota_id not in self.recontact_quota_ids:
            raise ValueError(
                f"quota {quota_id} does not belong to a recontact survey; sim.recontact_quota_ids lists those "
                "that do"
            )
        with self._service.lock:
            self._panel(panel_guid).set_recontact(quota_id, member_codes)

    def transport(self) -> SimulatorTransport:
        """Return an httpx transport that calls the service in process, on asyncio or trio."""
        return SimulatorTransport(self.app)

    def client(self, **overrides: Any) -> SamplingClient:
        """Return an in-process client of the first panel; `overrides` are arguments of `SamplingClient`."""
        from sampling_async import SamplingClient  # noqa: PLC0415  the service needs no client

        arguments: dict[str, Any] = {
            "panel_guid": self.panel_guid,
            "api_key": self.api_key,
            "transport": self.transport(),
            **overrides,
        }
        return SamplingClient(arguments.pop("base_url", self.base_url), **arguments)

    def serve(self, *, port: int = 0) -> AbstractContextManager[str]:
        """Serve over HTTP on 127.0.0.1 in a thread during a `with` block, which yields the base URL."""
        from sampling_async.simulator._server import served  # noqa: PLC0415  uvicorn is for sockets only

        return served(self.app, port=port)

    def run(self, *, port: int = 8000, host: str = "127.0.0.1", listener: socket.socket | None = None) -> None:
        """Serve over HTTP in this thread until a signal (Ctrl-C) ends it.

        Args:
            port: The port to listen on; 0 for any free one.
            host: The address to listen on.
            listener: A socket that listens already, in place of both. It is closed at the end.
        """
        from sampling_async.simulator._server import run  # noqa: PLC0415  uvicorn is for sockets only

        run(self.app, listener or listening(host, port))

    def _panel(self, panel_guid: str | None) -> PanelState:
        guid = self.panel_guid if panel_guid is None else panel_guid
        return self._service.panels[guid.lower()]
