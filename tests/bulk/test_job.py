"""Jobs of a bulk: what they show, and the failures that all their IDs share."""

from __future__ import annotations

import doubles
import pytest
from bulk_kit import DIRECT

from sampling_async import (
    BadRequestError,
    ClientClosedError,
    InviteOutcome,
    RetryPolicy,
    SamplingError,
    ServerError,
)
from sampling_async._bulk.invites import Inviter
from sampling_async._bulk.job import Answered, Job, failed, interrupted
from sampling_async._contract.errors import delivered
from sampling_async._pacing.timeline import BusyIntervals, Timeline
from sampling_async._protocol.requests import Chunk
from sampling_async._wire.session import Track


def begun(job: Job, part: Chunk | None = None, *, is_explained: bool = False, fan_out: object = None):
    job.timeline = Timeline(lambda: 0.0, BusyIntervals())
    return job.begin(part or job.chunk, is_explained=is_explained, fan_out=fan_out)


def test_a_job_shows_its_state_and_no_member_code():
    job = Job(Chunk("m-secret", (1, 2)), None)
    assert repr(job) == "<Job of 2 quota IDs: not sent>"
    begun(job)
    assert repr(job) == "<Job of 2 quota IDs: in flight>"
    assert repr(Job(job.chunk, interrupted(job.chunk, "unknown"))) == "<Job of 2 quota IDs: answered>"


def test_the_ids_of_an_interrupted_chunk_share_a_failure():
    reply = interrupted(Chunk("m", (1, 2)), "unknown").answer
    assert reply.quota_ids == (1, 2)
    first, second = reply.outcomes()
    assert first.error is second.error
    assert first.error is not None
    assert str(first.error) == "bulk_invite: interrupted: the fan-out ended before the response came"
    assert {outcome.member_code for outcome in (first, second)} == {"m"}
    (unsent,) = interrupted(Chunk("m", (1,)), "not_sent").answer.outcomes()
    assert str(unsent.error) == "bulk_invite: interrupted: the fan-out ended before this was sent"


@pytest.mark.parametrize("delivery", ["not_sent", "answered", "unknown"])
def test_a_failure_says_nothing_about_an_earlier_request(delivery):
    error = SamplingError("refused", delivery=delivery)
    (outcome,) = failed(Chunk("m", (1,), asked_before=True), error).outcomes()
    assert (outcome.status, outcome.error.delivery) == ("unknown", "unknown")
    assert (outcome.error is error) == (delivery == "unknown")
    (outcome,) = failed(Chunk("m", (1,)), error).outcomes()
    assert outcome.error is error


def test_nothing_is_sent_for_a_job_whose_outcomes_were_given():
    job = Job(Chunk("m", (1, 2)))
    before = begun(job)
    assert [outcome.status for outcome in job.left()] == ["not_sent", "not_sent"]
    for track in (before, begun(job)):
        with pytest.raises(ClientClosedError):
            track.may_send(True)


def test_outcomes_that_the_user_has_are_not_left():
    job = Job(Chunk("m", (1, 2, 3)))
    job.taken = 2
    assert [outcome.quota_id for outcome in job.left()] == [3]


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("is_explained", [False, True])
def test_the_track_of_a_part_knows_whether_an_earlier_run_asked_and_whether_reports_are_wanted(
    asked_before, is_explained
):
    chunk = Chunk("m", (1,), asked_before=asked_before)
    track = begun(Job(chunk), is_explained=is_explained, fan_out="span")
    assert (track.ambiguous, track.is_explained, track.fan_out) == (asked_before, is_explained, "span")


def test_what_came_unrequested_in_the_response_to_a_part_is_kept():
    job, part, other = (
        Job(Chunk("m", (1, 2))),
        Chunk("m", (1,)),
        InviteOutcome("m", 99, "rejected", None, 9, "X"),
    )
    begun(job, part)
    job.note(Answered.of(part, failed(part, SamplingError("no")).answer.answers, (other,)))
    assert job.account().answer.unrequested == (other,)


