"""The simulator in its own process: it costs the measured process nothing, and survives when that is killed."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from peers.common import Address
from speed.remote import remote

from sampling_async import Price, Quota, Quotas, Survey
from sampling_async.simulator import SimulatedMember, Simulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from speed.remote import Remote as Process

P = ParamSpec("P")
T = TypeVar("T")

PLENTY = 10**9
FIRST_QUOTA = 5_000_000
FIRST_SURVEY = 2_000_000


class Remote:
    """A simulator in another process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.address: Address = process.call("start")

    def ask(self, function: Callable[Concatenate[Simulator, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of a module with the simulator, in the other process, and return its result."""
        result: T = self._process.call("ask", function, args, kwargs)
        return result


@contextmanager
def service(build: Callable[P, Simulator], *args: P.args, **kwargs: P.kwargs) -> Iterator[Remote]:
    """Run a simulator in its own process.

    Args:
        build: A function of a module. It makes the simulator in the other process.
        args: Its arguments.
        kwargs: Its arguments.
    """
    with remote(_Simulated, build, args, kwargs) as process:
        yield Remote(process)


class _Simulated:
    def __init__(self, build: Callable[..., Simulator], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._simulator = build(*args, **kwargs)
        self._serving = ExitStack()

    def start(self) -> Address:
        url = self._serving.enter_context(self._simulator.serve())
        return Address(url, self._simulator.panel_guid, self._simulator.api_key)

    def ask(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        return function(self._simulator, *args, **kwargs)

    def stop(self) -> None:
        self._serving.close()


def open_inventory(quotas: int, *, refused_every: int = 0, recontacts: int = 0) -> Quotas:
    """Return an inventory of surveys with one quota each, open to every member.

    Generated inventories refuse most members, like real ones. Here invites are needed, because only an invite
    can be lost or made twice.

    Args:
        quotas: The number of quotas.
        refused_every: With n, every nth quota is for a device that no member has; 0 for none.
        recontacts: The number of quotas of recontact surveys. They are the first ones.
    """
    surveys = []
    for number in range(quotas):
        is_refused = refused_every and number % refused_every == 0
        surveys.append(
            Survey(
                survey_id=FIRST_SURVEY + number,
                survey_name=f"Survey {number}",
                wave_id=1,
                loi=10,
                ir=50,
                study_type_id=1,
                scheduled_completion_date=datetime(2030, 1, 1, tzinfo=UTC),
                device_type_ids=(9,) if is_refused else (1,),
                is_survey_recontact=number < recontacts,
                completes_required=PLENTY,
                estimated_completes_remaining=PLENTY,
                price=Price(amount=1.0, currency_id=1),
                quotas=(
                    Quota(
                        quota_id=FIRST_QUOTA + number,
                        completes_required=PLENTY,
                        estimated_completes_remaining=PLENTY,
                        layers=(),
                    ),
                ),
                survey_wave_exclusions=(),
            )
        )
    return Quotas(country_id=1, cache_expires=datetime(2030, 1, 1, tzinfo=UTC), surveys=tuple(surveys))


def open_members(count: int) -> list[SimulatedMember]:
    """Return members who all match the open inventory."""
    return [SimulatedMember(f"m{number:06}") for number in range(1, count + 1)]
