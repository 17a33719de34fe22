"""A watch with a cache: the last good inventory is there at the next start."""

from __future__ import annotations

import json
import stat
import threading
from datetime import UTC, datetime
from types import SimpleNamespace

import anyio
import pytest
from watch_kit import FakeService, HandClock, cache_at, ids_of, inventory, moment, one, settle, watch_of

from sampling_async import InvalidRequestError, ServerError
from sampling_async.simulator import Simulator

# --- The cache


async def filled(path, clock) -> None:
    service = FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock, cache=cache_at(path)) as watch:
        await watch.ready()
        service.inventory = inventory(1, 2)
        await watch.refresh()


async def test_the_last_good_inventory_is_there_at_the_next_start(tmp_path):
    path, clock = tmp_path / "cache", HandClock()
    await filled(path, clock)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    began = clock()
    await clock.advance(100)
    service = FakeService(inventory(2, 3))
    gate = service.hold()
    async with watch_of(service, clock, cache=cache_at(path)) as watch:
        await watch.ready()
        assert watch.status == "stale"
        assert (watch.age, watch.since) == (100, datetime.fromtimestamp(began, UTC))
        known = watch.quotas
        assert known.surveys[0] == one(1)
        gate.set()
        await clock.advance(1)
        assert watch.status == "ready"
        assert ids_of(watch.quotas) == [2, 3]


@pytest.mark.parametrize("damage", ["cut", "altered", "foreign", "other form", "empty", "page", "bytes"])
async def test_a_cache_that_cannot_be_used_is_ignored(damage, tmp_path, caplog):
    path, clock = tmp_path / "cache", HandClock()
    await filled(path, clock)
    body = path.read_bytes()
    head, _, rest = body.partition(b"\n")
    broken = {
        "cut": body[:-200],
        "altered": body.replace(b'"LOI":10', b'"LOI":11'),
        "foreign": body,
        "other form": json.dumps(json.loads(head) | {"form": "2"}).encode() + b"\n" + rest,
        "empty": b"",
        "page": b"<html>\n</html>\n",
        "bytes": b"\xff\xfe" + body,
    }
    path.write_bytes(broken[damage])
    service = FakeService(inventory(7))
    async with watch_of(service, clock, cache=cache_at(path, "you" if damage == "foreign" else "me")) as watch:
        await watch.ready()
        assert ids_of(watch.quotas) == [7]
    assert "is not used" in caplog.text


async def test_what_was_closed_since_the_cache_was_written_is_not_open(tmp_path, monkeypatch):
    """Whoever tells it need not wait until the cache is loaded."""
    path, clock = tmp_path / "cache", HandClock()
    cache_at(path).save(inventory(1, 2), clock())
    await clock.advance(100)
    cache, gate = cache_at(path), threading.Event()
    load = cache.load
    monkeypatch.setattr(cache, "load", lambda now: gate.wait(60) and load(now))
    service = FakeService(inventory(1, 2, 3, 4))
    service.error = ServerError("away", status=500)
    async with watch_of(service, clock, cache=cache) as watch:
        await settle()
        assert not watch.close_quota(1, at=moment(clock, -50))
        assert not watch.close_quota(2, at=moment(clock, -150))  # the cache knew of it
        assert not watch.close_survey(400)
        gate.set()
        await watch.ready()
        await settle()
        assert ids_of(watch.quotas) == [2]
        service.error = None
        await watch.refresh()  # and the poll knows of all that was told before it
        assert ids_of(watch.quotas) == [1, 2, 3, 4]


async def test_a_watch_goes_on_without_a_cache_that_cannot_be_read_or_written(tmp_path, caplog):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "cache"
    async with watch_of(FakeService(inventory(7)), HandClock(), cache=cache_at(path)) as watch:
        await watch.ready()
        assert ids_of(watch.quotas) == [7]
    assert [message.partition("cannot be ")[2].partition(":")[0] for message in caplog.messages] == [
        "read",
        "written",
    ]


async def test_without_a_thread_the_cache_is_not_written_and_the_watch_goes_on(tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    clock, service = HandClock(), FakeService(inventory(7))
    monkeypatch.setattr("sampling_async._watch.watch.start", refused)
    async with watch_of(service, clock, cache=cache_at(tmp_path / "cache")) as watch:
        await watch.refresh()
        assert watch.status == "ready"
    assert caplog.messages[-1] == "the inventory is not written to the cache: can't start new thread"


@pytest.mark.parametrize("path", [5, b"x", "", "a\0b"])
async def test_a_cache_is_given_by_its_path(path):
    async with Simulator(seed=1).client() as client:
        with pytest.raises(InvalidRequestError, match="cache must be a str or a path object"):
            client.watch_quotas(cache=path)


async def test_a_slow_disk_gets_some_of_the_inventories(tmp_path, monkeypatch):
    clock, service = HandClock(), FakeService(inventory(7))
    saved: list[list[int]] = []
    gate = anyio.Event()

    class Slow:
        over = gate

    monkeypatch.setattr(
        "sampling_async._watch.watch.start", lambda _, quotas, __: saved.append(ids_of(quotas)) or Slow
    )
    async with watch_of(service, clock, cache=cache_at(tmp_path / "cache")) as watch:
        await watch.refresh()
        service.inventory = inventory(8)
        await watch.refresh()
        assert saved == [[7]]
        gate.set()
        await watch.refresh()
        assert saved == [[7], [8]]


# --- With a client


async def test_a_cache_that_takes_for_ever_does_not_keep_its_watch_from_ending(tmp_path, monkeypatch):
    never = anyio.Event()
    monkeypatch.setattr("sampling_async._watch.watch.start", lambda *_: SimpleNamespace(over=never))
    monkeypatch.setattr("sampling_async._watch.watch._LAST_WRITE", 0.01)
    clock, service = HandClock(), FakeService(inventory(7))
    with anyio.fail_after(60):
        async with watch_of(service, clock, cache=cache_at(tmp_path / "cache")) as watch:
            await watch.refresh()
