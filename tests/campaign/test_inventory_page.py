"""The picture of an inventory: what is in the page, with a panel and without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import evolve
from cli_kit import run, served_panel
from panel_kit import page_of

from sampling_async.simulator import generate_inventory

INVENTORY = generate_inventory(3, surveys=40)
SURVEYS = INVENTORY.surveys
QUOTAS = [quota for survey in SURVEYS for quota in survey.quotas]


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page.partition("</style>")[2]).split())


def test_each_survey_is_a_dot_that_names_it():
    page = page_of(SURVEYS)
    assert page.count("<circle") == len(SURVEYS)
    survey = SURVEYS[0]
    assert f"{survey.survey_name}: {survey.price.amount:,.2f}, {survey.loi} min, IR {survey.ir} %" in page
    assert "nobody fits" not in page


def test_the_bands_hold_each_survey_once():
    text = text_of(page_of(SURVEYS))
    table = text[text.index("Room and median price") : text.index("What a minute is worth")]
    assert sum(int(number) for number in re.findall(r", (\d+) surveys?\b", table)) == len(SURVEYS)


def test_room_that_nobody_fits_is_named_with_its_questions_those_worth_most_first():
    with_room = [quota for quota in QUOTAS if quota.estimated_completes_remaining > 0]
    unfit = with_room[::2]
    fits = {quota.quota_id: (10**6, 0) for quota in QUOTAS if quota not in unfit}
    text = text_of(page_of(SURVEYS, fits, members=1234))
    room = sum(quota.estimated_completes_remaining for quota in unfit)
    assert f"{len(unfit)} quotas with room for {room:,}" in text
    assert "No quota has more room than members that fit" in text
    assert "1,234 members" in text
    worth = {
        quota.quota_id: survey.price.amount * quota.estimated_completes_remaining
        for survey in SURVEYS
        for quota in survey.quotas
    }
    best = max(unfit, key=lambda quota: (worth[quota.quota_id], -quota.quota_id))
    questions = {
        q.question_id for at in best.layers for sub in at.sub_quotas for q in sub.questions_and_answers
    }
    place = text.index(str(best.quota_id))
    assert all(f"{worth[each.quota_id]:,.2f}" in text for each in (best,))
    assert str(next(iter(questions))) in text[place : place + 200]


def test_a_few_members_are_not_enough():
    fits = {quota.quota_id: (1, 0) for quota in QUOTAS}
    text = text_of(page_of(SURVEYS, fits))
    assert "Somebody fits each quota with room" in text
    short = [quota for quota in QUOTAS if quota.estimated_completes_remaining > 1]
    assert f"{len(short)} quotas with more room than members" in text


def test_odd_inventories_are_no_error():
    hostile = evolve(
        SURVEYS[0], survey_name='"><script>\x00\u202e', loi=0, ir=0, estimated_completes_remaining=-5
    )
    page = page_of((hostile, evolve(hostile, ir=300, loi=10**6)), {}, members=0)
    assert "<script" not in page
    assert "There is no open survey" in page_of(())
    nameless = evolve(SURVEYS[0], survey_name=None)
    assert f"Survey {nameless.survey_id}" in text_of(page_of((nameless,)))
    assert "not known" in page


@pytest.fixture
def service(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch) as simulator:
        yield simulator


def test_the_commands_write_it(service):
    assert run("quotas", "--html", "all.html").exit_code == 0
    assert Path("all.html").read_text().count("<circle") == len(service.inventory.surveys)
    result = run("match", "panel.jsonl", "--inventory", "quotas.json", "--html", "fit.html", "--workers", 1)
    assert result.exit_code == 0, result.stderr
    assert "Your panel can fill" in Path("fit.html").read_text()
    assert (result.stdout, Path("fit.html").stat().st_mode & 0o777) == ("", 0o600)


@pytest.mark.parametrize("more", ["--csv", "--json"])
@pytest.mark.parametrize("command", ["quotas", "match"])
def test_rows_that_are_asked_for_are_printed_beside_the_page(service, command, more):
    arguments = ("match", "panel.jsonl", "--inventory", "quotas.json", "--workers", 1)
    arguments = arguments if command == "match" else ("quotas",)
    expected = run(*arguments, more).stdout
    assert run(*arguments, more, "--html", "page.html").stdout == expected
    assert expected.count("\n") >= 1
    assert Path("page.html").exists()


@pytest.mark.parametrize("more", [("--top", 3), ("--output", "x.csv"), ("--html", "no/where.html")])
def test_the_page_is_about_all_quotas_and_has_a_place(service, more):
    arguments = ("panel.jsonl", "--inventory", "quotas.json", "--html", "fit.html", *more)
    result = run("match", *arguments)
    assert result.exit_code == 2
    assert "--html" in result.stderr
    assert not Path("fit.html").exists()
