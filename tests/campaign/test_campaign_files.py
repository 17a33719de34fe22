"""The files that a campaign writes."""

from __future__ import annotations

import json
import stat
import sys
from datetime import date

import pyarrow.parquet as pq
import pytest
from panel_kit import all_of, campaign_of, planned_campaign, sql

from sampling_async import InvalidRequestError
from sampling_async.campaign import Campaign, Limits

# --- The plan


async def test_no_file_is_written_where_jinja2_is_missing(sim, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for module in ("_report", "_pages"):
        monkeypatch.delitem(sys.modules, f"sampling_async.campaign.{module}")
    async with planned_campaign(sim, tmp_path) as campaign:
        with pytest.raises(ImportError, match=r'needs jinja2: python -m pip install "sampling-async\[panel\]"'):
            await campaign.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- Files


async def test_files_say_what_became_of_everybody(sim, tmp_path):
    out = tmp_path / "out"
    async with planned_campaign(sim, tmp_path) as campaign:
        await all_of(campaign.run())
        summary = await campaign.write(out)
    assert sorted(path.name for path in out.iterdir()) == [
        "invites.parquet",
        "pairs.parquet",
        "report.html",
        "summary.json",
    ]
    invites = pq.read_table(out / "invites.parquet").to_pylist()
    by_pair = {(each.member_code, each.quota_id): each.url for each in sim.ledger.invites}
    assert {(row["member_code"], row["quota_id"]): row["url"] for row in invites} == by_pair
    pairs = pq.read_table(out / "pairs.parquet")
    assert len(pairs) == summary.pairs.planned
    told = json.loads((out / "summary.json").read_text())
    assert told["pairs"]["invited"] == summary.pairs.invited == len(invites)
    page = (out / "report.html").read_text()
    assert f"{summary.pairs.invited:,}" in page
    assert not any(row["member_code"] in page or row["url"] in page for row in invites)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
async def test_invites_can_be_divided_into_folders(sim, tmp_path, kind):
    out = tmp_path / "out"
    async with planned_campaign(sim, tmp_path) as campaign:
        await all_of(campaign.run())
        await campaign.write(out, partitions=("day", "survey_id"), kind=kind)
        summary = await campaign.write(out, partitions=("day", "survey_id"), kind=kind)
    files = sorted((out / "invites").rglob(f"*.{kind}"))
    assert all(path.parent.name.startswith("survey_id=") for path in files)
    days = {path.parent.parent.name for path in files}
    assert all(date.fromisoformat(day.removeprefix("day=")) for day in days)
    if kind == "jsonl":
        found = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    else:
        found = [row for path in files for row in pq.ParquetFile(path).read().to_pylist()]
    assert len(found) == summary.pairs.invited == len({row["url"] for row in found})
    assert "survey_id" not in found[0]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


async def test_invites_of_another_format_are_replaced_too(sim, tmp_path):
    folder, form = tmp_path / "out", []
    async with planned_campaign(sim, tmp_path, limits=Limits(max_invites=5)) as campaign:
        await all_of(campaign.run())
        for options in ({}, {"partitions": ["survey_id"]}, {"kind": "jsonl"}, {}):
            await campaign.write(folder, **options)
            form.append([path.name for path in folder.glob("invites*")])
        assert form == [["invites.parquet"], ["invites"], ["invites.jsonl"], ["invites.parquet"]]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


async def test_a_folder_with_files_of_somebody_else_is_refused_and_left_alone(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, ledger=tmp_path / "a.ledger")
        await campaign.plan()
        for name in ("invites", "invites.jsonl", "pairs.parquet", "report.html", "summary.json"):
            (tmp_path / name).mkdir()
            there = tmp_path / name / name
            if name == "invites":
                there.mkdir()
                (there / "precious.txt").write_text("precious")
            else:
                there.write_text("[]")
            with pytest.raises(
                InvalidRequestError, match=f"holds {name}, which is not of a campaign; name another"
            ):
                await campaign.write(tmp_path / name)
            assert [path.name for path in (tmp_path / name).iterdir()] == [name]
        await campaign.write(tmp_path / "ours")
        await campaign.write(tmp_path / "ours", kind="jsonl")
        other = campaign_of(sim, client, tmp_path, ledger=tmp_path / "b.ledger")
        await other.plan()
        with pytest.raises(InvalidRequestError, match=r"which is of the campaign of a\.ledger; name another"):
            await other.write(tmp_path / "ours")


async def test_a_disk_that_takes_no_more_is_no_fault_of_an_argument(sim, tmp_path):
    resource = pytest.importorskip("resource")
    out = tmp_path / "out"
    async with planned_campaign(sim, tmp_path) as campaign:
        await all_of(campaign.run())
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
        try:
            with pytest.raises(OSError, match="too large") as caught:
                await campaign.write(out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not isinstance(caught.value, InvalidRequestError)
        assert list(out.iterdir()) == []
        await campaign.write(out)


async def test_wrong_partitions_are_refused_before_anything_is_read(sim, tmp_path):
    async with sim.client() as client:
        campaign = Campaign(client, ledger=tmp_path / "none")
        with pytest.raises(InvalidRequestError, match="divided by survey_id, wave_id, quota_id, day"):
            await campaign.write(tmp_path / "out", partitions=("country",))
        with pytest.raises(InvalidRequestError, match="parquet, jsonl or csv"):
            await campaign.write(tmp_path / "out", kind="xlsx")


async def test_a_run_that_was_killed_was_active_until_its_last_sign(sim, tmp_path):
    """Its moments are ten seconds apart, and there are none while the service is away."""
    now = 1_000_000.0
    async with planned_campaign(sim, tmp_path, wall_clock=lambda: now) as campaign:
        run = campaign.run()
        async with run:
            await anext(run)
            now += 24.0
            await run.poll_limits()
        sql(tmp_path / "run.ledger", "UPDATE runs SET ended = NULL")
        assert (await campaign.summary()).active_seconds == 24.0
        now += 1000.0
        async with campaign.run():
            now += 2.0
        assert (await campaign.summary()).active_seconds == 26.0