def test_ids_of_no_part_are_not_sent():
    job, part = Job(Chunk("m", (1, 2))), Chunk("m", (1,))
    begun(job, part)
    job.note(failed(part, SamplingError("no", delivery="unknown")))
    sent, rest = job.account().outcomes()
    assert (sent.status, rest.status, rest.error.delivery) == ("unknown", "not_sent", "not_sent")


# --- What is known about a call


@pytest.mark.parametrize(
    ("track", "delivery"),
    [
        (Track(), "not_sent"),
        (Track(sent=True), "unknown"),
        (Track(ambiguous=True), "unknown"),
        (Track(sent=True, ambiguous=True), "unknown"),
    ],
)
def test_a_call_may_have_had_its_effect_if_any_attempt_was_sent(track, delivery):
    assert track.delivery == delivery


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("ambiguous", [True, False])
def test_nothing_is_sent_for_a_call_whose_outcomes_are_known(is_told, ambiguous):
    track = Track(outcomes_delivered=is_told, ambiguous=ambiguous)
    track.may_send(False)  # to say that nothing left is always allowed
    assert track.sent is False
    if not is_told:
        track.may_send(True)
        assert (track.sent, track.delivery) == (True, "unknown")
        return
    with pytest.raises(ClientClosedError) as caught:
        track.may_send(True)
    assert caught.value.args == ("the `async with` block of the fan-out has ended",)
    assert caught.value.delivery == track.delivery == ("unknown" if ambiguous else "not_sent")
    assert track.sent is False


def test_an_error_with_another_delivery_is_a_copy():
    error = BadRequestError("no", status=400, result="X", endpoint="bulk_invite")
    error.__cause__ = ValueError("cause")
    other = delivered(error, "unknown")
    assert (error.delivery, other.delivery) == ("answered", "unknown")
    assert type(other) is BadRequestError
    assert str(other) == "bulk_invite: no"
    assert vars(other) == vars(error) | {"delivery": "unknown"}
    other.status = 500
    assert error.status == 400


def inviter(client) -> Inviter:
    return Inviter(client._caller, doubles.PANEL)


@pytest.mark.parametrize(
    ("attempts", "others_answered", "may"),
    [(1, True, False), (2, True, True), (3, True, True), (2, False, False)],
)
async def test_a_503_is_about_one_id_if_it_lasted_and_others_were_answered_meanwhile(
    attempts, others_answered, may
):
    async with doubles.client(doubles.Service([]), retry=RetryPolicy(unprocessed=DIRECT)) as client:
        error = ServerError("away", status=503, delivery="answered")
        error.attempts = attempts
        chunk = Chunk("m", (1, 2))
        assert inviter(client)._may_be_about_one_id(chunk, error, others_answered=others_answered) is may


@pytest.mark.parametrize(("retry_after", "stops"), [(None, False), (60.0, False), (60.1, True)])
async def test_a_retry_after_of_more_than_a_minute_stops_the_fan_out(retry_after, stops):
    async with doubles.client(doubles.Service([])) as client:
        asking, error = inviter(client), ServerError("away", status=503, delivery="answered")
        error.retry_after = retry_after
        asking._stop(error)
        assert asking.needs_permit(Job(Chunk("m", (1,)))) is not stops


async def test_a_journal_is_closed_once_by_the_fan_out_that_opened_it():
    class Kept:
        closed = 0

        async def open(self) -> None:
            pass

        async def close(self) -> None:
            self.closed += 1

    async with doubles.client(doubles.Service([])) as client:
        journal = Kept()
        asking = Inviter(client._caller, doubles.PANEL, journal)
        await asking.end(lambda: None)
        assert journal.closed == 0
        await asking.begin()
        for _ in range(2):
            await asking.end(lambda: None)
        assert journal.closed == 1
        await inviter(client).end(lambda: None)  # without a journal
