"""Bodies of notifications: JSON, XML and forms, whatever the content type says."""

from __future__ import annotations

import json
from contextlib import suppress
from urllib.parse import urlencode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sampling_async.notifications._bodies import NotUnderstoodError, read_fields

FIELDS = {"QuotaID": 7, "IsLive": True, "Name": "caf\u00e9 & <b>"}
TEXTS = {"QuotaID": "7", "IsLive": "True", "Name": "caf\u00e9 & <b>"}
XML = (
    '<?xml version="1.0" encoding="{0}"?>\n<!-- a remark -->\n'
    '<n:Status xmlns:n="urn:x"><n:QuotaID>7</n:QuotaID><n:IsLive> True </n:IsLive>'
    "<n:Name>caf\u00e9 &amp; <![CDATA[<b>]]></n:Name></n:Status>"
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_json_is_read_in_all_encodings_of_json(encoding):
    assert read_fields(json.dumps(FIELDS, ensure_ascii=False).encode(encoding)) == [FIELDS]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-1", "windows-1252"])
def test_xml_is_read_in_the_encoding_that_it_names(encoding):
    assert read_fields(XML.format(encoding).encode(encoding)) == [TEXTS]


def test_attributes_of_xml_are_fields():
    assert read_fields(b'<Status QuotaID="7"><IsLive>1</IsLive></Status>') == [{"QuotaID": "7", "IsLive": "1"}]


def test_a_form_is_read():
    assert read_fields(urlencode(TEXTS).encode()) == [TEXTS]


def test_the_query_is_read_as_a_form_if_there_is_no_body():
    assert read_fields(b"  \n", urlencode(TEXTS)) == [TEXTS]
    assert read_fields(b'{"a": 1}', "b=2") == [{"a": 1}]


@pytest.mark.parametrize(
    "body",
    [
        b'[{"a": 1}, {"a": 2}]',
        b'{"Completions": [{"a": 1}, {"a": 2}]}',
        b'{"Envelope": {"Body": {"Items": [{"a": 1}, {"a": 2}]}}}',
    ],
)
def test_a_list_is_several_notifications(body):
    assert read_fields(body) == [{"a": 1}, {"a": 2}]


def test_repeated_elements_are_several_notifications():
    assert read_fields(b"<L><I><a>1</a></I><I><a>2</a></I></L>") == [{"a": "1"}, {"a": "2"}]


def test_an_envelope_is_opened():
    assert read_fields(b'{"Notification": {"a": 1}}') == [{"a": 1}]
    assert read_fields(b'[{"a": 1}]') == [{"a": 1}]
    assert read_fields(b'{"a": 1}') == [{"a": 1}]


BILLION_LAUGHS = b"""<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]><x>&b;</x>"""
OUTER_FILE = b"""<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "an empty body"),
        (b"hello", "neither JSON nor XML nor a form"),
        (b"a=%ff", "neither JSON nor XML nor a form"),
        (b"\xff\xfe\xfd", "neither JSON nor XML nor a form"),
        (b"&".join(b"a%d=1" % n for n in range(201)), "neither JSON"),
        (b"a=1&a=2", "a field twice"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"Revenue": 100, "Revenue": 900}', "a field twice"),
        (b'{"a": %s}' % (b"9" * 5000), "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (json.dumps({f"a{n}": n for n in range(201)}).encode(), "more than 200 fields"),
        (json.dumps([{"a": 1}] * 1001).encode(), "more than 1,000 notifications"),
        (b"[]", "no fields"),
        (b"{}", "no fields"),
        (b"[1, 2]", "no fields"),
        (b'[{"a": 1}, 2]', "no fields"),
        (b"<a><b>", "not valid XML"),
        (b'<?xml version="1.0" encoding="klingon"?><a><b>1</b></a>', "not valid XML"),
        (b"<a>" * 17, "nested too deeply"),
        (b'{"a":' * 20 + b"1" + b"}" * 20, "nested too deeply"),
        (b'{"a": "\\ud800"}', "half of a character"),
        (b'{"\\udfff": 1}', "half of a character"),
        (b'{"a": 1e999}', "too large"),
        (BILLION_LAUGHS, "DOCTYPE"),
        (OUTER_FILE, "DOCTYPE"),
    ],
)
def test_what_cannot_be_read_says_why(body, reason):
    with pytest.raises(NotUnderstoodError, match=reason):
        read_fields(body)


def test_a_leaf_with_attributes_keeps_its_text():
    assert read_fields(b'<N><Code type="s">m1</Code><b x="1"/></N>') == [{"Code": "m1", "b": {"x": "1"}}]


def test_the_text_of_a_query_is_utf_8():
    assert read_fields(b"", "a=caf\u00e9") == [{"a": "caf\u00e9"}]
    with pytest.raises(NotUnderstoodError, match="half of a character"):
        read_fields(b"", "a=\ud800")


@given(st.binary(max_size=200), st.text(max_size=20))
@example(b"\x00{", "")
@example(b"\xef\xbb\xbf<", "")
def test_no_body_raises_anything_else(body, query):
    with suppress(NotUnderstoodError):
        assert all(read_fields(body, query))
