"""The ledger of a campaign: one SQLite file with its plan, every outcome, and the limits that hold.

Nothing here uses an event loop, and one thread at a time may use a ledger. Other processes may read the file
and change the limits while a run writes it.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sampling_async import Invite, InviteOutcome
from sampling_async._contract.currencies import CurrencyRates, total_of
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._contract.result_codes import ResultCode
from sampling_async._protocol.requests import member_code_of
from sampling_async.campaign._ledger_file import KEPT_GROUPS, DueMember, LedgerError, LedgerFile, PlannedQuota
from sampling_async.campaign._limits import Limits
from sampling_async.notifications._entries import stand_in

if TYPE_CHECKING:
    import os
    import sqlite3
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from sampling_async._contract.checks import Text
    from sampling_async.campaign._ledger_file import Notes
    from sampling_async.notifications import SettledPair

T = TypeVar("T")

_WINDOW: Final = """
SELECT m.id, m.code, m.closed, m.reserves, p.quota, p.plan, p.tries, p.code,
    p.state = 'pending' AND p.turn = :turn AND p.due <= :now, {asked}
FROM members AS m JOIN pairs AS p ON p.member = m.id
WHERE m.id IN (
    SELECT DISTINCT member FROM pairs
    WHERE state = 'pending' AND turn = :turn AND member > :after AND due <= :now
    ORDER BY member LIMIT :count
) ORDER BY m.id, p.plan, p.rank
"""

_END: Final = """
UPDATE pairs SET state = ?, code = ?, reason = ?, turn = ?, tries = ?, due = ?
WHERE member = ? AND quota = ? AND plan = ?
"""

_INVITES: Final = """
SELECT i.rowid, m.code, i.quota, i.survey, i.wave, i.partner_amount, i.url, i.loi, i.ir, i.member_amount
FROM invites AS i JOIN members AS m ON m.id = i.member
WHERE i.rowid > ? AND NOT (i.url = '' AND m.code LIKE 'erased-%') ORDER BY i.rowid LIMIT 5000
"""

IN_FLIGHT: Final = """
SELECT r.member, q.value FROM requests AS r, json_each(r.quotas) AS q
JOIN pairs AS p ON p.member = r.member AND p.quota = q.value AND p.plan = ? AND p.state = 'pending'
"""

_DELIVERED: Final = f"""
SELECT m.code, q.survey, q.wave, p.state, p.code
FROM pairs AS p JOIN members AS m ON m.id = p.member JOIN quotas AS q ON q.id = p.quota
WHERE p.state NOT IN ({{others}}) OR p.plan = ? AND (p.member, p.quota) IN ({IN_FLIGHT})
"""  # noqa: S608  of constants

INVITED: Final = "state IN ('invited', 'unknown')"  # whether there is an invite, or may be one
# Whether a pair was requested: one that waits for another try was too.
ASKED: Final = "(p.state NOT IN ('pending', 'skipped') OR p.code IS NOT NULL)"
KILLED: Final = "the process ended before the response came"
LAST_SIGN: Final = """
max(began, coalesce((SELECT max(slot) FROM moments WHERE run = runs.id), began),
    coalesce((SELECT CAST(value AS REAL) FROM facts WHERE name = 'seen'), began))
