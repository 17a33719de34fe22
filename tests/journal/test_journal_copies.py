"""Copies of journals, and members that are erased from them."""

from __future__ import annotations

import stat

import doubles
import httpx
import pytest
from journal_kit import PANEL, Ledger, facts, failing, full, read, run

from sampling_async import InvalidRequestError, InviteRequest, Journal, JournalError

# --- Copies


async def test_a_copy_of_a_journal_in_use_is_complete(tmp_path):
    service, copy = Ledger(), tmp_path / "copy"
    async with doubles.client(service) as client:
        journal = Journal(tmp_path / "journal")
        async with client.fan_out(PANEL, journal=journal, chunk_size=3) as stream:
            first = [await anext(stream) for _ in range(7)]
            for _ in range(2):  # the second copy replaces the first
                await journal.backup(copy)
    known = {(o.member_code, o.quota_id) for o in await run(Ledger(httpx.Response(403)), copy) if o.invite}
    assert {(o.member_code, o.quota_id) for o in first if o.invite} <= known
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_journal_that_nobody_uses_can_be_copied(tmp_path):
    service = Ledger()
    first = await run(service, tmp_path / "journal")
    await Journal(tmp_path / "journal").backup(str(tmp_path / "copy"))
    assert facts(await run(service, tmp_path / "copy")) == facts(first)
    assert set(service.asked.values()) == {1}


async def test_a_copy_replaces_all_that_belongs_to_an_earlier_one(tmp_path):
    await run(Ledger(), tmp_path / "journal")
    await Journal(tmp_path / "journal").backup(tmp_path / "copy")
    # What a process leaves that used the earlier copy, or was killed while it made one.
    for end in ("-wal", "-part", "-part-wal"):
        (tmp_path / f"copy{end}").write_bytes(b"of an earlier copy")
    with (tmp_path / "copy-lock").open("ab") as lock:
        lock.write(b"and more")
    await Journal(tmp_path / "journal").backup(tmp_path / "copy")
    assert {file.name for file in tmp_path.glob("copy*")} == {"copy", "copy-lock"}
    assert facts(await read(Journal(tmp_path / "copy"))) == facts(await read(Journal(tmp_path / "journal")))


@pytest.mark.parametrize(
    ("method", "named"), [("file.JournalFile._opened", "journal"), ("rows.JournalRows.copy", "copy")]
)
async def test_an_error_in_copying_names_the_file_that_it_is_about(tmp_path, monkeypatch, method, named):
    await run(Ledger(), tmp_path / "journal")

    monkeypatch.setattr(f"sampling_async._journal.{method}", failing)
    with pytest.raises(JournalError, match="SQLite says") as caught:
        await Journal(tmp_path / "journal").backup(tmp_path / "copy")
    assert caught.value.path == tmp_path / named
    assert not list(tmp_path.glob("copy-part*"))  # with member codes


async def test_a_journal_that_cannot_be_copied_is_refused(tmp_path):
    with pytest.raises(JournalError, match=r"journal does not exist$") as caught:
        await Journal(tmp_path / "journal").backup(tmp_path / "copy")
    assert caught.value.path == tmp_path / "journal"
    (tmp_path / "empty").touch()
    with pytest.raises(JournalError, match=r"empty is empty$") as caught:
        await Journal(tmp_path / "empty").backup(tmp_path / "copy")
    assert caught.value.path == tmp_path / "empty"
    journal = Journal(tmp_path / "journal")
    async with doubles.client(Ledger()) as client, client.fan_out([], journal=journal):
        (tmp_path / "letter").write_text("kept")
        with pytest.raises(JournalError, match="letter exists already, and is not a journal"):
            await journal.backup(tmp_path / "letter")
        assert (tmp_path / "letter").read_text() == "kept"
        for taken, reason in [(journal.path, "in use"), (tmp_path / "none" / "copy", "No such file")]:
            with pytest.raises(JournalError, match=reason):
                await journal.backup(taken)
        with pytest.raises(InvalidRequestError):
            await journal.backup("a\0b")
        with pytest.raises(JournalError, match="in use"):
            await Journal(journal.path).backup(tmp_path / "copy")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "journal", "journal-lock", "letter"]


# --- Erasing


async def test_a_member_is_erased_and_the_others_stay(tmp_path):
    path, service = tmp_path / "journal", Ledger()
    requests = [InviteRequest(code, [2, 4, 5]) for code in ("m-1", "erased-canary", "m-3")]
    await run(service, path, requests)
    journal, sent = Journal(path), len(service.requests)
    assert await journal.erase("erased-canary") == 2  # a request and its response
    assert await journal.erase("erased-canary") == 0
    assert {outcome.member_code for outcome in await read(journal)} == {"m-1", "m-3"}
    assert await journal.counts() == {"invited": 4, "rejected": 2, "not_sent": 0, "unknown": 0}
    assert len(await run(service, path, requests[::2])) == 6
    assert len(service.requests) == sent
    assert not [file for file in tmp_path.iterdir() if b"erased-canary" in file.read_bytes()]


async def test_nothing_is_erased_from_a_journal_in_use_or_of_nobody(tmp_path):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.fan_out([InviteRequest("m-1", [2])], journal=tmp_path / "journal") as outcomes:
            async for _ in outcomes:
                with pytest.raises(JournalError, match="in use"):
                    await Journal(tmp_path / "journal").erase("m-1")
    with pytest.raises(JournalError, match="does not exist"):
        await Journal(tmp_path / "another").erase("m-1")


async def test_a_journal_that_cannot_be_erased_from_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    await run(Ledger(), path, [InviteRequest(code, [2]) for code in ("m-1", "m-2")])
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("sampling_async._journal.rows.JournalRows.append", full)
        with pytest.raises(JournalError):
            await Journal(path).erase("m-1")
    assert path.read_bytes() == before
    assert await Journal(path).counts() == {"invited": 2, "rejected": 0, "not_sent": 0, "unknown": 0}
    assert {file.name for file in tmp_path.iterdir()} == {"journal", "journal-lock"}
