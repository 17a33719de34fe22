"""Jobs of a bulk: what they show, and the failures that all their IDs share."""

from __future__ import annotations

import pytest

from sampling_async import ClientClosedError, SamplingError
from sampling_async._bulk.job import Job, failed, interrupted
from sampling_async._protocol.chunk import Chunk


def test_a_job_shows_its_state_and_no_member_code():
    job = Job(Chunk("m-secret", (1, 2)), None)
    assert repr(job) == "<Job of 2 quota IDs: not sent>"
    job.begin(job.chunk)
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
    before = job.begin(job.chunk)
    assert [outcome.status for outcome in job.left()] == ["not_sent", "not_sent"]
    for track in (before, job.begin(job.chunk)):
        with pytest.raises(ClientClosedError):
            track.may_send(True)


def test_outcomes_that_the_user_has_are_not_left():
    job = Job(Chunk("m", (1, 2, 3)))
    job.taken = 2
    assert [outcome.quota_id for outcome in job.left()] == [3]
