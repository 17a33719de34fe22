"""Commands with two currencies in the inventory: `--currency-rates`, the one note without it, and names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from attrs import evolve
from cli_kit import FILES, lines, on_terminal, run, served_panel
from panel_kit import page_of
from test_inventory_page import text_of

from sampling_async import InvalidRequestError, Price, to_json

SEVERAL = "the prices are in several currencies (1, 9)"
RATES = {"1": 1, "9": {"rate": 0.0064, "name": "JPY"}}


def in_two(inventory):
    return evolve(
        inventory,
        surveys=tuple(
            evolve(each, price=Price(each.price.amount * (100 if number % 2 else 1), 9 if number % 2 else 1))
            for number, each in enumerate(inventory.surveys)
        ),
    )


@pytest.fixture
def service(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch) as simulator:
        Path("two.json").write_bytes(to_json(in_two(simulator.inventory)))
        Path("rates.json").write_text(json.dumps(RATES))
        yield simulator


def planned(*options, folder="out", code=0):
    given = ("panel.jsonl", "--out", folder, "--inventory", "two.json", "--workers", 1, "--watch", 0)
    result = run("campaign", *given, *options)
    assert result.exit_code == code, (result.stdout, result.stderr)
    return result


# --- The file of rates


@pytest.mark.parametrize("text", [
    '{"1": 1, "9": {"rate": 0.0064, "name": "JPY"}}',
    "1,1\n9,0.0064,JPY\n",
    "\ufeffCurrencyID,Rate,Name\n1,1,\n\n 9 , 0.0064 , JPY \n",
])  # fmt: skip
def test_rates_are_read_from_json_and_csv(tmp_path, text):
    file = tmp_path / "rates"
    file.write_text(text, encoding="utf-8")
    rates = FILES["rates"](file)
    assert (rates.by_id, rates.names) == ({1: 1.0, 9: 0.0064}, {9: "JPY"})
    assert FILES["rates"](None) is None


@pytest.mark.parametrize("text", [
    '{"1": 0}', '{"1": "x"}', '{"x": 1}', '{"1": {}}', "{", "1", "1,x", "1,1\n1,2", '"1', "1,nan", "1,-1",
    "1,1_5", "1_0,1", "", "{}", "9;0,5", "[1]", "CurrencyID,Rate",
    "9,1,0064,JPY", "USD,1\n9,0.0064", ",1.5,EUR",
    '{"1": true}', '{"1": 1, "1": 2}', '{"1": {"rate": 1, "rate": 2}}',
])  # fmt: skip
def test_what_is_no_file_of_rates_is_refused_with_its_name(tmp_path, text):
    file = tmp_path / "rates.csv"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=r"rates\.csv"):
        FILES["rates"](file)
    with pytest.raises(InvalidRequestError, match="none: No such file"):
        FILES["rates"](tmp_path / "none")


# --- Campaigns


def test_without_rates_a_campaign_says_once_that_prices_are_not_compared(service):
    plan = planned("--dry-run", "--json")
    assert plan.stderr.count(SEVERAL) == 1
    assert "--currency-rates FILE" in plan.stderr
    (figures,) = lines(plan)
    assert (figures["ExpectedValue"], figures["CurrencyID"]) == (None, None)
    worth = figures["ByCurrency"]
    assert f"{worth['1']:,.2f} in currency 1, {worth['9']:,.2f} in currency 9" in plan.stderr
    done = planned("--yes", folder="night")
    assert done.stderr.count(SEVERAL) == 1
    figures = json.loads(run("campaign", "status", "night", "--json").stdout)
    assert figures["ExpectedValue"] is None
    assert {each: sums["ExpectedValue"] > 0 for each, sums in figures["ByCurrency"].items()} == {
        "1": True,
        "9": True,
    }
    assert " in currency 9" in done.stderr
    compared = run("campaign", "compare", "night", "--json")
    assert json.loads(compared.stdout)["Nights"][0]["ExpectedValue"] is None


def test_with_rates_a_campaign_is_in_their_unit_and_goes_on_without_the_file(service, monkeypatch):
    plan = planned("--dry-run", "--json", "--currency-rates", "rates.json")
    assert SEVERAL not in plan.stderr
    (figures,) = lines(plan)
    worth = figures["ByCurrency"]
    assert figures["ExpectedValue"] == pytest.approx(worth["1"] + 0.0064 * worth["9"], abs=0.01)
    assert re.search(r" by the rates of currencies: .* in currency 1, .* JPY", plan.stderr)
    Path("rates.json").unlink()
    result = run("campaign", "run", "--out", "out", "--yes", "--watch", 0)
    assert result.exit_code == 0, result.stderr
    assert " JPY" in result.stderr
    on_terminal(monkeypatch)
    assert " JPY" in run("campaign", "status", "out").output
    assert "JPY" in Path("out", "report.html").read_text()


def test_a_currency_without_a_rate_is_named_before_anything_is_made(service):
    Path("rates.json").write_text('{"1": 1}')
    result = planned("--yes", "--currency-rates", "rates.json", code=2)
    assert "prices in currency 9, for which there is no rate" in result.stderr
    assert "--currency-rates" in result.stderr
    assert not Path("out").exists()
    assert not service.ledger.requests(endpoint="bulk_invite")


# --- Matching, and the page of an inventory


def test_match_says_once_that_prices_are_not_compared(service):
    given = ("match", "panel.jsonl", "--inventory", "two.json", "--allocate", 3, "--workers", 1)
    assert run(*given).stderr.count(SEVERAL) == 1
    assert run(*given, "--currency-rates", "rates.json").stderr.count(SEVERAL) == 0
    Path("rates.json").write_text('{"1": 1}')
    result = run(*given, "--currency-rates", "rates.json")
    assert result.exit_code == 2
    assert "currency 9" in result.stderr
    wrong = run("match", "panel.jsonl", "--inventory", "two.json", "--currency-rates", "rates.json")
    assert "--currency-rates is for --allocate and --html" in wrong.stderr


def test_the_page_of_an_inventory_is_by_currency(service):
    surveys = in_two(service.inventory).surveys
    worth = {1: 0.0, 9: 0.0}
    for survey in surveys:
        room = sum(max(0, each.estimated_completes_remaining) for each in survey.quotas)
        worth[survey.price.currency_id] += room * survey.price.amount
    page = page_of(surveys)
    text = text_of(page)
    assert f"Worth {worth[1]:,.2f} in currency 1, {worth[9]:,.2f} in currency 9" in text
    assert "so the order is by IR and LOI alone" in text
    assert [each in text for each in ("Each dot is a survey in currency 1", "a survey in currency 9")] == [
        True
    ] * 2
    assert page.count("<circle") == len(surveys)
    given = ("match", "panel.jsonl", "--inventory", "two.json", "--workers", 1, "--html", "page.html")
    assert run(*given, "--currency-rates", "rates.json").exit_code == 0
    text = text_of(Path("page.html").read_text())
    total = worth[1] + 0.0064 * worth[9]
    assert f"Worth {total:,.2f} by the rates of currencies: {worth[1]:,.2f} in currency 1, " in text
    assert "by IR and LOI alone" not in text
    # The best minute is that of the survey that is worth most by the rates.
    open_ = [each for each in surveys if each.estimated_completes_remaining > 0]
    best = max(
        open_,
        key=lambda each: each.price.amount * (0.0064 if each.price.currency_id == 9 else 1)
        * (min(each.ir, 100) / 100 if each.ir > 0 else 1) / max(1, each.loi),
    )  # fmt: skip
    minutes = text[text.index("What a minute is worth") :]
    assert str(best.survey_id) in minutes[:400]


def test_the_table_of_the_inventory_shows_the_name(service, monkeypatch):
    on_terminal(monkeypatch)
    Path("rates.csv").write_text("1,1,USD\n")
    shown = run("quotas", "--currency-rates", "rates.csv").stdout
    assert shown.count(" USD ") == len(service.inventory.surveys)
    assert " USD " not in run("quotas").stdout
    assert "rates.txt: No such file" in run("quotas", "--currency-rates", "rates.txt").stderr
