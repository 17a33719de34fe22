"""The rules of a store, which SQLite and PostgreSQL keep."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from notifications_kit import encoded, entries_of

from sampling_async.notifications import Kind, State, UnknownNotification, Validity
from sampling_async.notifications._facts import Hit, Receipt, Settled
from sampling_async.notifications._stores import in_transaction, store_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from sampling_async.notifications import Fact, Notification, SqlStore

_DAY: Final = 1_795_341_660.0  # 2026-11-22 10:01:00 UTC, after the times below
_MEMBER: Final = {"UniqueCode": "m-1", "SurveyId": 2401, "WaveId": 77, "QuotaID": 1100}
_COMPLETION: Final = {**_MEMBER, "Revenue": 150}
_CORRECTED: Final = {**_MEMBER, "Revenue": 75}
_TERMINATE: Final = {**_MEMBER, "Reason": "SCREENED_OUT"}
_ALL: Final = (*Kind, None)
_AT_ONCE: Final = 4
_EACH: Final = 25


class TestRules:
    """The rules of a store, a method each; each gets a new one."""

    @pytest.fixture(autouse=True)
    def _address(self, new_address) -> None:
        self._new_address = new_address

    def new_store(self) -> SqlStore:
        return store_of(self._new_address())

    # --- Transactions

    def test_a_transaction_is_whole_or_not_there(self) -> None:
        """If the block of a transaction is left by an exception, nothing of it stays."""
        with _opened(self.new_store()) as store:

            def store_and_fail() -> None:
                with store.transaction():
                    _receive(store, "completion", _COMPLETION)
                    raise LookupError

            with pytest.raises(LookupError):
                store_and_fail()
            assert _facts(store) == []
            assert _put(store, "completion", _COMPLETION) == ["new"]

    def test_a_check_for_writing_changes_nothing(self) -> None:
        """`check_writable` leaves the store as it was."""
        with _opened(self.new_store()) as store:
            _put(store, "completion", _COMPLETION)
            in_transaction(store, lambda each: each.check_writable())
            assert [fact.receipts for fact in _facts(store)] == [1]

    def test_what_was_stored_is_there_when_the_store_is_opened_again(self) -> None:
        """Everything is kept: facts, their states, and secrets. A store may be opened again after `close`."""
        store = self.new_store()
        with _opened(store):
            _put(store, "completion", _COMPLETION)
            _settle(store, _claim(store)[0])
            with store.transaction():
                secrets = store.secrets({kind: f"secret of {kind}" for kind in Kind})
        with _opened(store):
            assert [fact.state for fact in _facts(store)] == [State.HANDLED]
            with store.transaction():
                assert store.secrets(dict.fromkeys(Kind, "another")) == secrets

    # --- Facts

    def test_a_repetition_is_counted_and_is_no_fact(self) -> None:
        """An entry with the `identity` of a fact is a repetition; with another `content` it differs."""
        with _opened(self.new_store()) as store:
            assert _put(store, "completion", _COMPLETION) == ["new"]
            assert _put(store, "completion", _COMPLETION, at=_DAY + 1) == ["repeated"]
            assert _put(store, "completion", {**_COMPLETION, "SurveyRef": "S"}) == ["differs"]
            (fact,) = _facts(store)
            assert (fact.receipts, fact.differing, fact.received_at.timestamp()) == (3, 1, _DAY)
            assert fact.fields == _COMPLETION

    def test_a_hit_may_have_any_number_of_entries(self) -> None:
        """A list of notifications gives a fact each; a refused hit has none, and only its receipt is kept."""
        with _opened(self.new_store()) as store:
            several = [{**_COMPLETION, "UniqueCode": f"m-{number}"} for number in range(70)]
            assert _put(store, "completion", [*several, several[0]]) == [*["new"] * 70, "repeated"]
            with store.transaction():
                assert store.receive_all([Hit(Receipt(Kind.COMPLETION, _DAY, b"?"), (), "refused")]) == [[]]
            assert len(_facts(store)) == 70

    def test_the_key_of_a_fact_stays(self) -> None:
        """`Fact.key` is the `fact_key` of the entry that came first, whatever is changed or moved later."""
        without_wave = {name: value for name, value in _COMPLETION.items() if name != "WaveId"}
        with _opened(self.new_store()) as store:
            receipt, entries = _read("completion", without_wave)
            with store.transaction():
                store.receive_all([Hit(receipt, entries)])
            for later in (without_wave, _COMPLETION, _CORRECTED, _TERMINATE):
                _put(store, "terminate" if "Reason" in later else "completion", later)
            keys = [fact.key for fact in _facts(store)]
            assert keys[0] == entries[0].fact_key
            assert (len(keys), len(set(keys))) == (3, 3)

    def test_another_revenue_is_a_correction(self) -> None:
        """A second completion of a key is a fact of its own, whose `corrects` is the first one's ID."""
        with _opened(self.new_store()) as store:
            for fields in (_COMPLETION, _CORRECTED, _COMPLETION):
                _put(store, "completion", fields)
            first, correction = _facts(store)
            assert (first.corrects, correction.corrects) == (None, first.id)

    def test_a_completion_outranks_a_terminate(self) -> None:
        """A terminate of a key with a completion is `OVERRULED` and `SKIPPED`, whichever came first."""
        for order in ((_COMPLETION, _TERMINATE), (_TERMINATE, _COMPLETION)):
            with _opened(self.new_store()) as store:
                verdicts = [_put(store, _kind_of(fields), fields)[0] for fields in order]
                assert verdicts == ["new", "new" if order[0] is _TERMINATE else "overruled"]
                found = {fact.kind: (fact.validity, fact.state) for fact in _facts(store)}
                assert found[Kind.TERMINATE] == (Validity.OVERRULED, State.SKIPPED)
                assert found[Kind.COMPLETION] == (Validity.STANDS, State.PENDING)

    def test_a_terminate_that_a_handler_has_seen_is_corrected(self) -> None:
        """A completion then makes one more fact: a terminate, `OVERRULED`, whose `corrects` is the first."""
        for is_settled in (True, False):
            with _opened(self.new_store()) as store:
                _put(store, "terminate", _TERMINATE)
                (terminate,) = _claim(store)
                if is_settled:
                    _settle(store, terminate)
                _put(store, "completion", _COMPLETION)
                _put(store, "completion", _CORRECTED)
                if not is_settled:
                    assert _claim(store) == []  # it is still with its handler
                    _settle(store, terminate)
                handled = []
                while claimed := _claim(store):
                    handled += claimed
                    _settle(store, claimed[0])
                assert [fact.kind for fact in handled] == ["completion", "terminate", "completion"]
                assert (handled[1].corrects, handled[1].validity) == (terminate.id, Validity.OVERRULED)
                assert len({terminate.key, *(fact.key for fact in handled)}) == 4

    def test_the_entry_with_the_highest_rank_of_a_key_stands(self) -> None:
        """Where entries have a `rank`, all facts of a key but the one with the highest are `STALE`."""
        with _opened(self.new_store()) as store:
            verdicts = [_put(store, "quota_status", _status(second))[0] for second in (5, 9, 7)]
            assert verdicts == ["new", "new", "stale"]
            assert [fact.validity for fact in _facts(store)] == [
                Validity.STALE,
                Validity.STANDS,
                Validity.STALE,
            ]

    def test_ends_with_and_without_their_wave_are_one(self) -> None:
        """See `SurveyEnd`: an end without a wave belongs to the wave of the member's other ends."""
        without = {name: value for name, value in _COMPLETION.items() if name != "WaveId"}
        for first, second in ((without, _COMPLETION), (_COMPLETION, without)):
            with _opened(self.new_store()) as store:
                assert _put(store, "completion", first) == ["new"]
                assert _put(store, "completion", second) == ["differs"]
                other = {**without, "QuotaID": 2200}
                assert _put(store, "completion", other) == ["new"]  # of another quota
                assert len({fact.key for fact in _facts(store)}) == 2

    def test_hits_may_come_together(self) -> None:
        """They become what they become one by one."""
        posted = [("terminate", _TERMINATE), ("completion", _COMPLETION), ("completion", _CORRECTED)]
        posted += [("completion", {**_COMPLETION, "UniqueCode": f"m-{number % 40}"}) for number in range(90)]
        posted += [("quota_status", _status(second)) for second in (5, 9, 7)]
        found = []
        for is_together in (True, False):
            with _opened(self.new_store()) as store, store.transaction():
                hits = [Hit(*_read(kind, fields)) for kind, fields in posted]
                if is_together:
                    store.receive_all(hits)
                else:
                    for hit in hits:
                        store.receive_all([hit])
            with _opened(store):
                found.append([(fact.key, fact.receipts, fact.validity) for fact in _facts(store)])
        assert found[0] == found[1]

    def test_any_text_can_be_stored(self) -> None:
        """Member codes and fields may hold zeros, line ends and other characters, and be long."""
        codes = ["\0", "a\n", "'; --", "%s", "😀" * 400]
        with _opened(self.new_store()) as store:
            for code in codes:
                fields = {**_COMPLETION, "UniqueCode": code}
                assert _put(store, "completion", {**fields, "SurveyRef": code * 999}) == ["new"]
                assert _put(store, "completion", fields) == ["differs"]
            found: list[Any] = [fact.notification for fact in _facts(store)]
            assert [completion.member_code for completion in found] == codes
            assert _put(store, "terminate", {**_TERMINATE, "UniqueCode": "\ud800"}) == ["new"]

    def test_what_is_not_understood_is_kept_with_its_bytes(self) -> None:
        """It is a fact of the kind None, and has the body of its receipt."""
        with _opened(self.new_store()) as store:
            _put(store, "completion", b"\xff\0?")
            ((fact),) = _claim(store)
            assert (fact.kind, fact.posted_as) == (None, Kind.COMPLETION)
            assert isinstance(fact.notification, UnknownNotification)
            assert fact.notification.body == b"\xff\0?"

    # --- Handlers

    def test_a_fact_is_leased_to_one_owner(self) -> None:
        """Nobody else gets it before its lease ends. A new lease is one attempt more."""
        with _opened(self.new_store()) as store:
            _put(store, "completion", _COMPLETION)
            (fact,) = _claim(store, "a")
            assert _claim(store, "b", now=_DAY + 4) == []
            (again,) = _claim(store, "b", now=_DAY + 5)
            assert (fact.attempts, again.attempts, again.id) == (1, 2, fact.id)
            assert _settle(store, fact, owner="a") is False  # it is not theirs any more
            assert _settle(store, again, owner="b") is True
            assert _claim(store, "a", now=_DAY + 99) == []

    def test_a_lease_is_prolonged_and_ended_by_its_owner_only(self) -> None:
        """`release` does not count the attempt."""
        with _opened(self.new_store()) as store:
            _put(store, "completion", _COMPLETION)
            (fact,) = _claim(store, "a")
            with store.transaction():
                store.extend("a", [fact.id], _DAY + 100)
                store.extend("b", [fact.id], _DAY)
                store.release("b")
            assert _claim(store, "b", now=_DAY + 99) == []
            with store.transaction():
                store.release("a")
            assert [again.attempts for again in _claim(store, "b")] == [1]

    def test_facts_of_a_key_come_one_after_the_other(self) -> None:
        """In the order of their arrival, also if the first is put off. Other keys do not wait."""
        with _opened(self.new_store()) as store:
            for fields in (_COMPLETION, _CORRECTED, {**_COMPLETION, "UniqueCode": "m-2"}):
                _put(store, "completion", fields)
            first, second, other = _facts(store)
            assert [fact.id for fact in _claim(store)] == [first.id, other.id]
            _settle(store, first, State.PENDING, due=_DAY + 20)
            assert _claim(store, now=_DAY + 3) == []
            assert [fact.id for fact in _claim(store, now=_DAY + 20)] == [first.id, other.id]
            _settle(store, first)
            assert [fact.id for fact in _claim(store, now=_DAY + 21)] == [second.id]

    def test_at_most_so_many_are_leased_and_of_these_kinds(self) -> None:
        """`only` leases some of the `kinds`; facts of all of them keep the order of their keys."""
        with _opened(self.new_store()) as store:
            for number in range(5):
                _put(store, "completion", {**_COMPLETION, "UniqueCode": f"m-{number}"})
            reconciled = {**_TERMINATE, "UniqueCode": "m-0", "ReconciliationID": 9}
            _put(store, "terminate", reconciled)
            _put(store, "invite", b"?")
            with store.transaction():
                claimed = store.claim("a", _ALL, _DAY, _DAY + 5, 9, only=[Kind.RECONCILIATION, None])
                assert [fact.kind for fact in claimed] == [None]
                claimed = store.claim("a", [Kind.RECONCILIATION], _DAY, _DAY + 5, 9)
                assert [fact.kind for fact in claimed] == [Kind.RECONCILIATION]
                assert len(store.claim("a", _ALL, _DAY, _DAY + 5, 2)) == 2

    def test_a_dead_fact_waits_for_a_replay(self) -> None:
        """It holds up no other one. Replayed, its attempts begin at 1. Handled facts are replayed by ID."""
        with _opened(self.new_store()) as store:
            _put(store, "completion", _COMPLETION)
            _put(store, "completion", _CORRECTED)
            (first,) = _claim(store)
            _settle(store, first, State.DEAD)
            (second,) = _claim(store)
            _settle(store, second)
            with store.transaction():
                assert store.replay() == 1
            (again,) = _claim(store)
            assert (again.id, again.attempts) == (first.id, 1)
            with store.transaction():
                assert store.replay([second.id, second.id + 99]) == 1

    def test_an_attempt_that_asked_for_time_does_not_count(self) -> None:
        """`Settled.counts` is false then."""
        with _opened(self.new_store()) as store:
            _put(store, "completion", _COMPLETION)
            (fact,) = _claim(store)
            with store.transaction():
                store.settle("me", Settled(fact_id=fact.id, state=State.PENDING, due=_DAY, counts=False))
            assert [again.attempts for again in _claim(store)] == [1]

    # --- Reading

    def test_facts_are_read_by_kind_state_and_place(self) -> None:
        """In the order of their IDs, without a transaction."""
        with _opened(self.new_store()) as store:
            _put(store, "completion", _COMPLETION)
            _put(store, "quota_status", _status(5))
            _put(store, "invite", b"?")
            first, *rest = _facts(store)
            assert [fact.id for fact in store.facts(after=first.id)] == [fact.id for fact in rest]
            assert [fact.kind for fact in store.facts(kinds=[Kind.COMPLETION, None])] == [Kind.COMPLETION, None]
            _settle(store, _claim(store)[0], State.DEAD)
            assert [fact.id for fact in store.facts(state=State.DEAD)] == [first.id]

    def test_the_backlog_is_counted_by_kind(self) -> None:
        """How many facts wait, how many are dead, and when the oldest that waits has come."""
        with _opened(self.new_store()) as store:
            for number in range(3):
                _put(store, "completion", {**_COMPLETION, "UniqueCode": f"m-{number}"}, at=_DAY + number)
            _settle(store, _claim(store, now=_DAY + 9)[0], State.DEAD)
            (row,) = store.backlog()
            assert (row.kind, row.pending, row.dead, row.oldest_at) == (Kind.COMPLETION, 2, 1, _DAY + 1)

    def test_new_secrets_stand_before_old_ones(self) -> None:
        """`secrets` keeps what is there; `rotate` adds, and keeps the newest of each kind."""
        with _opened(self.new_store()) as store, store.transaction():
            assert store.secrets({}) == {}
            assert store.secrets({Kind.INVITE: "a"}) == {Kind.INVITE: ["a"]}
            for secret in ("b", "c"):
                store.rotate({Kind.INVITE: secret}, keep=2)
            assert store.secrets({Kind.INVITE: "d"}) == {Kind.INVITE: ["c", "b"]}

    # --- Several processes

    def test_the_same_notification_is_one_fact_whoever_received_it(self) -> None:
        """Also if several processes receive it at the same time."""

        def receive(store: SqlStore, _: int) -> None:
            for number in range(_EACH):
                _put(store, "completion", {**_COMPLETION, "UniqueCode": f"m-{number}"})

        for store in self._at_once(receive):
            facts = _facts(store)
            assert sorted(fact.receipts for fact in facts) == [_AT_ONCE] * _EACH

    def test_whoever_reads_on_after_an_id_misses_nothing(self) -> None:
        """A fact that can be read later never has a lower ID: others may have read on after that."""
        seen: list[int] = []

        def receive(store: SqlStore, place: int) -> None:
            for number in range(_EACH):
                if place:
                    _put(store, "completion", {**_COMPLETION, "UniqueCode": f"m-{place}-{number}"})
                else:
                    seen.extend(fact.id for fact in store.facts(after=seen[-1] if seen else 0))

        for store in self._at_once(receive):
            seen.extend(fact.id for fact in store.facts(after=seen[-1] if seen else 0))
            assert seen == [fact.id for fact in _facts(store)]

    def test_each_fact_is_handled_once_and_in_the_order_of_its_key(self) -> None:
        """By several processes that take facts at the same time."""
        handled: list[tuple[str, int]] = []

        def handle(store: SqlStore, place: int) -> None:
            _put(store, "completion", {**_COMPLETION, "Revenue": place})
            for number in range(_EACH):
                _put(store, "completion", {**_COMPLETION, "UniqueCode": f"m-{number}", "Revenue": place})
                for fact in _claim(store, f"owner {place}"):
                    handled.append((getattr(fact.notification, "member_code", ""), fact.id))
                    _settle(store, fact, owner=f"owner {place}")

        for store in self._at_once(handle):
            while claimed := _claim(store):
                for fact in claimed:
                    handled.append((getattr(fact.notification, "member_code", ""), fact.id))
                    _settle(store, fact)
            assert sorted(number for _, number in handled) == [fact.id for fact in _facts(store)]
            of_member: dict[str, list[int]] = {}
            for member, number in handled:
                of_member.setdefault(member, []).append(number)
            assert list(of_member.values()) == [sorted(numbers) for numbers in of_member.values()]

    def _at_once(self, work: Callable[[SqlStore, int], None]) -> Generator[SqlStore]:
        """Run work in threads with stores over one database, then yield one."""
        with _opened(self.new_store()) as first:
            failures: list[BaseException] = []

            def run(store: SqlStore, place: int) -> None:
                try:
                    with _opened(store):
                        work(store, place)
                except BaseException as exc:  # noqa: BLE001  raised below, in the caller's thread
                    failures.append(exc)

            threads = [
                threading.Thread(target=run, args=(first.copy(), place)) for place in range(_AT_ONCE - 1)
            ]
            for thread in threads:
                thread.start()
            try:
                work(first, len(threads))
            finally:
                for thread in threads:
                    thread.join()
            if failures:
                raise failures[0]
            yield first


