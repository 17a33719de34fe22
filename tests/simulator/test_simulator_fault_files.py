"""Faults as JSON: what they mean, and where an error is."""

from __future__ import annotations

import inspect
import json

import pytest

from sampling_async import DecodeError
from sampling_async.simulator import Fault, read_faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"Fault": "status"}', Fault.status()),
        (
            '{"Fault": "status", "Status": 429, "ResultCode": null, "RetryAfter": 1.5, "When": "after"}',
            Fault.status(429, result_code=None, retry_after=1.5, when="after"),
        ),
        (
            '{"fault": "status", "retry_after": "soon", "html": true}',
            Fault.status(retry_after="soon", html=True),
        ),
        ('{"Fault": "cut", "When": "middle", "Reset": true}', Fault.cut(when="middle", reset=True)),
        ('{"Fault": "delay", "Seconds": 3}', Fault.delay(3)),
        ('{"Fault": "body", "Content": "\u00e9"}', Fault.body("\u00e9".encode())),
        (
            '{"Fault": "contradiction", "Variant": "failure_with_invite"}',
            Fault.contradiction("failure_with_invite"),
        ),
        ('{"Fault": "drip", "On": null}', Fault.drip()),
        (
            '{"Fault": "refusal", "ResultCode": 39, "On": {"MemberCode": "m1", "QuotaID": 5, "Every": 2}}',
            Fault.refusal(39).on(member_code="m1", quota_id=5, every=2),
        ),
        (
            '{"Fault": "null", "On": {"Endpoint": "get_quotas", "After": 1, "Times": 2, "Probability": 0.5}}',
            Fault.null().on("get_quotas", after=1, times=2, probability=0.5),
        ),
    ],
)
def test_a_fault_from_json_equals_a_constructed_one(text, fault):
    assert read_faults(f"[{text}]") == (fault,)
    assert read_faults(f"[{text}, {text}]".encode()) == (fault, fault)


def test_all_constructors_are_available_in_json():
    made = {
        name
        for name, member in vars(Fault).items()
        if isinstance(member, classmethod) and not name.startswith("_")
    }
    with pytest.raises(DecodeError, match=f"expected one of {', '.join(sorted(made))}, not 'x'"):
        read_faults('[{"Fault": "x"}]')
    for name in made:
        needed = {
            parameter.name: {"seconds": 1, "content": "x", "result_code": 9}[parameter.name]
            for parameter in inspect.signature(getattr(Fault, name)).parameters.values()
            if parameter.default is inspect.Parameter.empty
        }
        assert len(read_faults(json.dumps([{"Fault": name, **needed}]))) == 1
    assert read_faults("[]") == ()


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("", "$", "expected JSON, found a syntax error in line 1, column 1"),
        ("[\n{,}]", "$", "line 2, column 2"),
        ("{}", "$", "expected an array of faults, found an object"),
        ("[NaN]", "$", "finite"),
        ("[" * 100_000, "$", "JSON"),
        ("[1]", "$[0]", "expected an object, found 1"),
        ("[{}]", "$[0]", 'expected "Fault", one of body, contradiction'),
        ('[{"Fault": "statsu"}]', "$[0].Fault", "not 'statsu'"),
        ('[{"Fault": 5}]', "$[0].Fault", "expected one of"),
        ('[{"Fault": "on"}]', "$[0].Fault", "expected one of"),
        ('[{"Fault": ["status"]}]', "$[0].Fault", "expected one of"),
        ('[{"Fault": "null"}, {"Fault": "status", "Statsu": 503}]', "$[1].Statsu", "Status, ResultCode, Html"),
        ('[{"Fault": "null", "Kind": 1}]', "$[0].Kind", "the known keys are When, On"),
        (
            '[{"Fault": "status", "Status": "503"}]',
            "$[0].Status",
            "expected a status from 200 to 599, found '503'",
        ),
        ('[{"Fault": "status", "Status": 99}]', "$[0].Status", "found 99"),
        ('[{"Fault": "status", "Html": 1}]', "$[0].Html", "expected true or false, found 1"),
        (
            '[{"Fault": "delay", "Seconds": 1' + "0" * 400 + "}]",
            "$[0].Seconds",
            "expected a number of at least 0",
        ),
        ('[{"Fault": "status", "RetryAfter": -1}]', "$[0].RetryAfter", "a number of at least 0, or text"),
        ('[{"Fault": "status", "When": "middle"}]', "$[0]", "must be one of before, after"),
        ('[{"Fault": "status", "When": 1}]', "$[0].When", "expected text, found 1"),
        ('[{"Fault": "delay"}]', "$[0]", "expected 'Seconds'"),
        ('[{"Fault": "delay", "Seconds": true}]', "$[0].Seconds", "found true"),
        ('[{"Fault": "refusal", "ResultCode": 1}]', "$[0]", "cannot be 1"),
        (
            '[{"Fault": "contradiction", "Variant": "x"}]',
            "$[0].Variant",
            "one of success_without_invite, failure_",
        ),
        ('[{"Fault": "null", "": 1}]', "$[0].", "this key is not known here"),
        ('[{"Fault": "null", "On": []}]', "$[0].On", "expected an object, found an array"),
        ('[{"Fault": "null", "On": {"Every": 0}}]', "$[0].On", "every"),
        ('[{"Fault": "null", "On": {"Every": 1.5}}]', "$[0].On.Every", "expected a whole number, found 1.5"),
        (
            '[{"Fault": "null", "On": {"Endpoint": "quotas"}}]',
            "$[0].On",
            "no endpoint 'quotas'; the endpoints are",
        ),
        ('[{"Fault": "null", "On": {"Member": "m"}}]', "$[0].On.Member", "Endpoint, MemberCode, QuotaID"),
        ('[{"Fault": "null", "On": {"Probability": 2}}]', "$[0].On", "probability"),
    ],
)
def test_errors_name_their_place(text, path, words):
    with pytest.raises(DecodeError) as caught:
        read_faults(text)
    assert caught.value.path == path
    assert words in caught.value.rule


def test_bytes_that_are_not_text_are_reported():
    with pytest.raises(DecodeError, match="UTF-8"):
        read_faults(b"[\xff\xfe\xff]")
