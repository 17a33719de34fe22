"""An index that follows an inventory that is watched."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Self, Unpack

import anyio

from sampling_async import QuotaWatch
from sampling_async._contract.checks import number_from_0, require_functions, require_instance
from sampling_async._pacing.background import BackgroundService
from sampling_async._pacing.loops import Notifier
from sampling_async._pacing.steps import let_go
from sampling_async._pacing.threads import in_thread
from sampling_async._watch.changes import key_of
from sampling_async.matching._index import QuotaIndex, require_kinds_and_policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from sampling_async import Quotas, WatchStatus
    from sampling_async._following import Following
    from sampling_async._watch.changes import Key
    from sampling_async.matching._conditions import MatchPolicy, Profile, QuestionKinds
    from sampling_async.matching._evaluate import Reason
    from sampling_async.matching._index import Member, MemberOptions
    from sampling_async.matching._result import MatchResult
    from sampling_async.matching._segment import Rank
    from sampling_async.notifications import Inbox


_LOG: Final = logging.getLogger("sampling_async.matching")


class LiveIndex(BackgroundService):
    """A `QuotaIndex` that is always that of the newest inventory of a watch, while a block is open.

        async with client.watch_quotas() as watch, LiveIndex(watch) as live:
            await live.ready()
            matched = live.match(member)

    A new inventory is compiled in a thread, unchanged surveys are not compiled again, and the index is replaced
    between two turns of the event loop. What is closed at the watch is closed in the index at once. Recontact
    lists are carried over. If an inventory cannot be compiled, for example because `rank` raises, the error is
    logged. The previous index stays in use, without the quotas that have closed, and the next inventory is
    tried. If there is no index yet, the error ends the work.

    Args:
        watch: The watch. Its block must be open.
        kinds, policy, rank: As for `QuotaIndex`.

    Attributes:
        last_error: Why the last inventory could not be compiled; None if it was.
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
        require_instance(watch, QuotaWatch, "watch", "a QuotaWatch, which client.watch_quotas() returns")
        require_kinds_and_policy(kinds, policy)
        require_functions(rank=rank, or_none=True)
        super().__init__()
        self._watch = watch
        self._kinds, self._policy, self._rank = kinds, policy, rank
        self.last_error: Exception | None = None
        self._index: QuotaIndex | None = None
        self._quotas: dict[Key, list[int]] = {}  # the quotas of each survey of the index
        self._version = 0  # of the board, when the latest inventory was taken to be compiled
        self._given: Quotas | None = None  # that inventory
        self._since = 0.0  # when the poll began that gave it
        self._moved = Notifier()

    def __repr__(self) -> str:
        age = "" if self.age is None else f", {self.age:.0f} s old"
        return f"<LiveIndex {self.status}{age}>"

    @property
    def index(self) -> QuotaIndex:
        """The newest index, in which quotas may close at any moment; see `snapshot`.

        Raises:
            RuntimeError: There is none yet; `await live.ready()` waits for it.
        """
        if self._index is None:
            raise RuntimeError("there is no index yet: await live.ready() first")
        return self._index

    def snapshot(self) -> QuotaIndex:
        """Return the newest index as it is now, for several questions that belong together.

        Raises:
            RuntimeError: There is no index yet.
        """
        return self.index.snapshot()

    @property
    def status(self) -> WatchStatus:
        """How current the index is; see `WatchStatus`."""
        # Once the work has ended, no newer inventory will come.
        if self._finished:
            return "failing"
        return self._watch.judged(self.age, has_failed=self.last_error is not None)

    @property
    def age(self) -> float | None:
        """Seconds since the poll of the index's inventory began; None without an inventory."""
        age = self._watch.age
        if self._index is None or age is None:
            return None
        # The watch may be one poll ahead, while its inventory is being compiled.
        return age + self._watch.board.since - self._since

    async def ready(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  as users expect
        """Wait until there is an index.

        Args:
            timeout: The most seconds to wait; None for as long as it takes.

        Raises:
            TimeoutError: There is none after `timeout` seconds.
            RuntimeError: The live index or its watch has ended, or was not entered.
        """
        with anyio.fail_after(None if timeout is None else number_from_0(timeout, "timeout", "seconds")):
            await self._until(lambda: self._index is not None)

    def is_open(self, quota_id: int) -> bool:
        """Return whether the watch shows a quota as open now."""
        return self._watch.is_open(quota_id)

    def close_quota(self, quota_id: int) -> bool:
        """Close a quota at the watch, as after a notification; see `QuotaWatch.close_quota`."""
        return self._watch.close_quota(quota_id)

    def close_survey(self, survey_id: int, wave_id: int | None = None) -> bool:
        """Close a survey at the watch, or one wave of it; see `QuotaWatch.close_survey`."""
        return self._watch.close_survey(survey_id, wave_id)

    def match(self, profile: Profile | Member, **options: Unpack[MemberOptions]) -> MatchResult:
        """Return the quotas that a member matches or may match now; see `QuotaIndex.match`.

        Raises:
            InvalidRequestError: An answer is not valid for its question.
            RuntimeError: There is no index yet.
        """
        return self.index.match(profile, **options)

    def explain(self, profile: Profile | Member, quota_id: int, **options: Unpack[MemberOptions]) -> Reason:
        """Return the reasons why a member matches a quota now or not; see `QuotaIndex.explain`.

        Raises:
            UnknownQuotaError: The index has no such quota.
            InvalidRequestError: An answer is not valid for its question.
            RuntimeError: There is no index yet.
        """
        return self.index.explain(profile, quota_id, **options)

    def follow(self, inbox: Inbox, *, after: int = 0) -> Following:
        """Return a block in which the notifications of an open inbox take effect.

            async with live.follow(inbox): ...

        A notification that a quota or survey has closed closes it at once. One that a quota is live has the
        watch poll soon. Notifications that came before the newest poll began have no effect: that poll is
        newer. `after` is the ID of the last fact to skip, for example `Following.after` of an earlier block.
        """
        from sampling_async._following import Following  # noqa: PLC0415  not all have an inbox

        return Following(self._watch, inbox, after)

    # --- The work

    async def __aenter__(self) -> Self:
        self._watch.must_be_entered()
        await super().__aenter__()
        # Until the block is left, even if the work fails: closings always take effect.
        self._watch.board.add(self)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.board.remove(self)
        await super().__aexit__(exc_type, exc, traceback)

    def moved(self, keys: Iterable[Key]) -> None:
        """Record which surveys have changed, and close the quotas that they do not show any longer."""
        if self._index is not None:
            for key in keys:
                self._close_rest_of(key, self._index, self._quotas)
        self.ended()

    def ended(self) -> None:
        """Wake the work."""
        self._moved.notify()

    async def _work(self) -> None:
        board = self._watch.board
        while True:
            while self._version != board.version:
                await self._compile()
            if board.is_over:
                return
            await self._moved.wait()

    async def _compile(self) -> None:
        version = self._version = self._watch.board.version
        before = self._index
        given, since = self._watch.given, self._watch.board.since
        try:
            index, quotas = await in_thread(self._made, given, before)
        except Exception as exc:
            if before is None:
                raise
            self.last_error = exc.with_traceback(None)
            _LOG.exception("an inventory cannot be compiled, and the index before it stays")
            return
        self.last_error = None
        if before is not None:
            index.carry_over(before)
        if version == self._watch.board.version:
            for quota_id in self._watch.hidden():
                index.close(quota_id)
        else:
            # A newer inventory came meanwhile. Close all quotas that it does not show.
            for key in quotas:
                self._close_rest_of(key, index, quotas)
        # No await between the closing and this.
        old = [] if self._given is None else list(self._given.surveys)
        self._index, self._quotas, self._given, self._since = index, quotas, given, since
        self._progress.notify()
        del before, given
        await let_go(old)

    def _made(self, given: Quotas, before: QuotaIndex | None) -> tuple[QuotaIndex, dict[Key, list[int]]]:
        """Return the index of an inventory, and the quotas of each survey. It runs in a thread."""
        if before is not None:
            index = before.updated(given)
        else:
            index = QuotaIndex(given, kinds=self._kinds, policy=self._policy, rank=self._rank)
        quotas: dict[Key, list[int]] = {}
        for survey in given.surveys:
            quotas.setdefault(key_of(survey), []).extend(quota.quota_id for quota in survey.quotas)
        return index, quotas

    def _close_rest_of(self, key: Key, index: QuotaIndex, quotas: Mapping[Key, Iterable[int]]) -> None:
        """Close the quotas of a survey that are not shown any longer."""
        survey = (self._watch.board.view or {}).get(key)
        shown = set() if survey is None else {quota.quota_id for quota in survey.quotas}
        for quota_id in quotas.get(key, ()):
            if quota_id not in shown:
                index.close(quota_id)
