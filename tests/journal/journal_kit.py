"""Runs with a journal, and journals as a process that was killed leaves them."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import doubles
from attrs import evolve

from sampling_async import Invite, InviteOutcome, InviteRequest, Journal, RetryPolicy, SamplingError
from sampling_async._journal.file import JournalFile
from sampling_async._journal.journal import run_of
from sampling_async._journal.rows import SENT, Note

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from sampling_async._journal.run import JournalRun


ONCE = RetryPolicy(max_attempts=1)


PANEL = [InviteRequest(f"m{n}", range(1, 7)) for n in range(5)]


OWNER = "https://service.example", doubles.PANEL


class Ledger(doubles.Service):
    """A service that counts how often each member was asked about each quota."""

    def __init__(self, *answers) -> None:
        super().__init__(*(answers or (doubles.bulk,)))
        self.asked: Counter[tuple[str, int]] = Counter()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        member_code = request.url.path.split("/")[-2]
        self.asked.update((member_code, quota_id) for quota_id in doubles.asked(request))
        return await super().__call__(request)


OF_CLIENTS = ("retry", "panel_guid", "max_concurrency")


async def run(service, journal, requests=PANEL, take: int | None = None, **options) -> list[InviteOutcome]:
    """Run a panel; return the outcomes, or the first ones and the left-over ones."""
    options = {"chunk_size": 3} | options
    client_options = {name: options.pop(name) for name in OF_CLIENTS if name in options}
    async with doubles.client(service, **client_options) as client:
        async with client.fan_out(requests, journal=journal, **options) as stream:
            outcomes = []
            async for outcome in stream:
                outcomes.append(outcome)
                if len(outcomes) == take:
                    break
        return outcomes + list(stream.left_over)


def facts(outcomes: list[InviteOutcome]) -> list[tuple]:
    return sorted((o.member_code, o.quota_id, o.status, o.invite and o.invite.url) for o in outcomes)


def rows_of(path: Path) -> list[Note]:
    with closing(sqlite3.connect(path)) as database:
        database.text_factory = bytes
        return [Note(*row) for row in database.execute("SELECT kind, chunk, member_code, content FROM rows")]


def written_anew(path: Path, notes: list[Note]) -> None:
    """Leave a journal like a process that was killed after it had written these rows."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    journal = JournalFile(path, OWNER)
    journal.open()
    for note in notes:
        journal.note(*note)
    journal.leave()


def killed(path: Path, chunk: int | None = 1) -> None:
    """Remove all results, or those of one chunk, from a journal, as after a kill in the middle."""
    written_anew(path, [n for n in rows_of(path) if n.kind == SENT or chunk not in {None, n.chunk}])


OF_OTHERS = "journal was written for another service or panel; use a separate journal for each$"


def failing(*_: object) -> None:
    raise sqlite3.OperationalError


def full(*_: object) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def held_up(monkeypatch, of: type, method: str) -> tuple[threading.Event, threading.Event]:
    """Make a method wait in its thread: one event says that it is there, the other one lets it go on."""
    work, working, go_on = getattr(of, method), threading.Event(), threading.Event()

    def slow(self, *args) -> object:
        working.set()
        go_on.wait(60)
        return work(self, *args)

    monkeypatch.setattr(of, method, slow)
    return working, go_on


async def go_on_later(go_on: threading.Event) -> None:
    await anyio.sleep(0.01)
    go_on.set()


async def read(journal: Journal, *args) -> list[InviteOutcome]:
    return [outcome async for outcome in journal.outcomes(*args)]


async def opened(path: Path, **options) -> JournalRun:
    journal = run_of(Journal(path, **options))
    journal.claim(*OWNER)
    await journal.open()
    return journal


def answers(member_code: str, quota_ids) -> list[InviteOutcome]:
    error = SamplingError("lost", endpoint="bulk_invite", delivery="unknown")
    invite = Invite(7, 8, 1, 1.5, "https://survey.example/1", 10, 30)
    kinds = [
        InviteOutcome(member_code, 1, "invited", invite, 1, "SUCCESS", anomaly="odd: \ud800"),
        InviteOutcome(member_code, 2, "rejected", None, 9, "G\u00dcLTIG"),
        InviteOutcome(member_code, 3, "unknown", None, 500, None, error),
        InviteOutcome(member_code, 4, "not_sent"),
    ]
    return [evolve(kinds[quota_id % 4], quota_id=quota_id) for quota_id in quota_ids]


def told(outcome: InviteOutcome) -> tuple:
    error = outcome.error and (str(outcome.error), outcome.error.delivery)
    return evolve(outcome, error=None), error