"""
"""When a run without an end was seen last, see `CampaignRun.poll_limits`: only the last run can be one."""
REPLANNED: Final = "planned anew"
ERASED: Final = "the member was erased"


class CampaignLedger(LedgerFile):
    # --- Facts and limits

    def note(self, **facts: object) -> None:
        with self._writing() as database:
            _note(database, facts)

    def limits(self) -> Limits:
        return self._limits_of(self.fact("limits"))

    def _limits_of(self, text: str | None) -> Limits:
        try:
            return Limits() if text is None else Limits.from_json(text)
        except (InvalidRequestError, TypeError, ValueError) as exc:
            raise LedgerError(f"holds limits that cannot be used: {exc}", path=self.path) from exc

    def change_limits(self, **changes: Any) -> Limits:
        """Change some limits and return all. A run of another process applies them within a second."""
        with self._writing() as database:
            found = database.execute("SELECT value FROM facts WHERE name = 'limits'").fetchone()
            limits = self._limits_of(None if found is None else found[0]).changed(**changes)
            _note(database, {"limits": limits.to_json()})
        return limits

    def erase(self, member_code: str) -> bool:
        """Replace a member by one that nobody has, and request no more; False if there is no such member."""
        with self._writing() as database:
            found = database.execute("SELECT id FROM members WHERE code = ?", (member_code,)).fetchone()
            if found is None:
                return False
            nobody = stand_in(member_code)  # as stores of outcomes have it, so that completes still count
            if database.execute("SELECT 1 FROM members WHERE code = ?", (nobody,)).fetchone():
                nobody += f"-{token_hex(8)}"  # planned again after an erasing
            database.execute("UPDATE members SET code = ?, reserves = '[]' WHERE id = ?", (nobody, *found))
            if _has_groups(database):
                database.execute("UPDATE members SET grouped = NULL WHERE id = ?", found)
            database.execute("UPDATE invites SET url = '' WHERE member = ?", found)
            database.execute(
                "UPDATE pairs SET state = CASE WHEN code IS NULL THEN 'skipped' ELSE 'rejected' END, reason = ?"
                " WHERE member = ? AND state = 'pending'",
                (ERASED, *found),
            )
        return True

    # --- The plan

    @contextmanager
    def planning(self) -> Generator[Planning]:
        """Write a plan. It is there as a whole when the block ends, or not at all."""
        self.plan += 1
        try:
            with self._writing() as database:
                yield Planning(database, self.plan)
                database.execute("DROP TABLE IF EXISTS temp.seen")  # it was only needed for the plan
                _note(database, {"plan": self.plan})
        except BaseException:
            self.plan -= 1
            raise

    def currency_rates(self) -> CurrencyRates | None:
        """Return the rates that the latest plan was made with."""
        if not (text := self.fact("currency_rates")):
            return None
        rates, names = ({int(each): value for each, value in found.items()} for found in json.loads(text))
        return CurrencyRates(rates, names=names)

    def adding(self) -> Callable[[Mapping[int, float]], float | None]:
        """Return a function that adds values by currency. Values of the user's own are in one unit already."""
        if self.fact("own_values"):
            return lambda sums: sum(sums.values(), 0.0)
        return partial(total_of, rates=self.currency_rates())

    def quotas(self) -> list[PlannedQuota]:
        query = (
            "SELECT q.id, q.survey, q.wave, q.name, q.currency, q.room, t.value, t.cost, q.closed"
            " FROM quotas AS q JOIN (SELECT quota AS id, value, cost, max(plan) FROM terms GROUP BY quota) AS t"
            " USING (id) ORDER BY id"
        )
        return [PlannedQuota(*row) for row in self._rows(query)]

    def counts(self) -> Sequence[tuple[int, str, int, float]]:
        """Return the number of pairs of each quota and state, and their value by the plans they belong to."""
        query = (
            "SELECT p.quota, p.state, sum(p.pairs), sum(p.pairs * t.value)"
            " FROM (SELECT quota, plan, state, count(*) AS pairs FROM pairs GROUP BY quota, plan, state) AS p"
            " JOIN terms AS t USING (quota, plan) GROUP BY p.quota, p.state"
        )
        return self._rows(query)

    def earlier(self) -> dict[int, int]:
        """Return the number of pairs of each quota that may be invites of plans before its latest one."""
        latest = "(SELECT max(plan) FROM terms AS t WHERE t.quota = p.quota)"
        query = f"SELECT quota, count(*) FROM pairs AS p WHERE plan < {latest} AND {INVITED} GROUP BY quota"  # noqa: S608
        return dict(self._rows(query))

    def delivered(self) -> Iterator[tuple[str, int, int, str, int | None]]:
        """Return member code, survey, wave, state and code of all pairs that were requested.

        If another process runs the campaign now, its pending pairs are among them, because it will request
        them. If it was killed, those that were in flight are.
        """
        is_run_by_others = self._lock.is_taken() and not self._lock.is_held
        query = _DELIVERED.format(others="'skipped'" if is_run_by_others else "'skipped', 'pending'")
        return chain.from_iterable(self.read_on(query, self.plan, self.plan))

    def settle(self, pairs: Iterable[SettledPair]) -> None:
        """Write down that unknown pairs have an invite. Their state stays: it says what the response was."""
        with self._writing() as database:
            database.executemany(
                "INSERT OR IGNORE INTO settled SELECT id, ?, ?, ?, ? FROM members WHERE code = ?",
                [
                    (each.quota_id, each.kind, each.fact_id, each.received_at.timestamp(), each.member_code)
                    for each in pairs
                ],
            )

    def open_invites(self, since: float) -> Sequence[tuple[int, int, int]]:
        """Return quota, survey and number of the invites that may still end in a complete.

        Pairs whose outcome is unknown count too: nobody knows when, or whether, they were made.
        """
        return self._rows(
            "SELECT quota, survey, count(*) FROM invites WHERE at >= ? GROUP BY quota, survey"
            " UNION ALL SELECT p.quota, q.survey, count(*)"
            " FROM pairs AS p JOIN quotas AS q ON q.id = p.quota"
            " WHERE p.state = 'unknown' GROUP BY p.quota, q.survey",
            (since,),
        )

    def open_of_members(self, since: float) -> Sequence[tuple[str, int]]:
        """Return member codes, each with its number of invites that may still end in a complete."""
        query = (
            "SELECT m.code, count(*) FROM members AS m JOIN pairs AS p ON p.member = m.id"
            " LEFT JOIN invites AS i ON i.member = p.member AND i.quota = p.quota"
            " WHERE p.state = 'unknown' OR p.state = 'invited' AND i.at >= ? GROUP BY m.id"
        )
        return self._rows(query, (since,))

    # --- A run

    def begin_run(self, now: float) -> int:
        """Note that a run begins, and return its number. What the one before had in flight is unknown."""
        self.end_lost()
        with self._writing() as database:
            # What could not be sent is requested again at once: this may be another day. A refusal stays one.
            database.execute(
                "UPDATE pairs SET state = 'pending', tries = 0, due = 0"
                " WHERE plan = ? AND code IS NULL AND (state = 'not_sent' OR state = 'pending' AND tries)",
                (self.plan,),
            )
            # A run that was killed has no end of its own.
            database.execute(
                f"UPDATE runs SET reason = ?, ended = {LAST_SIGN} WHERE ended IS NULL",  # noqa: S608
                (KILLED,),
            )
            number = database.execute("INSERT INTO runs (began) VALUES (?)", (now,)).lastrowid
            _note(database, {"begun_plan": self.plan})
        assert number is not None
        return number

    def end_lost(self) -> None:
        """End what a run that was killed has left: what was in flight is unknown. The ledger must be locked."""
        with self._writing() as database:
            lost = database.execute(IN_FLIGHT, (self.plan,)).fetchall()
            database.executemany(
                "UPDATE pairs SET state = 'unknown', reason = ?,"
                " due = (SELECT coalesce(max(began), 0) FROM runs) WHERE member = ? AND quota = ? AND plan = ?",
                [(KILLED, member, quota, self.plan) for member, quota in lost],
            )
            database.execute("DELETE FROM requests")

    def end_run(self, run: int, now: float, reason: str) -> None:
        with self._writing() as database:
            database.execute("UPDATE runs SET ended = ?, reason = ? WHERE id = ?", (now, reason, run))

    def last_wait(self) -> int:
        return int(self._value("SELECT coalesce(max(id), 0) FROM waits"))

    def spent(self) -> float:
        """Return what the invites so far cost at most."""
        return self._value(
            "SELECT coalesce(sum(max(t.cost, coalesce(i.member_amount, 0))), 0.0) FROM invites AS i"
            " JOIN pairs AS p ON p.member = i.member AND p.quota = i.quota AND p.state = 'invited'"
            " JOIN terms AS t ON t.quota = p.quota AND t.plan = p.plan"
        )

    def doubtful(self) -> float:
        """Return what the pairs cost whose outcome is unknown, if all of them are invites."""
        return self._value(
            "SELECT coalesce(sum(t.cost), 0.0) FROM pairs AS p JOIN terms AS t USING (quota, plan)"
            " WHERE p.state = 'unknown'"
        )

    def invited(self) -> int:
        """Return how many invites were made, or may have been made."""
        return int(self._value(f"SELECT count(*) FROM pairs WHERE {INVITED}"))  # noqa: S608

    def asked(self) -> int:
        """Return how many members had a request."""
        return int(self._value(f"SELECT count(DISTINCT member) FROM pairs AS p WHERE {ASKED}"))  # noqa: S608

    def _value(self, query: str) -> float:
        return self._rows(query)[0][0]  # type: ignore[no-any-return]

    def pending(self, now: float) -> tuple[int, float] | None:
        """Return the next turn, and when its first pair is due; None if no pair is pending."""
        rows = self._rows(
            "SELECT turn, min(due) FROM pairs WHERE state = 'pending' GROUP BY turn"
            " ORDER BY max(min(due), ?), turn LIMIT 1",
            (now,),
        )
        return rows[0] if rows else None

    def bring_forward(self, latest: float) -> None:
        """Let no pair wait longer than until a time."""
        with self._writing() as database:
            database.execute("UPDATE pairs SET due = ? WHERE state = 'pending' AND due > ?", (latest, latest))

    def window(self, turn: int, after: int, now: float, count: int) -> list[DueMember]:
        """Return the next members whose turn it is, with all their pairs that are due."""
        members: dict[int, DueMember] = {}
        values = {"turn": turn, "after": after, "now": now, "count": count}
        rows = self._rows(_WINDOW.format(asked=ASKED), values)
        for id_, code, closed, reserves, quota, plan, tries, answer, is_due, was_asked in rows:
            member = members.get(id_)
            if member is None:
                member = members[id_] = DueMember(id_, code, closed, json.loads(reserves), turn)
            member.was_asked |= bool(was_asked)
            if plan != self.plan:
                continue
            member.added += 1
            if quota in member.reserves:
                member.reserves.remove(quota)
            if is_due:
                member.due[quota] = tries
                if answer is not None:
                    member.refused[quota] = answer
        return [*members.values()]

    def write(self, notes: Iterable[Notes], requests: int) -> None:
        """Write notes. They are on disk when this returns."""
        with self._writing() as database:
            for each in notes:
                self._write(database, each)
            _note(database, {"requests": requests})

    def _write(self, database: sqlite3.Connection, notes: Notes) -> None:
        plan, many = self.plan, database.executemany
        many(
            "INSERT INTO pairs (member, quota, rank, certain, turn, plan) VALUES (?, ?, ?, ?, ?, ?)",
            [(*pair, plan) for pair in notes.pairs],
        )
        many("INSERT INTO requests VALUES (?, ?, ?)", notes.sent)
        many(_END, [(*end, plan) for end in notes.ends])
        many("INSERT INTO invites VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", notes.invites)
        many("DELETE FROM requests WHERE id = ?", notes.answered)
        many("UPDATE quotas SET closed = ? WHERE id = ?", notes.closed_quotas)
        many("UPDATE members SET closed = ? WHERE id = ?", notes.closed_members)
        many("INSERT OR REPLACE INTO codes VALUES (?, ?)", notes.codes.items())
        many("INSERT OR REPLACE INTO moments VALUES (?, ?, ?, ?, ?, ?, ?, ?)", notes.moments)
        many("INSERT OR REPLACE INTO waits VALUES (?, ?, ?, ?)", [(id_, *w) for id_, w in notes.waits.items()])

    # --- What others read

    def invites(self, *, after: int) -> list[tuple[int, InviteOutcome]]:
        """Return the next invites, some thousand, each with its number; not those of erased members."""
        return [
            (
                number,
                InviteOutcome(
                    code,
                    quota,
                    "invited",
                    Invite(survey, wave, quota, partner_amount or 0.0, url, loi or 0, ir or 0, member_amount),
                    ResultCode.SUCCESS,
                    replayed=True,
                ),
            )
            for number, code, quota, survey, wave, partner_amount, url, loi, ir, member_amount in self._rows(
                _INVITES, (after,)
            )
        ]

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._rows(query, values)

    def read_on(self, query: str, *values: Any) -> Iterator[Sequence[tuple[Any, ...]]]:
        """Yield the rows of a query, some thousand at a time, so that memory does not grow with them."""
        with self._failing("cannot be read"):
            cursor = self._connection.execute(query, values)
            while some := cursor.fetchmany(10_000):
                yield some


