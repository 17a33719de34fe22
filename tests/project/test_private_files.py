"""Files that only their owner can read, and that appear only when they are complete."""

from __future__ import annotations

import errno
import os
import shutil
import stat

import doubles
import httpx
import pytest
from cli_kit import run
from panel_kit import all_of, campaign_of

from sampling_async import InvalidRequestError, InviteRequest, Journal, JournalError
from sampling_async._pacing.threads import in_thread
from sampling_async._private_files import make_private, open_private, require_private, written_whole
from sampling_async._watch.cache import CacheFile
from sampling_async.campaign import LedgerError
from sampling_async.campaign._ledger import CampaignLedger
from sampling_async.notifications import OutcomeLedger, SqliteStore, StoreError
from sampling_async.simulator import Simulator

SOMEBODY = 12345

as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to others"
)
on_posix = pytest.mark.skipif(os.name != "posix", reason="files have no modes")


@pytest.fixture
def folder(tmp_path):
    mask = os.umask(0)  # everybody may do everything with new files
    yield tmp_path
    tmp_path.chmod(0o700)
    os.umask(mask)


def mode_of(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def given_away(path, mode=0o666):
    path.touch()
    path.chmod(mode)
    os.chown(path, SOMEBODY, SOMEBODY)
    return path


# --- Files that are written whole


@on_posix
@pytest.mark.parametrize("before", [None, 0o600, 0o644, 0o666])
def test_a_file_is_for_its_owner_only_from_its_first_byte_whatever_was_there(folder, before):
    if before is not None:
        (folder / "file").touch()
        (folder / "file").chmod(before)
    (folder / "link").symlink_to(folder / "file")
    with written_whole(folder / "link") as unfinished:
        unfinished.write_text("whole")
        assert mode_of(unfinished) == 0o600
        assert (folder / "file").exists() is (before is not None)
    assert ((folder / "file").read_text(), mode_of(folder / "file")) == ("whole", 0o600)
    assert (folder / "link").is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == ["file", "link"]


@as_root
def test_somebody_elses_file_is_replaced_and_their_link_is_not_followed(folder):
    given_away(folder / "file")
    with written_whole(folder / "file") as unfinished:
        unfinished.write_text("new")
    assert ((folder / "file").stat().st_uid, mode_of(folder / "file")) == (0, 0o600)
    (folder / "link").symlink_to(folder / "file")
    os.lchown(folder / "link", SOMEBODY, SOMEBODY)
    with pytest.raises(PermissionError, match=r"link of another user .uid 12345."):
        with written_whole(folder / "link"):
            pytest.fail("it would be written where somebody else wants")
    assert (folder / "file").read_text() == "new"


@pytest.mark.parametrize(
    ("failure", "number", "text"),
    [
        (
            OSError(errno.ENOSPC, "it is full", "/tmp/other"),
            errno.ENOSPC,
            "it is full",
        ),
        (OSError("of pyarrow"), errno.EIO, "of pyarrow"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_and_the_earlier_one_stays(folder, failure, number, text):
    (folder / "file").write_text("earlier")
    with pytest.raises(OSError, match=text) as caught, written_whole(folder / "file"):
        raise failure
    assert (caught.value.errno, caught.value.strerror) == (number, text)
    assert caught.value.filename == str(folder / "file")
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "earlier"


def test_links_in_a_circle_are_refused_and_stay(folder):
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    with pytest.raises(OSError, match="symbolic links") as caught, written_whole(folder / "a"):
        pytest.fail("there is nothing to write to")
    assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, str(folder / "a"))
    assert (folder / "a").is_symlink()
    assert (folder / "b").is_symlink()


# --- Files that are opened


@on_posix
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o606, 0o777])
@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
def test_our_own_file_is_closed_to_others_with_a_word(folder, mode, end, caplog):
    path = folder / f"file{end}"
    path.write_text("kept")
    path.chmod(mode)
    for _ in range(2):  # the second time there is nothing to do
        require_private(folder / "file")
        assert (mode_of(path), path.read_text()) == (mode & 0o700, "kept")
    assert caplog.messages == [f"{path} was open to others (mode {mode:04o}), and is its owner's alone now"]


@on_posix
def test_a_file_whose_mode_does_not_change_is_refused(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setattr(os, "chmod", lambda *_: None)
    with pytest.raises(PermissionError, match="file can be read by others, and its file system"):
        require_private(folder / "file")


@on_posix
def test_a_link_beside_a_database_or_in_the_place_of_a_lock_is_refused(folder):
    (folder / "file-wal").symlink_to(folder / "other")
    with pytest.raises(PermissionError, match=r"file-wal is a symbolic link.*name another file, or remove it"):
        require_private(folder / "file")
    with pytest.raises(PermissionError, match="file-wal is a symbolic link"):
        open_private(folder / "file-wal")
    assert not (folder / "other").exists()


@on_posix
def test_a_lock_is_made_for_its_owner_only_or_closed_to_others(folder):
    os.close(open_private(folder / "lock"))
    assert mode_of(folder / "lock") == 0o600
    (folder / "lock").chmod(0o666)
    os.close(open_private(folder / "lock"))
    assert mode_of(folder / "lock") == 0o600
    with pytest.raises(IsADirectoryError):
        open_private(folder)


def test_a_file_is_made_only_where_there_is_none(folder):
    make_private(folder / "file")
    with pytest.raises(FileExistsError):
        make_private(folder / "file")


# --- What is kept in such files


async def journal_at(path):
    return [outcome async for outcome in Journal(path).outcomes()]


async def campaign_at(path):
    ledger = CampaignLedger(path)
    ledger.open(make=True)
    ledger.lock()
    ledger.close()


async def store_at(path):
    store = SqliteStore(path)
    store.open()
    store.close()


KEPT = [(journal_at, JournalError), (campaign_at, LedgerError), (store_at, StoreError)]


@as_root
@pytest.mark.anyio
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
@pytest.mark.parametrize(("opened", "error"), KEPT)
async def test_what_somebody_else_has_made_first_is_refused(folder, opened, error, end, mode):
    path = given_away(folder / f"kept.db{end}", mode)
    with pytest.raises(error) as caught:
        await opened(folder / "kept.db")
    assert f"{folder / 'kept.db'} " in str(caught.value)
    assert f"kept.db{end} belongs to another user (uid 12345)" in str(caught.value)
    assert str(caught.value).endswith("name another file, or remove it")
    assert (path.stat().st_uid, path.read_bytes()) == (SOMEBODY, b"")


@as_root
@pytest.mark.anyio
@pytest.mark.parametrize(("opened", "error"), KEPT)
async def test_what_somebody_elses_link_leads_to_is_refused(folder, opened, error):
    (folder / "kept.db").symlink_to(folder / "theirs")
    os.lchown(folder / "kept.db", SOMEBODY, SOMEBODY)
    with pytest.raises(error, match="symbolic link of another user"):
        await opened(folder / "kept.db")
    assert not (folder / "theirs").exists()


@on_posix
@pytest.mark.anyio
@pytest.mark.parametrize(("opened", "error"), KEPT[:2])
async def test_a_lock_that_is_a_link_is_not_followed(folder, opened, error):
    (folder / "target").write_text("kept")
    (folder / "kept.db-lock").symlink_to(folder / "target")
    with pytest.raises(error, match=r"kept\.db"):
        await opened(folder / "kept.db")
    assert ((folder / "target").read_text(), mode_of(folder / "target")) == ("kept", 0o666)


@as_root
def test_a_lock_of_somebody_else_is_refused(folder):
    given_away(folder / "kept.db-lock")
    with pytest.raises(PermissionError, match=r"kept\.db-lock belongs to another user"):
        open_private(folder / "kept.db-lock")


@on_posix
@pytest.mark.anyio
@pytest.mark.parametrize(("opened", "error"), KEPT[1:])
async def test_what_is_of_this_package_and_was_restored_with_another_mode_is_closed_to_others(
    folder, opened, error
):
    await opened(folder / "kept.db")
    (folder / "kept.db").chmod(0o664)
    await opened(folder / "kept.db")
    assert {path.name: mode_of(path) for path in folder.iterdir()} == dict.fromkeys(
        (path.name for path in folder.iterdir()), 0o600
    )


@on_posix
@pytest.mark.anyio
async def test_a_journal_of_this_package_is_closed_to_others_and_goes_on(folder):
    async def run():
        async with doubles.client(lambda asked: httpx.Response(200, json=doubles.bulk(asked))) as client:
            async with client.fan_out([InviteRequest("m", [1, 2])], journal=folder / "kept.db") as stream:
                return [outcome.replayed async for outcome in stream]

    assert await run() == [False, False]
    for path in folder.iterdir():
        path.chmod(0o666)
    assert await run() == [True, True]
    assert {path.name: mode_of(path) for path in folder.iterdir()} == {"kept.db": 0o600, "kept.db-lock": 0o600}


def test_a_store_that_is_no_file_is_refused(folder):
    with pytest.raises(StoreError, match="cannot be opened"):
        SqliteStore(folder).open()
    with pytest.raises(InvalidRequestError, match="a path object that names a file"):
        SqliteStore("/")


@as_root
def test_somebody_elses_cache_is_neither_read_nor_written(folder, caplog):
    path = given_away(folder / "cache")
    cache = CacheFile(path, "me", 1000)
    assert cache.load(0.0) is None
    cache.save(None, 0.0)  # type: ignore[arg-type]
    refused = "cache belongs to another user (uid 12345)"
    read, written = caplog.messages
    assert (f"cannot be read: {refused}" in read, f"cannot be written: {refused}" in written) == (True, True)
    assert path.stat().st_size == 0


# --- Reading


def state_of(folder):
    """Return all that reading must not change, of the files of a folder that are there."""
    found = {path: path.stat() for path in folder.iterdir()}
    return {path: (each.st_mode, each.st_mtime_ns, path.read_bytes()) for path, each in found.items()}


@on_posix
@pytest.mark.anyio
@pytest.mark.parametrize("is_copy", [False, True])
async def test_commands_that_read_change_nothing(folder, is_copy, monkeypatch, tmp_path_factory):
    """A copy stands for a folder and a file that cannot be written: SQLite finds out when it would write."""
    simulator = Simulator(3, surveys=8, members=10)
    async with simulator.client() as client:
        campaign = campaign_of(simulator, client, folder, ledger=folder / "campaign.ledger")
        await campaign.plan()
        outcomes = await all_of(campaign.run())
    await OutcomeLedger(folder / "kept.db").invited(outcomes)
    for path in folder.iterdir():
        path.chmod(0o440 if is_copy else 0o640)
    folder.chmod(0o550 if is_copy else 0o750)
    if is_copy:
        monkeypatch.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)  # for root
    before = state_of(folder)
    reading = [
        ("campaign", "status", folder),
        ("campaign", "limit", folder),
        ("campaign", "report", folder, "--out", tmp_path_factory.mktemp("report")),
        ("outcomes", "--store", folder / "kept.db"),
        ("notifications", "show", "--store", folder / "kept.db"),
    ]
    for command in reading:
        done = await in_thread(lambda command=command: run(*command))
        assert (command, done.exit_code, done.stderr[-200:]) == (command, 0, done.stderr[-200:])
        assert state_of(folder) == before


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_writer_has_not_brought_into_the_file_yet_is_read(folder, is_killed):
    path = folder / "kept.db"
    store = SqliteStore(path)
    store.open()
    with store.transaction():
        store.keep_url("https://partner.example")
    if is_killed:
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", f"{folder / 'left.db'}{end}")
        path = folder / "left.db"
    before = path.read_bytes()
    with SqliteStore(path).reading("cannot be read") as run_query:
        assert run_query("SELECT url FROM served").fetchall() == [("https://partner.example",)]
    assert path.read_bytes() == before
    store.close()
