"""Retry decisions, backoff, limits: numbers in, decision out."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import (
    BadRequestError,
    ClientClosedError,
    DecodeError,
    InvalidRequestError,
    RetryPolicy,
    ServerError,
    Timeouts,
    TransportError,
    TransportTimeoutError,
    UnexpectedStatusError,
)
from sampling_async._calls.retry import RetryBudget, shows_outage, shows_overload
from sampling_async._pacing.patience import doubled
from sampling_async.notifications import HandlerPolicy

READS = ["get_quotas", "get_settings", "recontact_members"]
ALL = [*READS, "generate_invite", "bulk_invite"]

REFUSED = TransportError("refused")
CUT = TransportError("cut", delivery="unknown")
LATE = TransportTimeoutError("late", delivery="unknown")
GARBLED = DecodeError("$", "garbled")
CERTIFICATE = TransportError("certificate", permanent=True)


def status(
    code: int,
    result_code: int | None = None,
    retry_after: float | None = None,
    delivery: str | None = None,
    body: str = "",
):
    delivery = delivery or ("answered" if 400 <= code < 500 else "unknown")
    error_class = ServerError if code >= 500 else BadRequestError if code == 400 else UnexpectedStatusError
    error = error_class("x", status=code, result_code=result_code, delivery=delivery, body_excerpt=body)
    error.retry_after = retry_after
    return error


def allowed(error, *earlier, **policy) -> set[str]:
    return {name for name in ALL if RetryPolicy(**policy).allows(name, [*earlier, error])}


@pytest.mark.parametrize(
    "error", [REFUSED, *map(status, (408, 425, 429)), status(503, 14, delivery="answered")]
)
def test_unprocessed_requests_are_repeated_for_all_endpoints(error):
    assert allowed(error) == set(ALL)
    assert allowed(error, retry_ambiguous_reads=False) == set(ALL)


@pytest.mark.parametrize("error", [CUT, LATE, GARBLED, *map(status, (500, 502, 503, 504)), status(400, 36)])
def test_possibly_processed_requests_are_repeated_for_reads_only(error):
    assert allowed(error) == {*READS, "generate_invite"}
    assert allowed(error, retry_ambiguous_reads=False) == set(READS)
    assert allowed(error, retry_ambiguous=True) == set(ALL)


@pytest.mark.parametrize(
    "error",
    [
        *map(status, (302, 400, 403, 404, 405, 409, 410, 413, 414, 415, 501, 505)),
        CERTIFICATE,
        ClientClosedError(),
    ],
)
def test_permanent_failures_are_not_repeated(error):
    assert allowed(error, retry_ambiguous=True) == set()


def test_statuses_that_prove_non_processing_can_be_chosen():
    assert "bulk_invite" not in allowed(status(503))
    assert "bulk_invite" in allowed(status(503, delivery="answered"), unprocessed={429, 503})
    assert "bulk_invite" not in allowed(status(429, delivery="unknown"))  # something followed it
    assert "bulk_invite" not in allowed(status(408), unprocessed={429, 503})
    assert RetryPolicy(unprocessed=[429]).unprocessed == frozenset({429})


@pytest.mark.parametrize("unprocessed", [{"503"}, {200}, {399}, {600}, {True}, {503.0}])
def test_invalid_statuses_are_refused(unprocessed):
    with pytest.raises(InvalidRequestError, match="unprocessed must hold HTTP statuses from 400 to 599"):
        RetryPolicy(unprocessed=unprocessed)


@pytest.mark.parametrize(("unprocessed", "kind"), [(503, "int"), (None, "NoneType")])
def test_what_is_no_set_of_statuses_is_refused_with_its_type(unprocessed, kind):
    with pytest.raises(InvalidRequestError, match=f"unprocessed must be a set of HTTP statuses, not {kind}$"):
        RetryPolicy(unprocessed=unprocessed)


def test_all_statuses_of_failures_may_prove_non_processing():
    assert RetryPolicy(unprocessed=[400, 599]).unprocessed == {400, 599}


def test_statuses_are_shown_in_order_whatever_they_are():
    with pytest.raises(InvalidRequestError, match=r"^RetryPolicy\.unprocessed must .* not \[429, 503, 'x'\]"):
        RetryPolicy(unprocessed={"x", 503, 429})


@pytest.mark.parametrize(
    ("error", "shows"),
    [
        (CUT, True),
        (status(502), True),
        (status(503), True),
        (status(504), True),
        (status(429), True),
        (status(500), False),
        (CERTIFICATE, False),
        (GARBLED, False),
    ],
)
def test_failures_that_show_overload(error, shows):
    assert shows_overload(error) is shows


@pytest.mark.parametrize(
    ("error", "shows"),
    [
        (CUT, True),
        (REFUSED, True),
        (status(503), True),
        (status(429), None),  # an outage of a proxy's backend may be told so
        (status(500), False),
        (status(302), True),
        (status(404, body="default backend - 404"), True),
        (status(404, body="<h1>404</h1>"), True),
        (status(404), False),
        (status(404, body=' {"Message":"No HTTP resource was found"}'), False),
        (status(404, 2), False),
        (status(400, 2), False),
        (status(401), False),
        (CERTIFICATE, None),
        (GARBLED, None),
    ],
)
def test_failures_that_show_an_outage_or_that_there_is_none(error, shows):
    assert shows_outage(error) is shows


def test_the_number_of_attempts_is_limited():
    assert allowed(REFUSED, REFUSED) == set(ALL)
    assert allowed(REFUSED, REFUSED, REFUSED) == set()
    assert allowed(REFUSED, max_attempts=1) == set()


def test_a_read_is_repeated_once_after_an_unreadable_response():
    assert allowed(GARBLED, GARBLED) == set()
    assert allowed(GARBLED, CUT) == {*READS, "generate_invite"}


def test_a_bulk_invite_that_may_have_worked_is_sent_again_once():
    assert "bulk_invite" in allowed(CUT, status(429), retry_ambiguous=True)
    assert "bulk_invite" not in allowed(CUT, CUT, retry_ambiguous=True)


def test_a_wait_of_more_than_a_minute_is_left_to_the_caller():
    assert allowed(status(429, retry_after=60.0)) == set(ALL)
    assert allowed(status(429, retry_after=60.1)) == set()


def test_backoff_doubles_up_to_the_cap():
    policy = RetryPolicy()
    waits = [policy.backoff([CUT] * n, lambda: 1.0) for n in range(1, 9)]
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0]
    assert policy.backoff([CUT], lambda: 0.0) == 0.0


@pytest.mark.parametrize("code", [429, 503])
def test_backoff_is_longer_when_throttled(code):
    assert RetryPolicy().backoff([status(code)], lambda: 1.0) == 1.0


@pytest.mark.parametrize(("told", "wait"), [(1.0, 1.1), (5.0, 5.5), (10.0, 11.0), (60.0, 61.0)])
def test_a_random_part_after_retry_after_spreads_those_who_were_refused_together(told, wait):
    assert RetryPolicy(throttled_base=0.5).backoff([status(503, retry_after=told)], lambda: 1.0) == wait


@given(st.floats(0, 60), st.integers(1, 5), st.floats(0, 1))
def test_no_retry_is_earlier_than_retry_after(told, attempt, drawn):
    wait = RetryPolicy().backoff([status(503, retry_after=told)] * attempt, lambda: drawn)
    assert told <= wait <= max(told, 20.0) + min(1.0, 0.1 * told)


def test_the_budget_is_spent_by_retries_and_refilled_by_successes():
    budget = RetryBudget(RetryPolicy(budget=2, deposit=0.5))
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.deposit()
    assert not budget.spend()
    budget.deposit()
    assert budget.spend()
    for _ in range(10):
        budget.deposit()
    assert budget.tokens == 2


@pytest.mark.parametrize(
    ("endpoint", "ids", "read"),
    [
        ("get_settings", 0, 15),
        ("generate_invite", 1, 20),
        ("get_quotas", 0, 30),
        ("recontact_members", 0, 60),
        ("bulk_invite", 1, 15.5),
        ("bulk_invite", 100, 65),
    ],
)
def test_each_endpoint_has_its_own_timeouts(endpoint, ids, read):
    assert Timeouts().read_limit(endpoint, ids) == read
    assert Timeouts().wall_limit(endpoint, ids) == read + 15


def test_given_timeouts_apply_to_every_endpoint():
    assert Timeouts(read=2).read_limit("bulk_invite", 100) == 2
    assert Timeouts(read=2).wall_limit("get_quotas") == 17
    assert Timeouts(wall=3).wall_limit("bulk_invite", 100) == 3
    assert Timeouts(wall=3).read_limit("get_quotas") == 30
    assert (Timeouts().read_limit("bulk_invite"), Timeouts().wall_limit("bulk_invite")) == (15, 30)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Timeouts(connect=0), "Timeouts.connect"),
        (lambda: Timeouts(read=-1), "Timeouts.read"),
        (lambda: Timeouts(wall=float("nan")), "Timeouts.wall"),
        (lambda: Timeouts(bulk_per_id=-0.1), "Timeouts.bulk_per_id"),
        (lambda: RetryPolicy(max_attempts=0), "RetryPolicy.max_attempts"),
        (lambda: RetryPolicy(base=-1), "RetryPolicy.base"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(make, named):
    with pytest.raises(InvalidRequestError, match=named):
        make()


MANY = 10**6


def test_a_wait_doubles_up_to_its_longest():
    assert [doubled(0.25, times, 20.0) for times in range(9)] == [0.25, 0.5, 1, 2, 4, 8, 16, 20, 20]


@pytest.mark.parametrize(
    ("first", "longest", "wait"), [(0.0, 20.0, 0.0), (0.25, 20.0, 20.0), (1e308, 5.0, 5.0), (1e308, inf, inf)]
)
def test_any_number_of_doublings_has_an_end(first, longest, wait):
    assert doubled(first, MANY, longest) == wait


@pytest.mark.parametrize("failures", [1_024, 1_025, 1_100, 100_000])
def test_a_call_that_failed_often_waits_for_the_longest_backoff(failures):
    assert RetryPolicy().backoff([TransportError()] * failures, lambda: 1.0) == 20.0
    assert RetryPolicy(cap=inf).backoff([TransportError()] * failures, lambda: 0.5) < inf


def test_a_handler_that_failed_often_waits_for_its_longest_wait():
    assert HandlerPolicy(longest_wait=60.0).wait(MANY, 1.0) == 60.0