def with_ledger(path: str | os.PathLike[str], work: Callable[[CampaignLedger], T], *, reads: bool = False) -> T:
    """Call a function with a ledger that is open, and close it."""
    ledger = CampaignLedger(path)
    try:
        ledger.open(reads=reads)
        return work(ledger)
    finally:
        ledger.close()


def erase_from_ledger(path: str | os.PathLike[str], member_code: Text) -> bool:
    """Erase a member from the ledger of a campaign; False if it has no such member.

    The numbers of pairs, invites and costs stay. The member code, its groups and the links of its invites go,
    and nothing more is requested for it. Files that the campaign has written are not changed.

    Raises:
        InvalidRequestError: No member can have such a code.
        LedgerError: There is no such ledger, or a run has it now.
    """
    code = member_code_of(member_code)

    def erase(ledger: CampaignLedger) -> bool:
        ledger.lock()
        return ledger.erase(code)

    return with_ledger(path, erase)


class Planning:
    """A plan while it is written."""

    def __init__(self, database: sqlite3.Connection, plan: int) -> None:
        self._database = database
        self.plan = plan
        # What is left of an earlier plan would be requested beside the new one.
        database.execute(
            "UPDATE pairs SET state = CASE WHEN code IS NULL THEN 'skipped' ELSE 'rejected' END, reason = ?"
            " WHERE state = 'pending'",
            (REPLANNED,),
        )
        changed = database.execute("UPDATE members SET closed = NULL, reserves = '[]'")
        self._had_members, self._added = changed.rowcount > 0, 0
        if not _has_groups(database):
            database.execute("ALTER TABLE members ADD COLUMN grouped INTEGER")

    def check(self, codes: Sequence[str], first: int, name: str) -> None:
        """Refuse a panel in which two members have the same code."""
        database = self._database
        database.execute(
            "CREATE TEMP TABLE IF NOT EXISTS seen (code TEXT PRIMARY KEY, row INTEGER) WITHOUT ROWID"
        )
        before = database.total_changes
        database.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", zip(codes, count(first), strict=False))
        if database.total_changes - before == len(codes):
            return
        for row, code in enumerate(codes, first):
            if database.execute("SELECT row FROM seen WHERE code = ?", (code,)).fetchone() != (row,):
                raise InvalidRequestError(
                    f"{name}: row {row} has the member code of an earlier row; each member must have one row"
                )

    def add_quotas(self, quotas: Sequence[PlannedQuota]) -> None:
        """Add quotas, or replace what an earlier plan knew of them."""
        self._database.executemany(
            "INSERT OR REPLACE INTO quotas VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(q.id, q.survey, q.wave, q.name, q.currency, q.room, q.closed) for q in quotas],
        )
        # Those of earlier plans stay: what an invite has cost does not change.
        self._database.executemany(
            "INSERT INTO terms VALUES (?, ?, ?, ?)", [(q.id, self.plan, q.value, q.cost) for q in quotas]
        )

    def add_members(
        self, codes: Sequence[str], reserves: Sequence[Sequence[int]], groups: Sequence[int]
    ) -> Sequence[int]:
        """Add members, each with its reserves and the number of its groups, and return their numbers."""
        database = self._database
        database.executemany(
            "INSERT INTO members (code, reserves, grouped) VALUES (?, ?, ?)"  # noqa: S608  a constant
            f" ON CONFLICT (code) DO UPDATE SET reserves = excluded.reserves, grouped = {KEPT_GROUPS}",
            # As text, a list of whole numbers is JSON; `json.dumps` takes four times as long.
            zip(codes, map(str, reserves), groups, strict=True),
        )
        if not self._had_members:  # so SQLite has counted them from 1 on
            numbers = range(self._added + 1, self._added + len(codes) + 1)
            self._added += len(codes)
            return numbers
        query = "SELECT code, id FROM members WHERE code IN (SELECT value FROM json_each(?))"
        number = dict(database.execute(query, (json.dumps(codes),)).fetchall())
        return [number[code] for code in codes]

    def add_pairs(self, *columns: Sequence[int]) -> None:
        """Add pairs: the numbers of their members, their quotas, ranks, and whether they are certain."""
        self._database.executemany(
            f"INSERT INTO pairs (member, quota, rank, certain, plan) VALUES (?, ?, ?, ?, {self.plan})",  # noqa: S608
            zip(*columns, strict=True),
        )

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query, with what is written here."""
        return self._database.execute(query, values).fetchall()

    def invited(self) -> int:
        query = f"SELECT count(*) FROM pairs WHERE {INVITED}"  # noqa: S608  a constant
        return int(self._database.execute(query).fetchone()[0])

    def note(self, **facts: object) -> None:
        _note(self._database, facts)


def _has_groups(database: sqlite3.Connection) -> bool:
    """Return whether members have groups; those of older ledgers have none."""
    return any(name == "grouped" for _, name, *_ in database.execute("PRAGMA table_info(members)"))


def _note(database: sqlite3.Connection, facts: dict[str, object]) -> None:
    database.executemany(
        "INSERT OR REPLACE INTO facts VALUES (?, ?)", [(name, str(value)) for name, value in facts.items()]
    )
