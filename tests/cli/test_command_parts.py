"""Parts of commands alone: how input is divided, progress and summary, figures of a campaign, certificates."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from cli_kit import commands
from rich.console import Console
from store_kit import SECRET, post

from sampling_async import InvalidRequestError, InviteOutcome, InviteRequest, Progress, SamplingError
from sampling_async._cli import _campaign_run, _campaign_view, _sources
from sampling_async._cli._bulk import progress_text
from sampling_async._cli._campaign import DEFAULTS, Settings
from sampling_async._cli._commands import EXAMPLES
from sampling_async._cli._tally import Tally
from sampling_async.campaign import Limits, Pairs
from sampling_async.notifications import Inbox
from sampling_async.simulator import Simulator


def written(requests) -> str:
    return "".join(json.dumps({"MemberCode": code, "QuotaIDs": list(ids)}) + "\n" for code, ids in requests)


# --- Quota IDs


def ids_of_member():
    return _sources.QuotaIDs("ids", "m")


def test_ids_are_sent_as_they_come_though_no_line_ends():
    parser = ids_of_member()
    assert [list(parser.feed(block)) for block in (b"1 2 3 ", b"4 5", b"6 ")] == [[1, 2, 3], [4], [56]]


@pytest.mark.parametrize("separator", list(" \t\n\r\v\f,"))
def test_no_id_is_cut_in_two_whatever_divides_the_words(separator):
    """A cut ID would ask for two quotas that nobody has named."""
    asked = list(range(1_100_000, 1_100_040))
    text = separator.join(map(str, asked)).encode()
    for size in (20, 24, 31, 64):
        parser = ids_of_member()
        found = [each for at in range(0, len(text), size) for each in parser.feed(text[at : at + size])]
        assert [*found, *parser.feed(b"")] == asked


def test_endless_text_is_not_kept_in_memory():
    async def read():
        source = _sources.Items(lambda: io.BytesIO(b"7" * 1_000_000), ids_of_member().feed)
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
        list(_sources.Lines("r", _sources.requests_in).feed(written([("m", [1])]).encode("utf-16")))


@pytest.mark.parametrize("size", [1, 7, 65_536])
def test_lines_split_between_blocks_are_joined(size):
    requests = [(f"m{at}", range(1, at + 2)) for at in range(20)]
    text = b"\xef\xbb\xbf" + written(requests).replace("\n", "\r\n\n").encode().rstrip()

    class Drip(io.BytesIO):
        def read(self, most=-1):
            return super().read(min(most, size))

    async def read():
        source = _sources.Items(lambda: Drip(text), _sources.Lines("x", _sources.requests_in).feed)
        return [each async for each in source]

    assert anyio.run(read) == [InviteRequest(code, ids) for code, ids in requests]


def test_an_endless_line_is_not_kept_in_memory(monkeypatch):
    monkeypatch.setattr(_sources, "_LONGEST", 1000)
    parser = _sources.Lines("endless", _sources.requests_in)
    with pytest.raises(InvalidRequestError, match="endless, line 2: a line of more than 1,000 bytes"):
        list(parser.feed(b"\n" + b"x" * 2000))


# --- Progress and summary


def test_the_progress_of_a_file_has_a_total_and_the_time_left():
    assert progress_text(Progress(50, 40, 0, None, None, 20.0), 140) == "40/140  20/s  0:00:05 left"
    assert progress_text(Progress(1, 1, 0, None, None, None), None) == "1"
    assert progress_text(Progress(1, 1, 0, 7, 3.0, 2.0), 7) == "1/7  2/s  0:00:03 left"


def test_in_an_outage_the_progress_says_how_long_it_still_waits():
    told = Progress(50, 40, 0, 140, 5.0, 20.0, patience_left=90.0)
    assert progress_text(told, 140) == "40/140  the service is away; waiting up to 0:01:30 for it"


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


# --- Campaigns


async def test_what_a_store_of_notifications_is_said_to_be_closed_counts_at_once(tmp_path):
    simulator = Simulator(seed=4, surveys=5, members=3)
    survey = simulator.inventory.surveys[0]
    other = simulator.inventory.surveys[1].quotas[0].quota_id
    # As `notifications serve` has it open in another process.
    async with Inbox(tmp_path / "store.db", secrets=SECRET) as inbox, simulator.client() as client:
        settings = Settings(watch=600.0, notifications=tmp_path / "store.db")
        async with _campaign_run.following(client, settings) as live:
            quota_id = survey.quotas[0].quota_id
            assert live.is_open(quota_id)
            told = {"SurveyID": survey.survey_id, "WaveId": survey.wave_id, "Status": "Closed"}
            reply = await post(inbox, "survey_closed", told)
            assert reply.status == 200
            with anyio.fail_after(10):
                while live.is_open(quota_id):  # noqa: ASYNC110  nobody tells
                    await anyio.sleep(0.01)
            assert live.is_open(other)


def test_a_ledger_that_another_program_made_has_the_defaults():
    assert Settings.from_json(None) == DEFAULTS
    kept = Settings(panel="p", column=["1=a"], bands=Path("/b")).over(DEFAULTS)
    assert Settings.from_json(kept.to_json()) == kept


def test_the_time_left_ends_at_the_cap(monkeypatch):
    now = 0.0
    monkeypatch.setattr(_campaign_view.time, "monotonic", lambda: now)
    run = SimpleNamespace(
        pairs=Pairs(planned=1000, pending=1000),
        limits=Limits(max_invites=100),
        waiting_for=None,
        reason="",
        requests=0,
        members=0,
        expected_value=0.0,
    )
    client = SimpleNamespace(snapshot=lambda: SimpleNamespace(limit=8))
    metrics = _campaign_view.RunMetrics(run, client)
    now, run.pairs = 2.0, Pairs(planned=1000, invited=19, unknown=1, rejected=20, pending=960)
    metrics.measure()
    assert metrics.seconds_left == 80 / (19 / 2)
    run.limits = Limits()
    metrics.measure()
    assert metrics.seconds_left == 960 / (40 / 2)
    run.limits = Limits(max_invites=20)
    metrics.measure()
    assert metrics.seconds_left == 0.0


def metrics_of(state="rate", seconds_left=3700.2):
    run = SimpleNamespace(
        reason="",
        pairs=Pairs(planned=10_000_000, invited=4_000_000, rejected=1_234_567, unknown=3, pending=4_765_430),
        members=2_000_000,
        requests=1_000_000,
        expected_value=123_456_789.0,
        worth="123,456,789.00 (currency 1)",
    )
    refusals = {(28, "QUOTA_FULL"): 500_000, (999, "A\x1bNAME" + "E" * 200): 3}
    return SimpleNamespace(
        run=run,
        state=state,
        invites_per_second=1234.5,
        requests_per_second=321.0,
        limit=64,
        currency_id=1,
        seconds_left=seconds_left,
        refusals=Counter(refusals | {(n, None): 1 for n in range(9)}),
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_the_display_wraps_nothing_and_has_at_most_five_codes(width):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(_campaign_view.figures_view(metrics_of()))
    shown = console.file.getvalue()
    assert len(shown.splitlines()) == 4 + 5
    assert all(len(line) <= width for line in shown.splitlines())
    assert "\x1b" not in shown
    if width >= 60:
        assert "5,234,570/10,000,000 pairs  52%" in shown
        assert "1:01:41 left" in shown
    waiting = _campaign_view.figures_json(metrics_of("paused", None))
    assert waiting["SecondsLeft"] is None
    assert waiting["Refusals"][0] == {"ResultCode": 28, "Result": "QUOTA_FULL", "Pairs": 500_000}


def test_only_commands_that_exist_have_examples():
    assert set(EXAMPLES) <= {name for name, _ in commands()}
