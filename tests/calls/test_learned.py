"""What attempts teach: limits, paces, the outage and durations are told, each with what it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import doubles
import pytest

from sampling_async import ServerError, ServiceError, Timeouts, TransportError
from sampling_async._calls.attempt import Feedback
from sampling_async._contract.exchange import OK, Reply
from sampling_async._protocol import requests

SETTINGS = requests.get_settings(doubles.PANEL)
QUOTAS = requests.get_quotas(doubles.PANEL, include_routables=True)
BULK = requests.bulk_invite(doubles.PANEL, "m", (1, 2, 3))
BEGAN, NOW = 100.0, 102.0


class Told:
    """Stands for a part of the client, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.told.append((name, *given, *named.values()))


class Parts:
    """A client's parts around `Feedback`."""

    def __init__(self, timeouts: Timeouts | None = None, remaining: float = 60.0) -> None:
        self.gate, self.outage, self.pace, self.limit = Told(), Told(), Told(), Told()
        self.gate.callers = SimpleNamespace(at=lambda now: 1.5 if now == NOW else None)  # type: ignore[attr-defined]
        self.took: list[tuple[float, float]] = []
        self.rests: list[tuple[float, float]] = []
        self.cut_off: list[float] = []
        kind = SimpleNamespace(pace=self.pace, adaptive=self.limit, held={1, 2, 3, 4})
        kind.took = lambda seconds, callers: self.took.append((seconds, callers))
        kind.rest = lambda seconds, now: self.rests.append((seconds, now))
        kind.was_cut_off = lambda seconds, now: self.cut_off.append(seconds) or len(self.cut_off) > 1
        self.permit: Any = SimpleNamespace(kind=kind, generation=7, among=5, remaining=remaining)
        self.permit.is_waited_for = True
        self.learned = Feedback(self.gate, self.outage)  # type: ignore[arg-type]
        self.read_limit = (timeouts or Timeouts()).read_limit

    def learn(self, call: Any, answer: Any) -> None:
        self.learned.attempt_ended(call, self.permit, answer, BEGAN, NOW, read_limit=self.read_limit)

    @property
    def told(self) -> dict[str, list[tuple[Any, ...]]]:
        parts = {"gate": self.gate, "outage": self.outage, "pace": self.pace, "limit": self.limit}
        return {name: part.told for name, part in parts.items() if part.told}


def failed(status: int, retry_after: float | None = None) -> ServiceError:
    error = (ServerError if status >= 500 else ServiceError)("it failed", status=status, delivery="answered")
    error.retry_after = retry_after
    return error


def test_an_answer_is_reported_to_outage_pace_and_limit():
    parts = Parts()
    parts.learn(SETTINGS, Reply(OK))
    assert parts.told.keys() == {"outage", "pace", "limit"}
    assert parts.outage.told == [("answered", NOW)]
    assert [told[:2] for told in parts.pace.told] == [("answered", NOW)]
    assert parts.limit.told == [("answered", 7, 4)]
    assert parts.took == [(NOW - BEGAN, 1.5)]
    assert parts.rests == [(NOW - BEGAN, NOW)]


def test_a_page_is_reported_to_the_outage_and_is_no_answer():
    parts = Parts()
    parts.learn(QUOTAS, Reply(OK, b"<p>"))
    # No wait was asked for, and the rate is not the reason.
    cause = "a page came in place of the service's JSON"
    assert parts.told == {"outage": [("failed", cause, BEGAN, 0.0, False)], "pace": [("answered", NOW)]}
    assert not parts.learned.latency


def test_a_page_for_get_settings_begins_no_outage():
    parts = Parts()
    parts.learn(SETTINGS, Reply(OK, b"<p>"))
    assert parts.told == {"pace": [("answered", NOW)]}


def test_an_answer_to_a_bulk_is_reported_with_its_time_and_the_patience_for_its_ids():
    parts = Parts(Timeouts(bulk_base=10.0, bulk_per_id=0.5))
    parts.learn(BULK, Reply(OK))
    assert parts.limit.told == [("answered_in", 2.0, 3, 11.5, 1.5, 7, 4, 5)]


def test_durations_are_kept_by_endpoint_with_the_moment_of_their_end():
    parts = Parts()
    for call in (SETTINGS, QUOTAS):
        parts.learn(call, Reply(OK))
    kept = parts.learned.latency
    assert set(kept) == {"get_settings", "get_quotas"}
    kept["get_settings"] = sketch = Told()  # type: ignore[assignment]
    parts.learn(SETTINGS, Reply(OK))
    assert sketch.told == [("add", 2.0, NOW)]


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_for_load_is_reported_to_the_gate(status):
    parts = Parts()
    parts.learn(BULK, failed(status))
    assert parts.gate.told == [("refused", parts.permit)]
    assert parts.pace.told == []


@pytest.mark.parametrize("error", [failed(502), failed(504), TransportError("cut", delivery="unknown")])
def test_an_overload_is_reported_to_the_gate(error):
    parts = Parts()
    parts.learn(BULK, error)
    assert parts.gate.told == [("overloaded", parts.permit)]


def test_a_failure_of_the_service_itself_is_an_answer_for_pace_and_outage():
    parts = Parts()
    parts.learn(BULK, failed(400))
    assert parts.told == {"pace": [("answered", NOW)], "outage": [("answered", NOW)]}
    assert parts.learned.latency == {}


@pytest.mark.parametrize(("retry_after", "told"), [(None, 0.0), (0.5, 0.5)])
def test_a_failure_as_in_an_outage_is_reported_with_its_reason_beginning_and_retry_after(retry_after, told):
    parts = Parts()
    parts.learn(BULK, failed(503, retry_after))
    assert parts.outage.told == [("failed", "it failed", BEGAN, told, True)]


def test_what_may_be_an_outage_or_not_is_not_reported_to_it_and_failures_of_get_settings_neither():
    for call, error in ((BULK, failed(429)), (SETTINGS, failed(503))):
        parts = Parts()
        parts.learn(call, error)
        assert parts.outage.told == []


@pytest.mark.parametrize(("remaining", "counts"), [(0.002, True), (0.0005, False), (-1.0, False)])
def test_a_failure_at_the_deadline_says_nothing_about_the_service(remaining, counts):
    parts = Parts(remaining=remaining)
    parts.learn(BULK, failed(502))
    assert bool(parts.told) is counts


def test_deadlines_that_pass_in_a_row_show_overload():
    parts = Parts(remaining=-1.0)
    parts.learn(SETTINGS, failed(502))
    assert parts.told == {}
    parts.learn(SETTINGS, failed(502))
    assert parts.told == {"gate": [("overloaded", parts.permit, True)]}
    assert parts.cut_off == [NOW - BEGAN] * 2
    assert parts.rests == [(NOW - BEGAN, NOW)] * 2
