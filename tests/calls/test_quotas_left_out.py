"""Surveys that lack a value: they are left out and named, and the others are read."""

from __future__ import annotations

import doubles
import httpx
import pytest
from quotas_kit import (
    HEAD,
    LACKING,
    ONCE,
    TAIL,
    Parts,
    body_of,
    both,
    ids_of,
    read_by,
    service,
    survey,
    without_quota_id,
)

from sampling_async import DecodeError, Quotas, from_json

QUOTA_ID_OF_3 = "$.Surveys[3].Quotas[0].QuotaID"


OTHERS = [number for number in range(40) if number != 3]


@both
@pytest.mark.parametrize("size", [7, 10**6])
async def test_a_survey_with_a_null_is_left_out_and_named(how, size, caplog):
    parts = Parts(*(LACKING[at : at + size] for at in range(0, len(LACKING), size)))
    async with doubles.client(service(parts)) as client:
        assert await read_by(client, how) == OTHERS
    rule = f"get_quotas: {QUOTA_ID_OF_3}: expected a whole number, found null"
    assert caplog.messages == [f"a survey is left out, the others are read: {rule}"]
    assert caplog.records[0].levelname == "WARNING"


@pytest.mark.parametrize("before", [b"", b'"N":{},'])  # read in parts, and as a whole
@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"Price": None}, "Price"),
        ({"Price": {"Amount": None, "CurrencyID": 1}}, "Price.Amount"),
        ({"Quotas": None}, "Quotas"),
        ({"Quotas": [None]}, "Quotas[0]"),
        ({"Quotas": [{}]}, "Quotas[0].QuotaID"),
        ({"LOI": None}, "LOI"),
        ({"ScheduledCompletionDate": None}, "ScheduledCompletionDate"),
        ({"DeviceTypeIDs": [1, None]}, "DeviceTypeIDs[1]"),
    ],
)
async def test_what_is_left_out_is_in_the_inventory(before, changes, path):
    body = LACKING.replace(HEAD, b"{" + before + HEAD[1:]).replace(survey(1), survey(1, **changes))
    async with doubles.client(doubles.Service(httpx.Response(200, content=body))) as client:
        quotas = await client.get_quotas()
        told: list[DecodeError] = []
        assert await ids_of(client, on_left_out=told.append) == [each.survey_id for each in quotas.surveys]
    assert [error.path for error in quotas.left_out] == [f"$.Surveys[1].{path}", QUOTA_ID_OF_3]
    assert [error.path for error in told] == [f"$.Surveys[1].{path}", QUOTA_ID_OF_3]
    assert [each.survey_id for each in quotas.surveys] == [number for number in OTHERS if number != 1]


@pytest.mark.parametrize("before", [b"", b'"N":{},'])
async def test_strict_calls_raise_the_error_of_a_survey_that_would_be_left_out(before):
    body = LACKING.replace(HEAD, b"{" + before + HEAD[1:])
    async with doubles.client(doubles.Service(httpx.Response(200, content=body)), retry=ONCE) as client:
        for read in (client.get_quotas(strict=True), ids_of(client, strict=True)):
            with pytest.raises(DecodeError) as caught:
                await read
            assert caught.value.path == QUOTA_ID_OF_3
        assert not from_json(Quotas, body_of()).left_out


@both
@pytest.mark.parametrize("before", [b"", b'"N":{},'])
async def test_an_inventory_whose_surveys_would_all_be_left_out_is_refused(how, before):
    body = b"{" + before + HEAD[1:] + without_quota_id(0) + b"," + without_quota_id(1) + TAIL
    async with doubles.client(doubles.Service(httpx.Response(200, content=body)), retry=ONCE) as client:
        with pytest.raises(DecodeError) as caught:
            await read_by(client, how)
    assert caught.value.path == "$.Surveys[0].Quotas[0].QuotaID"


@both
@pytest.mark.parametrize("before", [b"", b'"N":{},'])
@pytest.mark.parametrize("value", ["3", 1.5, [], {}])
async def test_a_survey_with_a_value_of_another_kind_is_not_left_out(how, before, value):
    body = b"{" + before + HEAD[1:] + survey(0) + b"," + survey(1, LOI=value) + TAIL
    async with doubles.client(doubles.Service(httpx.Response(200, content=body)), retry=ONCE) as client:
        with pytest.raises(DecodeError) as caught:
            await read_by(client, how)
    assert caught.value.path == "$.Surveys[1].LOI"


async def test_many_surveys_that_are_left_out_are_counted_in_the_log(caplog):
    body = HEAD + b",".join([survey(0), *map(without_quota_id, range(1, 31))]) + TAIL
    async with doubles.client(doubles.Service(httpx.Response(200, content=body))) as client:
        quotas = await client.get_quotas()
    assert len(quotas.left_out) == 30
    assert len(caplog.messages) == 11
    assert caplog.messages[-1] == "30 surveys of 31 are left out"


async def test_a_survey_is_left_out_again_and_read_when_it_is_whole():
    bodies = [LACKING, LACKING, LACKING.replace(without_quota_id(3), survey(3))]
    async with doubles.client(service(*[httpx.Response(200, content=body) for body in bodies])) as client:
        first, second, third = [await client.get_quotas() for _ in bodies]
    assert len(first.left_out) == len(second.left_out) == 1
    assert second.surveys[0] is first.surveys[0]
    assert (len(third.surveys), third.left_out) == (40, ())
