"""Garbage collection is postponed while an inventory is read; the settings of the host do not change."""

from __future__ import annotations

import gc
import weakref

import pytest

from sampling_async._pacing import gc_pauses as _collector
from sampling_async._pacing.gc_pauses import _Collections


class FakeCollector:
    """A double of the functions of Python's `gc` module."""

    def __init__(self) -> None:
        self.due = True
        self.frozen = 0
        self.counted = 0
        self.looks = 0
        self.put_off = 0

    def get_count(self) -> tuple[int, int, int]:
        return (0, 0, 10 if self.due else 9)

    def get_threshold(self) -> tuple[int, int, int]:
        return (700, 10, 10)

    def get_freeze_count(self) -> int:
        self.counted += 1
        return self.frozen

    def get_stats(self) -> list[dict[str, int]]:
        return [{}, {}, {"collections": self.looks}]

    def freeze(self) -> None:
        self.put_off += 1

    def unfreeze(self) -> None:
        self.put_off += 1j


@pytest.fixture
def fake(monkeypatch) -> FakeCollector:
    fake = FakeCollector()
    monkeypatch.setattr(_collector, "gc", fake)
    monkeypatch.setattr(_collector, "_has_pauses", True)
    return fake


def test_a_due_collection_is_postponed(fake):
    _Collections().put_off()
    assert fake.put_off == 1 + 1j


def test_a_collection_that_is_not_due_is_left_alone(fake):
    fake.due = False
    _Collections().put_off()
    assert fake.put_off == 0


def test_frozen_objects_of_the_host_stay_frozen(fake):
    fake.frozen = 1
    _Collections().put_off()
    assert fake.put_off == 0


def test_nothing_is_postponed_if_the_collector_makes_no_pauses(fake, monkeypatch):
    monkeypatch.setattr(_collector, "_has_pauses", False)
    _Collections().put_off()
    assert fake.put_off == 0


def test_a_collection_is_postponed_a_limited_number_of_times(fake):
    collections = _Collections()
    for _ in range(3 * _collector._PUT_OFF_AT_MOST):
        collections.put_off()
    assert fake.put_off == _collector._PUT_OFF_AT_MOST * (1 + 1j)
    fake.looks += 1
    collections.put_off()
    assert fake.put_off == (_collector._PUT_OFF_AT_MOST + 1) * (1 + 1j)


class Node:
    pass


@pytest.fixture
def unfrozen():
    """Undo what the fixture of all modules freezes: of a host that has frozen objects, nothing is put off."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_garbage_is_collected_later_and_the_settings_are_unchanged(unfrozen):
    before = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    del node
    gc.freeze()
    gc.unfreeze()
    _collector.defer_full_gc()
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == before
    gc.collect()
    assert gone() is None


def test_frozen_objects_are_counted_once_for_each_collection(fake):
    """To count a million of them takes 20 ms."""
    fake.frozen = 1_000_000
    collections = _Collections()
    for _ in range(10):
        collections.put_off()
    assert (fake.counted, fake.put_off) == (1, 0)
    fake.frozen, fake.looks = 0, 1
    collections.put_off()
    assert (fake.counted, fake.put_off) == (2, 1 + 1j)


def test_after_each_full_collection_the_next_one_is_delayed_so_often_and_no_more(fake, monkeypatch):
    monkeypatch.setattr(_collector, "_PUT_OFF_AT_MOST", 3)
    collections = _Collections()
    for number in (1, 2):
        fake.looks, fake.put_off = number, 0
        for _ in range(5):
            collections.put_off()
        assert fake.put_off == 3 + 3j
