"""Parts of commands alone: how input is cut into requests, and what progress and summary say."""

from __future__ import annotations

import io
import json
import os

import anyio
import pytest

from sampling_async import InvalidRequestError, InviteOutcome, InviteRequest, Progress, SamplingError
from sampling_async._cli import _rendering, _sources
from sampling_async._cli._tally import Tally


def written(requests) -> str:
    return "".join(json.dumps({"MemberCode": code, "QuotaIDs": list(ids)}) + "\n" for code, ids in requests)


# --- Quota IDs


def test_ids_split_between_blocks_are_joined():
    class Drip(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, 3))

    async def read():
        source = _sources.Items(lambda: Drip(b"1234567, 89\n10 1100042"), _sources.QuotaIDs("ids", "m"))
        return [each async for each in source]

    assert anyio.run(read) == [1234567, 89, 10, 1100042]


@pytest.mark.parametrize("separator", list(" \t\n\r\v\f,"))
def test_no_id_is_cut_in_two_whatever_divides_the_words(separator):
    """A cut ID would ask for two quotas that nobody has named."""
    asked = list(range(1_100_000, 1_100_040))
    text = separator.join(map(str, asked)).encode()
    for size in (20, 24, 31, 64):
        parser = _sources.QuotaIDs("ids", "m")
        found = [each for at in range(0, len(text), size) for each in parser.feed(text[at : at + size])]
        assert [*found, *parser.end()] == asked


def test_endless_text_is_not_kept_in_memory():
    async def read():
        source = _sources.Items(lambda: io.BytesIO(b"7" * 1_000_000), _sources.QuotaIDs("ids", "m"))
        return [each async for each in source]

    with pytest.raises(InvalidRequestError):
        anyio.run(read)


# --- Lines of requests


def test_the_quota_ids_of_a_file_are_counted_first(tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text(written([("m1", range(1, 301)), ("m2", [5])]) + "\n" + written([("m1", [5, 6])]).strip())
    assert _sources.number_of_ids(file) == 303
    file.write_text("no request")
    assert _sources.number_of_ids(file) is None
    os.mkfifo(tmp_path / "pipe")
    assert _sources.number_of_ids(tmp_path / "pipe") is None


def test_input_in_the_encoding_of_powershell_is_reported():
    with pytest.raises(InvalidRequestError, match=r"line 1: not JSON.*UTF-16, as PowerShell writes it"):
        list(_sources.RequestLines("r").feed(written([("m", [1])]).encode("utf-16")))


@pytest.mark.parametrize("size", [1, 7, 65_536])
def test_lines_split_between_blocks_are_joined(size):
    requests = [(f"m{at}", range(1, at + 2)) for at in range(20)]
    text = b"\xef\xbb\xbf" + written(requests).replace("\n", "\r\n\n").encode().rstrip()

    class Drip(io.BytesIO):
        def read(self, most=-1):
            return super().read(min(most, size))

    async def read():
        return [each async for each in _sources.Items(lambda: Drip(text), _sources.RequestLines("x"))]

    assert anyio.run(read) == [InviteRequest(code, ids) for code, ids in requests]


def test_an_endless_line_is_not_kept_in_memory(monkeypatch):
    monkeypatch.setattr(_sources, "_LONGEST", 1000)
    parser = _sources.RequestLines("endless")
    with pytest.raises(InvalidRequestError, match="endless, line 2: a line of more than 1,000 bytes"):
        list(parser.feed(b"\n" + b"x" * 2000))


# --- Progress and summary


def test_the_progress_of_a_file_has_a_total_and_the_time_left():
    told = _rendering.with_total(Progress(50, 40, 0, None, None, 20.0), 140)
    assert _rendering.progress_text(told) == "40/140  20/s  0:00:05 left"
    assert _rendering.with_total(Progress(1, 1, 0, None, None, None), None).total is None
    assert _rendering.with_total(Progress(1, 1, 0, 7, 3.0, 2.0), 9).total == 7


def test_in_an_outage_the_progress_says_how_long_it_still_waits():
    told = Progress(50, 40, 0, 140, 5.0, 20.0, patience_left=90.0)
    assert _rendering.progress_text(told) == "40/140  the service is away; waiting up to 0:01:30 for it"


def test_the_rate_is_of_what_was_answered():
    tally = Tally(clock=iter([0.0, 2.0, 2.0]).__next__)
    lost = SamplingError("stopped", delivery="not_sent")
    for outcome in (
        InviteOutcome("m", 1, "rejected", None, 9),
        InviteOutcome("m", 2, "rejected", None, 9, replayed=True),
        *(InviteOutcome("m", number, "not_sent", error=lost) for number in range(3, 1000)),
        InviteOutcome("n", 2, "invited", None, 1),
    ):
        tally.add(outcome)
    assert tally.in_words().splitlines()[0] == "1,000 quota IDs in 2.0 s (1/s)"
