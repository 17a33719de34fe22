"""The file of a watch's cache by itself: what it holds, what it refuses and says, and the bounds of its age."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

import pytest
from watch_kit import inventory

from sampling_async._private_files import make_private
from sampling_async._watch.cache import _LATE_START, _LEFTOVER, CacheFile

NOW = 1_700_000_000.0


def saved(path: Path, *quota_ids: int) -> CacheFile:
    cache = CacheFile(path, "me", 1000)
    cache.save(inventory(*quota_ids), NOW)
    return cache


def test_it_returns_what_was_saved_and_when_it_was_read(tmp_path):
    assert saved(tmp_path / "cache", 1, 2, 3).load(NOW + 5) == (inventory(1, 2, 3), NOW)
    assert CacheFile(str(tmp_path / "cache"), "me", 1000).load(NOW) == (inventory(1, 2, 3), NOW)


def test_it_holds_a_head_the_inventory_each_survey_once_and_a_digest(tmp_path):
    saved(tmp_path / "cache", 1, 2, 3)
    head, quotas, *surveys, digest = map(json.loads, (tmp_path / "cache").read_text().splitlines())
    assert (set(head), head["began"]) == ({"form", "owner", "began"}, NOW)
    assert "me" not in head["owner"]
    assert quotas["Surveys"] == []
    assert len(surveys) == len(inventory(1, 2, 3).surveys)
    assert set(digest) == {"digest"}


def test_there_is_nothing_without_a_file_and_nothing_is_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    assert CacheFile(tmp_path / "cache", "me", 1000).load(NOW) is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("at", "is_used"),
    [(1000.0, True), (1000.5, False), (-_LATE_START, True), (-_LATE_START - 0.5, False), (0.0, True)],
)
def test_it_is_used_up_to_its_greatest_age_and_if_it_was_read_a_little_later_than_now(
    tmp_path, at, is_used, caplog
):
    caplog.set_level(logging.INFO)
    path = tmp_path / "cache"
    assert (saved(path, 1).load(NOW + at) is not None) is is_used
    told = [record.getMessage() for record in caplog.records]
    assert told == ([] if is_used else [f"the cache {path} is not used: it is {at:.0f} s old"])
    assert all(record.levelno == logging.INFO for record in caplog.records)


@pytest.mark.parametrize(
    ("change", "owner", "why"),
    [
        (lambda body: body.replace(b'"form":', b'"farm":'), "me", "it has another form"),
        (lambda _: b"[]\n", "me", "it has another form"),
        (lambda body: body, "you", "it belongs to another address, panel or option"),
        (lambda body: body[:-2] + b"x\n", "me", "it is damaged"),
        (lambda body: body[: body[:-1].rindex(b"\n") + 1], "me", "it is damaged"),
    ],
)
def test_what_is_wrong_with_it_is_logged(tmp_path, change, owner, why, caplog):
    path = tmp_path / "cache"
    saved(path, 1, 2)
    path.write_bytes(change(path.read_bytes()))
    assert CacheFile(path, owner, 1000).load(NOW) is None
    assert [record.getMessage() for record in caplog.records] == [f"the cache {path} is not used: {why}"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name")
def test_a_pipe_is_not_read(tmp_path, caplog):
    os.mkfifo(tmp_path / "cache")
    assert CacheFile(tmp_path / "cache", "me", 1000).load(NOW) is None
    assert (
        caplog.records[0].getMessage()
        == f"the cache {tmp_path / 'cache'} cannot be read: it is no regular file"
    )


def test_why_it_cannot_be_read_or_written_is_logged_in_the_words_of_the_system(tmp_path, caplog):
    cache = CacheFile(tmp_path, "me", 1000)  # a folder
    assert cache.load(NOW) is None
    CacheFile(tmp_path / "no" / "cache", "me", 1000).save(inventory(1), NOW)
    assert [record.getMessage() for record in caplog.records] == [
        f"the cache {tmp_path} cannot be read: it is no regular file",
        f"the cache {tmp_path / 'no' / 'cache'} cannot be written: No such file or directory",
    ]


def test_what_a_killed_process_left_is_removed_after_a_while(tmp_path):
    cache = saved(tmp_path / "cache", 1)
    ours = [".cache.old.sampling_async", ".cache.new.sampling_async"]
    foreign = [".cachet.old.sampling_async", ".cache.toml", ".cache.json.swp", ".cache.sampling_async.bak"]
    for name in (*ours, *foreign):
        path = tmp_path / name
        path.touch()
        then = path.stat().st_mtime - _LEFTOVER + (60 if ".new." in name else -60)
        os.utime(path, (then, then))
    cache.load(NOW)
    assert {path.name for path in tmp_path.iterdir()} == {"cache", ours[1], *foreign}


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, caplog):
    path = tmp_path / "cache"
    cache = saved(path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    cache.save(inventory(1, 2), NOW)
    assert list(tmp_path.iterdir()) == [path]
    assert cache.load(NOW) == (inventory(1), NOW)
    assert "cannot be written: No space left on device" in caplog.text


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links")
def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "there" / "real")
    assert saved(tmp_path / "cache", 1).load(NOW) == (inventory(1), NOW)
    assert (tmp_path / "cache").is_symlink()
    assert (tmp_path / "there" / "real").is_file()


def test_a_new_file_is_made_beside_the_old_one_under_a_name_that_is_known_for_a_leftover(tmp_path, monkeypatch):
    made = []
    mkstemp = tempfile.mkstemp
    monkeypatch.setattr(tempfile, "mkstemp", lambda *given: made.append(given) or mkstemp(*given))
    saved(tmp_path / "cache", 1)
    assert made == [(".sampling_async", ".cache.", tmp_path)]  # only there it is renamed in one step


def test_what_cannot_be_removed_is_left(tmp_path, monkeypatch, caplog):
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    leftover = tmp_path / ".cache.old.sampling_async"
    leftover.write_text("")
    os.utime(leftover, (1, 1))
    monkeypatch.setattr(Path, "unlink", refused)
    assert saved(tmp_path / "cache", 1).load(NOW) is not None
    assert leftover.exists()
    monkeypatch.setattr(Path, "replace", refused)
    saved(tmp_path / "cache", 2)
    assert caplog.messages == [f"the cache {tmp_path / 'cache'} cannot be written: Permission denied"]


def test_an_empty_file_is_none(tmp_path, caplog):
    make_private(tmp_path / "cache")
    assert CacheFile(tmp_path / "cache", "me", 1000).load(NOW) is None
    assert caplog.messages == [
        f"the cache {tmp_path / 'cache'} is not used: $: expected JSON, found an empty body"
    ]


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links")
def test_links_in_a_circle_are_reported_and_harm_nothing(tmp_path, caplog):
    (tmp_path / "cache").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "cache")
    assert saved(tmp_path / "cache", 1).load(NOW) is None
    assert [" ".join(message.split()[3:6]) for message in caplog.messages] == [
        "cannot be written:",
        "cannot be read:",
    ]
