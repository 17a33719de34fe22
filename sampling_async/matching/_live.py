"""An index that follows an inventory that is watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from sampling_async._pacing.standing import Standing
from sampling_async._pacing.stepwise import let_go
from sampling_async._pacing.threads import in_thread
from sampling_async.matching._index import QuotaIndex

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sampling_async import QuotaWatch, WatchStatus
    from sampling_async._contract.records import Participation, Quotas
    from sampling_async._watch.changes import Key
    from sampling_async.matching._evaluate import Reason
    from sampling_async.matching._following import Following
    from sampling_async.matching._index import MatchResult, Member, Rank
    from sampling_async.matching._policy import MatchPolicy
    from sampling_async.matching._questions import Profile, QuestionKinds
    from sampling_async.notifications import Inbox


class LiveIndex(Standing):
    """A `QuotaIndex` that is always that of the newest inventory of a watch, while a block is open.

        async with client.watch_quotas() as watch, LiveIndex(watch) as live:
            await live.ready()
            matched = live.match(member)

    A new inventory is compiled in a thread, unchanged surveys are not compiled again, and the index is replaced
    between two turns of the event loop. What is closed at the watch is closed in the index at once. Recontact
    lists are carried over.

    Args:
        watch: The watch. Its block must be open.
        kinds: As for `QuotaIndex`.
        policy: As for `QuotaIndex`.
        rank: As for `QuotaIndex`.
    """

    _called = "live index"

    def __init__(
        self,
        watch: QuotaWatch,
        *,
        kinds: QuestionKinds | None = None,
        policy: MatchPolicy | None = None,
        rank: Rank | None = None,
    ) -> None:
        super().__init__()
        self._watch = watch
        self._kinds, self._policy, self._rank = kinds, policy, rank
        self._index: QuotaIndex | None = None
        self._version = 0  # of the board, when the inventory of the index was taken
        self._given: Quotas | None = None  # that inventory
        self._since = 0.0  # when the poll began that gave it
        self._moved: anyio.Event | None = None  # created only if the work has to wait

    def __repr__(self) -> str:
        age = "" if self.age is None else f", {self.age:.0f} s old"
        return f"<LiveIndex {self.status}{age}>"

    @property
    def index(self) -> QuotaIndex:
        """The newest index. Take it once for several questions that belong together.

        Raises:
            RuntimeError: There is none yet; `await live.ready()` waits for it.
        """
        if self._index is None:
            raise RuntimeError("there is no index yet: await live.ready() first")
        return self._index

    @property
    def status(self) -> WatchStatus:
        """How good the index is; see `WatchStatus`."""
        status = self._watch.status
        return "starting" if self._index is None and status != "failing" else status

    @property
    def age(self) -> float | None:
        """Seconds since the poll began that gave the inventory of the index; None without one."""
        age = self._watch.age
        if self._index is None or age is None:
            return None
        # The watch may be one poll ahead, while its inventory is being compiled.
        return age + self._watch.board.since - self._since

    async def ready(self) -> None:
        """Wait until there is an index. Bound it with `anyio.fail_after` or the like.

        Raises:
            RuntimeError: The live index or its watch has ended, or was not entered.
        """
        await self._until(lambda: self._index is not None)

    def match(
        self,
        profile: Profile | Member,
        *,
        device_type: int | None = None,
        exclude_surveys: Iterable[int] | None = None,
        participations: Iterable[Participation] | None = None,
        member_code: str | None = None,
    ) -> MatchResult:
        """Return the quotas that a member matches or may match now; see `QuotaIndex.match`.

        Args:
            profile: The member's answers, or a `Member`.
            device_type: The device that the member uses now.
            exclude_surveys: Surveys that the member must not be offered.
            participations: What the member took part in.
            member_code: The member's code.

        Raises:
            InvalidRequestError: An answer is not valid for its question.
            RuntimeError: There is no index yet.
        """
        return self.index.match(
            profile,
            device_type=device_type,
            exclude_surveys=exclude_surveys,
            participations=participations,
            member_code=member_code,
        )

    def explain(
        self,
        profile: Profile | Member,
        quota_id: int,
        *,
        device_type: int | None = None,
        exclude_surveys: Iterable[int] | None = None,
        participations: Iterable[Participation] | None = None,
        member_code: str | None = None,
    ) -> Reason:
        """Return the reasons why a member matches a quota now or not; see `QuotaIndex.explain`.

        Args:
            profile: The member's answers, or a `Member`.
            quota_id: The quota.
            device_type: See `match`.
            exclude_surveys: See `match`.
            participations: See `match`.
            member_code: See `match`.

        Raises:
            UnknownQuotaError: The index has no such quota.
            InvalidRequestError: An answer is not valid for its question.
            RuntimeError: There is no index yet.
        """
        return self.index.explain(
            profile,
            quota_id,
            device_type=device_type,
            exclude_surveys=exclude_surveys,
            participations=participations,
            member_code=member_code,
        )

    def follow(self, inbox: Inbox, *, after: int = 0) -> Following:
        """Return a block in which the notifications of an inbox take effect.

            async with live.follow(inbox): ...

        A quota or survey that is told to be closed is closed at once. A quota that is told to be live has the
        watch poll soon. Notifications that came before the newest poll began have no effect: that poll knew
        better.

        Args:
            inbox: The inbox. It must be open.
            after: The ID of the last fact that needs no look.
        """
        from sampling_async.matching._following import Following  # noqa: PLC0415  not all have an inbox

        return Following(self._watch, inbox, after)

    # --- The work

    def moved(self, keys: Iterable[Key]) -> None:  # noqa: ARG002  the watch says which quotas are closed
        """Learn that something looks different now, and close what is closed."""
        if self._index is not None and self._version == self._watch.board.version:
            self._close_in(self._index)
        elif self._index is not None:
            # The index is one poll behind. All that the newest poll does not show is closed.
            self._close_rest_in(self._index)
        self.ended()

    def ended(self) -> None:
        """Wake the work."""
        if self._moved is not None:
            self._moved.set()
            self._moved = None

    async def _work(self) -> None:
        board = self._watch.board
        board.add(self)
        try:
            while True:
                while self._version != board.version:
                    await self._compile()
                if board.is_over:
                    return
                self._moved = anyio.Event()
                await self._moved.wait()
        finally:
            board.remove(self)

    async def _compile(self) -> None:
        version, before = self._watch.board.version, self._index
        given, since = self._watch.given, self._watch.board.since
        index = await in_thread(self._made, given, before)
        if before is not None:
            index.carry_over(before)
        if version == self._watch.board.version:
            self._close_in(index)
        else:
            self._close_rest_in(index)
        # No await between the closing and this.
        old = [] if self._given is None else list(self._given.surveys)
        self._index, self._given, self._version, self._since = index, given, version, since
        self._progress.notify()
        del before, given
        await let_go(old)

    def _made(self, given: Quotas, before: QuotaIndex | None) -> QuotaIndex:
        if before is not None:
            return before.updated(given)
        return QuotaIndex(given, kinds=self._kinds, policy=self._policy, rank=self._rank)

    def _close_in(self, index: QuotaIndex) -> None:
        for quota_id in self._watch.hidden():
            index.close(quota_id)

    def _close_rest_in(self, index: QuotaIndex) -> None:
        view = self._watch.board.view or {}
        shown = {quota.quota_id for survey in view.values() for quota in survey.quotas}
        for quota_id in tuple(index.quota_ids):
            if quota_id not in shown:
                index.close(quota_id)
