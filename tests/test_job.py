"""Jobs of a bulk: what they show, and the failures that all their IDs share."""

from __future__ import annotations

from sampling_async._bulk.job import Job, interrupted
from sampling_async._protocol.chunk import Chunk


def test_a_job_shows_its_state_and_no_member_code():
    job = Job(Chunk("m-secret", (1, 2)), None)
    assert repr(job) == "<Job of 2 quota IDs: not sent>"
    job.begin(job.chunk)
    assert repr(job) == "<Job of 2 quota IDs: in flight>"


def test_the_ids_of_an_interrupted_chunk_share_a_failure():
    reply = interrupted(Chunk("m", (1, 2)), "unknown").answer
    assert reply.quota_ids == (1, 2)
    first, second = reply.outcomes()
    assert first.error is second.error
    assert first.error is not None
