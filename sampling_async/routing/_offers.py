"""Which quotas a member fits now, and what each is worth: from the live index and the store."""

from __future__ import annotations

import logging
from heapq import nlargest
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from anyio.lowlevel import checkpoint

from sampling_async._pacing.threads import in_thread
from sampling_async.notifications import StoreError
from sampling_async.notifications._entries import member_text
from sampling_async.notifications._rates import Rates, read_rates
from sampling_async.routing._history import DAY
from sampling_async.routing._links import Changes, apply
from sampling_async.routing._route import Offer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sampling_async import Survey
    from sampling_async.matching import LiveIndex, Member
    from sampling_async.notifications._sql import SqlStore
    from sampling_async.routing._history import Caps, MemberHistory

_LOG: Final = logging.getLogger("sampling_async.routing")
_POSSIBLE: Final = 0.5  # the chance of a quota that a member may match, beside one that it certainly does
_RATES_SECONDS: Final = 600.0  # after which the shares of completes are read again
_SLICE: Final = 100  # rows between two turns of the event loop
_UNDECIDED_SECONDS: Final = 3600.0  # for which an entered invite does not count for them


class OfferBook:
    """What is open, what it is worth, and what is known of members.

    Attributes:
        failure: Why the store could not be read the last time; empty if it could.
    """

    def __init__(
        self, live: LiveIndex, store: SqlStore, *, seconds: float, caps: Caps, clock: Callable[[], float]
    ) -> None:
        self.failure = ""
        self._live = live
        self._caps = caps
        self._clock = clock
        self._store = store
        self._seconds = seconds  # of links and ends that are known
        self._changes = Changes(store, seconds)
        self._histories: dict[str, MemberHistory] = {}
        self._read_on: float | None = None  # the UTC day on which all histories were read
        self._rates = Rates()
        self._rates_at = -inf

    async def follow(self) -> None:
        """Read what the store has got since the last time, from other processes too.

        Once a UTC day all is read anew: what is older than the router remembers goes.
        """
        now = self._clock()
        try:
            if self._read_on != now // DAY:
                self._histories = await in_thread(self._changes.all, now)
                self._read_on = now // DAY
            else:
                rows = await in_thread(self._changes.added, now)
                for begin in range(0, len(rows), _SLICE):
                    apply(rows[begin : begin + _SLICE], self._histories, now)
                    await checkpoint()
            if not self._rates_at <= now < self._rates_at + _RATES_SECONDS:
                # What was entered a moment ago has had no time to end.
                since, until = now - self._seconds, now - _UNDECIDED_SECONDS
                self._rates, self._rates_at = await in_thread(read_rates, self._store, since, until), now
        except StoreError as exc:
            self.failed(exc)
        else:
            self.failure = ""

    def failed(self, exc: StoreError) -> None:
        """Record that the store failed. It is logged once, until it can be read again."""
        if not self.failure:
            _LOG.warning("the links of members cannot be read or stored: %s", exc)
        self.failure = str(exc) or type(exc).__name__

    def learn(self, member_code: str, history: MemberHistory) -> None:
        """Take over what the store knows of a member."""
        self._histories[member_text(member_code)] = history

    def best(self, member: Member, most: int) -> list[Offer]:
        """Return what a member fits now, the best first, one quota a survey."""
        found: dict[int, _Valued] = {}
        for each in self._fitting(member):
            found.setdefault(each.survey.survey_id, each)
        return [each.offer() for each in nlargest(most, found.values(), key=lambda each: each.value)]

    def among(self, member: Member, quota_ids: Sequence[int]) -> list[Offer]:
        """Return those of some quotas that a member fits now, in their order."""
        found = {each.quota_id: each for each in self._fitting(member)}
        return [found[quota_id].offer() for quota_id in dict.fromkeys(quota_ids) if quota_id in found]

    def _fitting(self, member: Member) -> Iterator[_Valued]:
        """Yield the quotas that a member fits now, those that it certainly fits first."""
        history, now = self._histories.get(member_text(member.member_code)), self._clock()
        if history is not None and history.gets_nothing(self._caps, now):
            return
        chance, matched = self._rates.chance, self._live.match(member)
        for quotas, share in ((matched.certain, 1.0), (matched.possible, _POSSIBLE)):
            for target in quotas.targets():
                survey, quota_id = target.survey, target.quota.quota_id
                if history is None or history.allows(quota_id, survey.survey_id, now):
                    value = survey.price.amount * share * chance(survey.survey_id, survey.ir)
                    yield _Valued(value, quota_id, survey, share)


class _Valued(NamedTuple):
    """A quota that a member fits. Most of them become no offer."""

    value: float
    quota_id: int
    survey: Survey
    share: float

    def offer(self) -> Offer:
        survey = self.survey
        return Offer(
            quota_id=self.quota_id,
            survey_id=survey.survey_id,
            wave_id=survey.wave_id,
            loi=survey.loi,
            ir=survey.ir,
            price=survey.price,
            value=self.value,
            is_certain=self.share == 1,
            survey_name=survey.survey_name,
        )
