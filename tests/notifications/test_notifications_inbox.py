"""The inbox: who may post, what is stored before it is acknowledged, and what is answered when it cannot be."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import sqlite3
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from decimal import Decimal
from functools import partial

import anyio
import doubles
import pytest
from doubles import until
from store_kit import CLOSED, COMPLETION, PEER, SECRET, TERMINATE, encoded, facts_of, post, status

from sampling_async import InvalidRequestError
from sampling_async._pacing.threads import in_thread
from sampling_async.notifications import (
    Completion,
    HandlerPolicy,
    Inbox,
    Kind,
    QuotaStatus,
    SqliteStore,
    StoreConflictError,
    StoreError,
    Terminate,
    UnknownNotification,
    kept_secrets,
    rotate_secrets,
    verify_redirect,
)
from sampling_async.notifications._access import Signatures
from sampling_async.notifications._committer import GROUP, MOST_WAITING, Committer
from sampling_async.notifications._understanding import FieldReader, parse


@pytest.fixture
def path(tmp_path):
    return tmp_path / "n.db"


def inbox_at(path, **options) -> Inbox:
    return Inbox(path, **{"secrets": SECRET, **options})


# --- Storing


STATE = {"state": "dead", "follow": True}  # a fact that was passed may die later


def test_facts_are_requested_by_their_records(tmp_path):
    inbox = Inbox(tmp_path / "n.db", secrets=SECRET)
    with pytest.raises(InvalidRequestError, match="'completion' is no notification"):
        inbox.facts("completion")
    for wrong in (
        {"after": 2**70},
        {"after": -1},
        {"after": "1"},
        {"state": "gone"},
        {"state": "\ud800"},
        STATE,
    ):
        with pytest.raises(InvalidRequestError, match=f"^{next(iter(wrong))} must be"):
            inbox.facts(**wrong)


async def test_what_is_acknowledged_is_stored(path):
    async with inbox_at(path) as inbox:
        for kind, fields in (("completion", COMPLETION), ("survey_closed", CLOSED), ("invite", b"?")):
            reply = await post(inbox, kind, fields)
            assert (reply.status, reply.body) == (200, b"OK")
            # By another connection, as after a kill of this process.
            assert next(iter(SqliteStore(path).facts(kinds=[Kind(kind)] if kind != "invite" else [None])))
        assert [fact.kind for fact in await facts_of(inbox)] == ["completion", "survey_closed", None]


async def test_facts_are_read_when_the_inbox_is_closed(path):
    async with inbox_at(path) as inbox:
        await post(inbox, "completion", COMPLETION)
        await post(inbox, "quota_status", status(1, is_live=True))
    assert [fact.notification.quota_id async for fact in inbox.facts(QuotaStatus)] == [1100]
    assert [fact.id async for fact in inbox.facts(after=1)] == [2]


async def test_facts_are_a_table(path):
    async with inbox_at(path) as inbox:
        await post(inbox, "completion", COMPLETION)
        await post(inbox, "quota_status", status(1, is_live=True))
        await post(inbox, "invite", b"?")
    table = await inbox.facts().to_arrow()
    assert table["kind"].to_pylist() == ["completion", "quota_status", None]
    assert table["revenue"].to_pylist() == [Decimal("1.50"), None, None]
    assert table["is_live"].to_pylist() == [None, True, None]
    assert json.loads(table["fields"][0].as_py()) == COMPLETION
    assert (await inbox.facts(Terminate).to_arrow()).num_rows == 0
    with pytest.raises(InvalidRequestError, match="have no end"):
        await inbox.facts(follow=True).to_arrow()


@pytest.mark.parametrize(("by_another", "poll"), [(False, 3600.0), (True, 0.01)])
async def test_facts_can_be_followed_and_those_of_the_same_process_are_not_polled_for(path, by_another, poll):
    seen = []

    async def follow() -> None:
        async for fact in inbox.facts(Completion, Terminate, follow=True):
            seen.append(fact)
            if len(seen) == 2:
                return

    async with inbox_at(path) as other, inbox_at(path, handling=HandlerPolicy(poll=poll)) as inbox:
        posted_to = other if by_another else inbox
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                await anyio.sleep(0.02)
                await post(posted_to, "completion", COMPLETION)
                await post(posted_to, "quota_status", status(1, is_live=True))
                await until(lambda: len(seen) == 1)
                body = json.dumps({**TERMINATE, "WaveId": 3}).encode()
                await in_thread(partial(posted_to.receive_sync, "terminate", body, {}, PEER, secret=SECRET))
    assert [fact.kind for fact in seen] == ["completion", "terminate"]


async def test_a_closed_inbox_asks_to_send_again(path):
    inbox = inbox_at(path)
    assert (await post(inbox, "completion", COMPLETION)).status == 503
    async with inbox:
        assert repr(inbox) == f"<Inbox open <SqliteStore {path}>>"
    assert (await post(inbox, "completion", COMPLETION)).status == 503
    assert inbox.receive_sync("completion", b"", {}, PEER, secret=SECRET).status == 503
    assert await facts_of(inbox) == []


async def test_an_inbox_is_entered_once(path):
    async with inbox_at(path) as inbox:
        with pytest.raises(RuntimeError, match="entered once"):
            await inbox.__aenter__()


def test_an_inbox_is_entered_again_in_another_event_loop(path):
    """Two tests with a TestClient, and an inbox that belongs to a module."""
    inbox, seen = inbox_at(path), []
    inbox.on(Completion, Terminate, UnknownNotification)(lambda fact: seen.append(fact.id))

    async def once(wave: int) -> None:
        async with inbox:
            assert (await post(inbox, "completion", {**COMPLETION, "WaveId": wave})).status == 200
            await until(lambda: len(seen) == wave)

    for wave in (1, 2, 3):
        asyncio.run(once(wave))
        assert (inbox.receive_sync("completion", b"", {}, PEER, secret=SECRET)).status == 503
    assert seen == [1, 2, 3]


def test_an_inbox_that_could_not_be_opened_may_be_opened_later(tmp_path):
    inbox = inbox_at(tmp_path / "folder" / "n.db")

    async def once() -> int:
        async with inbox:
            return (await post(inbox, "completion", COMPLETION)).status

    with pytest.raises(StoreError):
        asyncio.run(once())
    (tmp_path / "folder").mkdir()
    assert asyncio.run(once()) == 200


async def test_a_compressed_body_is_stored_as_it_came(path):
    body = gzip.compress(encoded(COMPLETION))
    async with inbox_at(path) as inbox:
        for headers in ({"Content-Encoding": "gzip"}, {}):
            assert (await inbox.receive("completion", body, headers, PEER, secret=SECRET)).status == 200
        assert inbox.store._open.execute("SELECT body FROM receipts").fetchone() == (body,)
        (fact,) = await facts_of(inbox)
    assert (fact.kind, fact.receipts) == ("completion", 2)


@pytest.mark.parametrize(
    ("body", "coding", "expected"),
    [
        (b"\x1b\x00", "br", 415),
        (encoded(COMPLETION), "zstd", 415),
        (gzip.compress(b" " * (2 << 20), mtime=0), "gzip", 413),
        (encoded([{"a": number} for number in range(20_001)]), "", 413),
    ],
)
async def test_what_is_never_read_is_not_acknowledged(path, caplog, body, coding, expected):
    async with inbox_at(path) as inbox:
        headers = {"Content-Encoding": coding}
        assert (await inbox.receive("completion", body, headers, PEER, secret=SECRET)).status == expected
        assert (await in_thread(inbox.receive_sync, "completion", body, headers, PEER)).status == 404
        assert await facts_of(inbox) == []
        ((verdict, kept),) = inbox.store._open.execute("SELECT verdict, body FROM receipts").fetchall()
    assert kept == body
    assert f"a completion notification is answered with {expected}: {verdict}" in caplog.text


async def test_a_proxy_behind_a_unix_socket_is_trusted_if_that_is_said(path):
    guard = {"networks": ["198.51.100.0/24"], "trusted_proxies": ["unix"]}
    there = {"X-Forwarded-For": "198.51.100.9"}

    async def status_of(inbox, headers, peer) -> int:
        return (await inbox.receive("invite", b"?", headers, peer, secret=SECRET)).status

    async with inbox_at(path, **guard) as inbox:
        for peer in ("", None, "unix:/run/app.sock"):
            assert await status_of(inbox, there, peer) == 200
            assert await status_of(inbox, {"X-Forwarded-For": "203.0.113.1"}, peer) == 403
            assert await status_of(inbox, {}, peer) == 403
        assert await status_of(inbox, there, "127.0.0.1") == 403  # of which it was not said
    async with inbox_at(path, **{**guard, "trusted_proxies": ["127.0.0.1"]}) as inbox:
        assert await status_of(inbox, there, "") == 403


@pytest.mark.parametrize("value", [["x"], {"a": 1}, 5, True])
async def test_a_signature_of_another_type_is_forged(path, value):
    async with inbox_at(path, shared_secrets="supersecret") as inbox:
        assert (await post(inbox, "completion", {**COMPLETION, "EncryptedValue": value})).status == 403
        assert (await post(inbox, "completion", {**COMPLETION, "EncryptedValue": None})).status == 200


async def test_a_reconciliation_must_be_signed_too(path):
    async with inbox_at(path, shared_secrets="supersecret", require_signature=True) as inbox:
        assert (await post(inbox, "completion", {**COMPLETION, "ReconciliationID": 1})).status == 403


async def test_what_cannot_be_stored_is_not_acknowledged_and_nothing_else_is_lost(path, caplog):
    store = SqliteStore(path)
    async with inbox_at(store) as inbox:
        assert (await post(inbox, "completion", COMPLETION)).status == 200
        (pages,) = store._open.execute("PRAGMA page_count").fetchone()
        store._open.execute(f"PRAGMA max_page_count = {pages}")
        replies = {}

        async def send(number: int) -> None:
            fields = {**COMPLETION, "UniqueCode": f"n-{number}", "SurveyRef": "x" * 900}
            replies[f"n-{number}"] = await post(inbox, "completion", fields)

        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(send, number)
        store._open.execute("PRAGMA max_page_count = 1000000")
        assert (await post(inbox, "completion", {**COMPLETION, "UniqueCode": "later"})).status == 200
    statuses = [reply.status for reply in replies.values()]
    assert set(statuses) <= {200, 503}
    assert statuses.count(503) > 50
    acknowledged = {code for code, reply in replies.items() if reply.status == 200}
    stored = {fact.notification.member_code for fact in await facts_of(inbox)}
    assert stored == {*acknowledged, "m-1", "later"}
    messages = [record.getMessage() for record in caplog.records]
    assert "are answered with 503: the store" in messages[0]
    counts = [int(text.split()[4]) for text in messages if "stored again" in text]
    assert sum(counts) == statuses.count(503)
    assert "n-1" not in caplog.text


async def test_a_store_that_cannot_be_opened_raises_and_nothing_is_left_running(tmp_path):
    before = set(threading.enumerate())
    with pytest.raises(StoreError, match="cannot be opened"):
        async with inbox_at(tmp_path / "no" / "n.db"):
            pass
    # The thread may take its time to end, and threads of other tests come and go.
    await doubles.until(
        lambda: not any(each.name == "notifications" for each in {*threading.enumerate()} - before)
    )


async def test_a_cancelled_hit_does_no_harm(path):
    async with inbox_at(path) as inbox:
        for number in range(20):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await post(inbox, "completion", {**COMPLETION, "UniqueCode": f"m-{number}"})
        assert (await post(inbox, "completion", COMPLETION)).status == 200


async def wait_and_send(inbox, codes, on_start=lambda _tasks: None) -> dict[str, int]:
    """Post completions while the store is busy, so that they are stored together; return their statuses."""
    is_busy, go_on, statuses = threading.Event(), threading.Event(), {}

    def keep_busy(_: object) -> bool:
        is_busy.set()
        return go_on.wait(10)

    async def send(code: str) -> None:
        statuses[code] = (await post(inbox, "completion", {**COMPLETION, "UniqueCode": code})).status

    busy = inbox._committer.submit(keep_busy)
    await until(is_busy.is_set)
    async with anyio.create_task_group() as tasks:
        for code in codes:
            tasks.start_soon(send, code)
        await until(lambda: inbox._committer._jobs.qsize() == len(codes))
        on_start(tasks)
        go_on.set()
    assert busy.result(10)
    return statuses


async def test_one_bad_row_fails_no_other_hit_of_its_group(path):
    store = SqliteStore(path)
    codes = [f"m-{number}" for number in range(30)]
    async with inbox_at(store) as inbox:
        store._open.execute(
            "CREATE TRIGGER bad BEFORE INSERT ON facts WHEN new.member = '\"m-7\"'"
            " BEGIN SELECT RAISE(FAIL, 'bad'); END"
        )
        statuses = await wait_and_send(inbox, codes)
    assert [code for code, answered in statuses.items() if answered != 200] == ["m-7"]
    stored = [fact.notification.member_code for fact in await facts_of(inbox)]
    assert sorted(stored) == sorted({*codes} - {"m-7"})
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM receipts").fetchone() == (29,)


async def test_a_hit_that_is_cancelled_while_its_group_waits_is_stored_and_harms_no_other(path):
    codes = [f"m-{number}" for number in range(30)]
    async with inbox_at(path) as inbox:
        assert await wait_and_send(inbox, codes, lambda tasks: tasks.cancel_scope.cancel()) == {}
        assert await wait_and_send(inbox, ["later", "m-7"]) == {"later": 200, "m-7": 200}
    stored = await facts_of(inbox)
    assert sorted(fact.notification.member_code for fact in stored) == sorted([*codes, "later"])
    assert [fact.receipts for fact in stored if fact.notification.member_code == "m-7"] == [2]


async def test_a_transaction_is_tried_again_after_a_conflict(path):
    class BusyStore(SqliteStore):
        conflicts = 3

        @contextmanager
        def transaction(self):
            with super().transaction():
                yield
                if self.conflicts:
                    self.conflicts -= 1
                    raise StoreConflictError("a deadlock")

    async with inbox_at(BusyStore(path)) as inbox:
        assert (await post(inbox, "completion", COMPLETION)).status == 200
    (fact,) = await facts_of(inbox)
    assert fact.receipts == 1


async def test_two_inboxes_share_a_store(path):
    """As two processes do; each hit comes to both at once."""
    statuses = []

    async def send(inbox: Inbox, number: int) -> None:
        reply = await post(inbox, "completion", {**COMPLETION, "UniqueCode": f"m-{number}"})
        statuses.append(reply.status)

    async with inbox_at(path) as one, inbox_at(path) as other, anyio.create_task_group() as tasks:
        for number in range(150):
            tasks.start_soon(send, one, number)
            tasks.start_soon(send, other, number)
    assert statuses == [200] * 300
    assert [fact.receipts for fact in await facts_of(one)] == [2] * 150
    with closing(sqlite3.connect(path)) as database:
        verdicts = database.execute("SELECT verdict, count(*) FROM receipts GROUP BY verdict").fetchall()
    assert verdicts == [("new", 150), ("repeated", 150)]


async def test_hits_come_from_threads_too(path):
    async with inbox_at(path) as inbox:

        def send(number: int) -> int:
            fields = encoded({**COMPLETION, "UniqueCode": f"m-{number}"})
            return inbox.receive_sync("completion", fields, {}, PEER, secret=SECRET).status

        def send_all() -> list[int]:
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(send, range(200)))

        assert await anyio.to_thread.run_sync(send_all) == [200] * 200
        assert len(await facts_of(inbox)) == 200
        assert inbox.receive_sync("completion", b"x" * (1 << 20), {}, PEER, secret=SECRET).status == 200
        assert inbox.receive_sync("completion", b"x" * ((1 << 20) + 1), {}, PEER, secret=SECRET).status == 413
        assert inbox.receive_sync("completion", b"x", {}, PEER, secret="wrong").status == 404


async def test_a_large_body_is_read_in_a_thread(path):
    fields = [{**COMPLETION, "UniqueCode": f"m-{number}", "SurveyRef": "x" * 100} for number in range(1000)]
    async with inbox_at(path) as inbox:
        assert (await post(inbox, "completion", fields)).status == 200
        assert len(await facts_of(inbox)) == 1000
        assert (await post(inbox, "completion", b" " * ((1 << 20) + 1))).status == 413


async def test_the_operations_of_a_group_run_in_the_order_of_what_they_lock(tmp_path):
    # Otherwise two hosts that have the same members at the same moment could wait for each other.
    committer = Committer(SqliteStore(tmp_path / "n.db"))
    committer.start()
    is_first_running, goes_on, order = threading.Event(), threading.Event(), []

    def first(_store):
        is_first_running.set()
        assert goes_on.wait(30)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(committer.run, first)
        await until(is_first_running.is_set)
        for key in ("c", "a", "b"):
            tasks.start_soon(partial(committer.run, lambda _store, key=key: order.append(key), key=key))
        await until(lambda: committer._jobs.qsize() == 3)
        goes_on.set()
    committer.stop()
    assert order == ["a", "b", "c"]


def test_too_many_that_wait_are_refused(tmp_path):
    committer = Committer(SqliteStore(tmp_path / "n.db"))
    committer.start()
    go_on = threading.Event()
    try:
        first = committer.submit(lambda _: go_on.wait(10))
        with pytest.raises(StoreError, match="wait to be stored"):
            for _ in range(MOST_WAITING + GROUP + 2):
                committer.submit(lambda _: None)
        go_on.set()
        assert first.result(10)
    finally:
        go_on.set()
        committer.stop()
    with pytest.raises(StoreError, match="is closed"):
        committer.submit(lambda _: None)


async def test_a_lock_of_somebody_else_is_answered_once_and_for_all(path, monkeypatch):
    monkeypatch.setattr("sampling_async.notifications._sqlite._BUSY_SECONDS", 0.2)
    async with inbox_at(path) as inbox:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            statuses = []

            async def send(number: int) -> None:
                reply = await post(inbox, "completion", {**COMPLETION, "UniqueCode": str(number)})
                statuses.append(reply.status)

            with anyio.fail_after(10):  # 60 hits wait for the lock together; one after the other takes 12 s
                async with anyio.create_task_group() as tasks:
                    for number in range(60):
                        tasks.start_soon(send, number)
            assert statuses == [503] * 60
            other.execute("ROLLBACK")
        assert (await post(inbox, "completion", COMPLETION)).status == 200


async def test_secrets_can_be_rotated_beside_an_open_inbox(path):
    store = SqliteStore(path)
    async with Inbox(store, secrets=kept_secrets(store)) as inbox:
        rotate_secrets(inbox.store)
        secret = inbox.path(Kind.COMPLETION).rpartition("/")[2]
        assert (await post(inbox, "completion", COMPLETION, secret=secret)).status == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("ticks", range(12))
async def test_a_cancelled_host_leaves_no_thread_and_no_open_file(path, ticks):
    async def host() -> None:
        async with inbox_at(path) as inbox:
            await post(inbox, "completion", COMPLETION)

    before = set(threading.enumerate())  # another test of this process may have left a daemon
    task = asyncio.create_task(host())
    for _ in range(ticks):
        await asyncio.sleep(0.0005)
    task.cancel()
    await asyncio.wait([task])
    assert not [each for each in set(threading.enumerate()) - before if each.name == "notifications"]
    assert not path.with_name("n.db-wal").exists()


@pytest.mark.parametrize(
    "odd", [{"peer": None}, {"headers": [(b"X-Forwarded-For", b"\xff")]}, {"headers": [1]}]
)
async def test_odd_arguments_do_not_raise(path, odd):
    given = {"headers": {}, "peer": PEER, **odd}
    async with inbox_at(path) as inbox:
        reply = await inbox.receive("completion", memoryview(b"?"), secret=SECRET, **given)
        assert reply.status == (503 if odd.get("headers") == [1] else 200)
        hits = inbox.receive_sync("completion", bytearray(b"?"), secret=SECRET, **given)
        assert hits.status == reply.status


async def test_a_password_in_headers_of_bytes_is_read_and_not_stored(path):
    async with inbox_at(path, secrets=(), basic=[("operator", "a password that is long")]) as inbox:
        ((name, value),) = basic("operator", "a password that is long").items()
        reply = await inbox.receive("completion", b"?", iter([(name.encode(), value.encode())]), PEER)
        (stored,) = inbox.store._open.execute("SELECT headers FROM receipts").fetchone()
    assert reply.status == 200
    assert stored == '[["authorization", "<hidden>"]]'


# --- Who may post


@pytest.mark.parametrize(
    ("kind", "secret", "expected"),
    [
        ("completion", SECRET, 200),
        ("completion", "", 404),
        ("completion", SECRET[:-1], 404),
        ("completion", SECRET + "x", 404),
        ("completion", "\ud800", 404),
        ("complete", SECRET, 404),
        ("", SECRET, 404),
    ],
)
async def test_a_wrong_secret_is_not_found_and_nothing_is_stored(path, kind, secret, expected):
    async with inbox_at(path) as inbox:
        assert (await post(inbox, kind, COMPLETION, secret=secret)).status == expected
        (count,) = inbox.store._open.execute("SELECT count(*) FROM receipts").fetchone()
        assert count == (expected == 200)


async def test_several_secrets_are_valid_at_once(path):
    old, new = "the-old-secret-of-all", "the-new-secret-of-all"
    async with inbox_at(path, secrets=[new, old]) as inbox:
        for secret in (old, new):
            assert (await post(inbox, "completion", COMPLETION, secret=secret)).status == 200
        assert inbox.urls("https://x/events/")[Kind.COMPLETION] == f"https://x/events/completion/{new}"


async def test_each_kind_has_its_secret(path):
    secrets = kept_secrets(path)
    async with inbox_at(path, secrets=secrets) as inbox:
        for kind in Kind:
            assert (await post(inbox, kind, b"?", secret=secrets[kind][0])).status == 200
            another = Kind.TERMINATE if kind is not Kind.TERMINATE else Kind.INVITE
            assert (await post(inbox, kind, b"?", secret=secrets[another][0])).status == 404


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secrets": ()}, "needs a secret for each kind"),
        ({"secrets": {Kind.COMPLETION: SECRET}}, "needs a secret for each kind"),
        ({"secrets": ""}, "at least 16 characters"),
        ({"secrets": [SECRET, ""]}, "at least 16 characters"),
        ({"secrets": "short"}, "at least 16 characters"),
        ({"secrets": {"complete": SECRET}}, "no kind of notification"),
        ({"secrets": "with/a/slash/in/it/is/none"}, "letters, digits and"),
        ({"basic": [("operator", "")]}, "at least 16 characters"),
        ({"networks": ["198.51.100.7/24"]}, "no network such as"),
        ({"trusted_proxies": ["localhost"]}, "no network such as"),
        ({"networks": [b"10.0"]}, "no network such as"),
        ({"networks": [167_772_160]}, "no network such as"),
        ({"shared_secrets": [""]}, "not empty"),
        ({"require_signature": True}, "needs shared_secrets"),
    ],
)
def test_an_inbox_that_anybody_could_post_to_is_refused(path, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        inbox_at(path, **options)
    assert not path.exists()


def basic(user, password):
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (basic("operator", "a password that is long"), 200),
        (basic("operator", "another"), 404),
        (basic("", ""), 404),
        ({}, 404),
        ({"Authorization": "Basic ?"}, 404),
        ({"Authorization": "Bearer x"}, 404),
    ],
)
async def test_basic_auth_stands_in_place_of_a_secret(path, headers, expected):
    async with inbox_at(path, secrets=(), basic=[("operator", "a password that is long")]) as inbox:
        assert (await inbox.receive("completion", encoded(COMPLETION), headers, PEER)).status == expected
        assert inbox.path(Kind.COMPLETION) == "/completion"


async def test_passwords_are_not_stored(path):
    headers = {**basic("operator", "a password that is long"), "Cookie": "session=1", "X-Request-Id": "abc"}
    async with inbox_at(path, secrets=(), basic=[("operator", "a password that is long")]) as inbox:
        await inbox.receive("completion", encoded(COMPLETION), headers, PEER)
        (stored,) = inbox.store._open.execute("SELECT headers FROM receipts").fetchone()
    assert "abc" in stored
    assert "session" not in stored
    assert basic("operator", "a password that is long")["Authorization"][6:] not in stored


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("198.51.100.7", None, 200),
        ("::ffff:198.51.100.7", None, 200),
        ("203.0.113.9", None, 403),
        ("", None, 403),
        ("unix socket", None, 403),
        ("10.0.0.1", "198.51.100.7", 200),
        ("10.0.0.1", "198.51.100.7:4321", 200),
        ("10.0.0.1", "198.51.100.7, 10.0.0.2", 200),
        ("10.0.0.1", "198.51.100.7, 203.0.113.9", 403),
        ("10.0.0.1", "203.0.113.9", 403),
        ("10.0.0.1", "[2001:db8::7]:443", 200),
        ("10.0.0.1", "2001:db8::7", 200),
        ("10.0.0.1", "garbage", 403),
        ("10.0.0.1", None, 403),
        ("203.0.113.9", "198.51.100.7", 403),
    ],
)
async def test_only_allowed_addresses_may_post_and_headers_spoof_nothing(path, peer, forwarded, expected):
    guard = {"networks": ["198.51.100.0/24", "2001:db8::/32"], "trusted_proxies": ["10.0.0.0/8"]}
    headers = [] if forwarded is None else [("X-Forwarded-For", forwarded)]
    async with inbox_at(path, **guard) as inbox:
        reply = await inbox.receive("completion", encoded(COMPLETION), headers, peer, secret=SECRET)
        assert reply.status == expected
        wrong = await inbox.receive("completion", encoded(COMPLETION), headers, peer, secret="wrong")
        assert wrong.status == 404


async def test_the_address_behind_the_proxy_is_stored(path):
    async with inbox_at(path, trusted_proxies=["10.0.0.0/8"]) as inbox:
        headers = [("X-Forwarded-For", "1.2.3.4"), ("X-Forwarded-For", "198.51.100.9")]
        await inbox.receive("completion", encoded(COMPLETION), headers, "10.0.0.1", secret=SECRET)
        assert inbox.store._open.execute("SELECT peer FROM receipts").fetchone() == ("198.51.100.9",)


# --- Signatures


async def test_a_forged_notification_does_not_reserve_its_place(path):
    from test_notifications_signatures import signature_of  # noqa: PLC0415

    forged = {**COMPLETION, "Revenue": 99_999, "EncryptedValue": "0" * 64}
    true = {**COMPLETION, "EncryptedValue": signature_of("240177m-1")}
    async with inbox_at(path, shared_secrets="supersecret") as inbox:
        assert (await post(inbox, "completion", forged)).status == 403
        assert (await post(inbox, "completion", true)).status == 200
        assert (await post(inbox, "completion", [true, forged])).status == 403
        (fact,) = await facts_of(inbox)
        assert fact.verified
        assert (fact.receipts, fact.corrects) == (1, None)
        rows = inbox.store._open.execute("SELECT verdict, length(body) FROM receipts").fetchall()
        assert [verdict for verdict, _ in rows] == ["wrong signature", "new", "wrong signature"]
        assert all(size for _, size in rows)


async def test_a_proof_that_comes_later_counts(path):
    from test_notifications_signatures import signature_of  # noqa: PLC0415

    async with inbox_at(path, shared_secrets="supersecret") as inbox:
        await post(inbox, "completion", COMPLETION)
        assert not (await facts_of(inbox))[0].verified
        await post(inbox, "completion", {**COMPLETION, "EncryptedValue": signature_of("240177m-1")})
        (fact,) = await facts_of(inbox)
        assert (fact.verified, fact.receipts, fact.differing) == (True, 2, 0)


async def test_a_signature_may_be_required(path):
    async with inbox_at(path, shared_secrets="supersecret", require_signature=True) as inbox:
        assert (await post(inbox, "completion", COMPLETION)).status == 403
        assert (await post(inbox, "survey_closed", CLOSED)).status == 200
        assert (await post(inbox, "completion", b"?")).status == 200
    assert [type(fact.notification) for fact in await facts_of(inbox)][1:] == [UnknownNotification]


def test_a_record_that_cannot_be_read_is_no_proof():
    record = parse(Kind.COMPLETION, FieldReader(COMPLETION))
    assert not Signatures((), is_required=False).verified(record, "0" * 64)


# --- What error reports show


GOOD = "Zx3-good-secret-of-the-inbox"


def frames_of(exc: BaseException) -> str:
    """Return the local variables of the frames of the package, as error reports show them."""
    trace = traceback.TracebackException.from_exception(exc, capture_locals=True)
    return str([frame.locals for frame in trace.stack if "sampling_async" in frame.filename])


@pytest.mark.parametrize(
    "wrong",
    [
        {"secrets": [GOOD, "short"]},
        {"secrets": [GOOD, "no/path/at-all-of-a-URL"]},
        {"secrets": {"completion": GOOD}},
        {"basic": [("agent", GOOD), ("b", "short")]},
        {"secrets": GOOD, "shared_secrets": [GOOD, ""]},
        {"secrets": GOOD, "networks": ["no network"]},
    ],
)
def test_an_inbox_that_cannot_be_made_shows_no_secret(path, wrong):
    with pytest.raises(InvalidRequestError) as caught:
        Inbox(path, **wrong)
    assert GOOD not in frames_of(caught.value)
    assert "<Inbox: not made>" in frames_of(caught.value)


def test_a_redirect_cannot_be_checked_with_an_empty_secret_and_no_other_is_shown():
    with pytest.raises(InvalidRequestError, match="secrets are texts that are not empty") as caught:
        verify_redirect("https://partner.example?a=1&hash=0", [GOOD, ""])
    assert GOOD not in frames_of(caught.value)


# --- What is replaced, and other event loops


def test_nothing_is_acknowledged_for_a_file_that_was_replaced(tmp_path):
    async def main():
        path = tmp_path / "n.db"
        async with Inbox(path, secrets=SECRET) as inbox:
            assert (await post(inbox, "completion", COMPLETION)).status == 200
            for part in tmp_path.glob("n.db*"):
                part.rename(tmp_path / f"moved-{part.name}")
            assert (await post(inbox, "terminate", TERMINATE)).status == 503
            async with Inbox(path, secrets=SECRET):
                assert (await post(inbox, "terminate", TERMINATE)).status == 503

    anyio.run(main)


def test_large_bodies_in_two_event_loops_are_read_one_after_the_other(tmp_path):
    large = {**COMPLETION, "More": "x" * 20_000}

    async def main():
        async with Inbox(tmp_path / "n.db", secrets=SECRET) as inbox:

            async def eight(start):
                results = []

                async def one(number):
                    results.append((await post(inbox, "completion", {**large, "WaveId": number})).status)

                with anyio.fail_after(30):
                    async with anyio.create_task_group() as group:
                        for number in range(start, start + 8):
                            group.start_soon(one, number)
                assert results == [200] * 8

            async with anyio.create_task_group() as group:
                group.start_soon(anyio.to_thread.run_sync, anyio.run, eight, 100)
                group.start_soon(eight, 200)

    anyio.run(main)