# --- Short ways


@contextmanager
def _opened(store: SqlStore) -> Generator[SqlStore]:
    store.open()
    try:
        yield store
    finally:
        store.close()


def _read(kind: str, fields: object, at: float = _DAY) -> tuple[Receipt, Sequence[Any]]:
    receipt = Receipt(Kind(kind), at, encoded(fields))
    return receipt, list(entries_of(receipt))


def _receive(store: SqlStore, kind: str, fields: object, at: float = _DAY) -> list[str]:
    return store.receive_all([Hit(*_read(kind, fields, at))])[0]


def _put(store: SqlStore, kind: str, fields: object, at: float = _DAY) -> list[str]:
    return in_transaction(store, lambda opened: _receive(opened, kind, fields, at))


def _facts(store: SqlStore) -> list[Fact[Notification]]:
    return list(store.facts())


def _claim(store: SqlStore, owner: str = "me", *, now: float = _DAY) -> list[Fact[Notification]]:
    return in_transaction(store, lambda opened: list(opened.claim(owner, _ALL, now, now + 5.0, 100)))


def _settle(
    store: SqlStore,
    fact: Fact[Notification],
    state: State = State.HANDLED,
    *,
    owner: str = "me",
    due: float = 0.0,
) -> bool:
    settled = Settled(fact_id=fact.id, state=state, due=due)
    return in_transaction(store, lambda opened: opened.settle(owner, settled))


def _status(second: int) -> dict[str, object]:
    when = f"2026-11-22T10:00:{second:02}Z"
    return {"QuotaID": 1100, "SurveyID": 2401, "WaveID": 77, "IsLive": False, "UpdateDateTimeUTC": when}


def _kind_of(fields: Iterable[str]) -> str:
    return "terminate" if "Reason" in fields else "completion"
