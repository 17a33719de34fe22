"""Bodies of notifications: JSON, XML and forms, whatever the content type says."""

from __future__ import annotations

import gzip
import json
import zlib
from contextlib import suppress
from urllib.parse import urlencode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sampling_async.notifications._bodies import NotUnderstoodError, RefusedBodyError, read_fields

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
        (b"\xff\xfe\xfd", "neither JSON nor XML nor a form"),
        (b"&".join(b"a%d=1" % n for n in range(201)), "more than 200 fields"),
        (b"bare", "neither JSON nor XML nor a form"),
        (b"--x\r\n\r\n--x--", "multipart without a field"),
        (b"a=1&a=2", "a field twice"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"Revenue": 100, "Revenue": 900}', "a field twice"),
        (b'{"a": %s}' % (b"9" * 5000), "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (json.dumps({f"a{n}": n for n in range(201)}).encode(), "more than 200 fields"),
        (b"[]", "no fields"),
        (b"{}", "no fields"),
        (b"[1, 2]", "no fields"),
        (b'[{"a": 1}, 2]', "no fields"),
        (b"<a><b>", "not valid XML"),
        (b"<a><b>1</b></c>", "not valid XML"),
        (b"<a " + b" ".join(b'x%d=">"' % n for n in range(201)) + b"/>", "more than 200 attributes"),
        (b"<a>" + b"".join(b"<x%d/>" % n for n in range(201)) + b"</a>", "more than 200 fields"),
        (b"<a>" + b"<b/>" * 60_001 + b"</a>", "too many elements"),
        (gzip.compress(b'{"a": 1}', mtime=0)[:-9], "compression was cut off"),
        (gzip.compress(b'{"a": 1}', mtime=0)[:5] + b"\xff" * 20, "compression"),
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


JOSE = {"UniqueCode": "Jos\u00e9", "Reason": "caf\u00e9"}
JOSE_JSON = json.dumps(JOSE, ensure_ascii=False)
JOSE_XML = (
    '<?xml version="1.0" encoding="%s"?><N><UniqueCode>Jos\u00e9</UniqueCode><Reason>caf\u00e9</Reason></N>'
)


def typed(content_type: str, **more: str) -> list[tuple[str, str]]:
    return [("content-type", content_type), *((name.replace("_", "-"), value) for name, value in more.items())]


@pytest.mark.parametrize("charset", ["utf-8", "utf8", "iso-8859-1", "windows-1251", "utf-16", "klingon", "hex"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
def test_the_bytes_of_unicode_overrule_what_is_declared(encoding, charset):
    assert read_fields(JOSE_JSON.encode(encoding), "", typed(f"application/json; charset={charset}")) == [JOSE]
    assert read_fields((JOSE_XML % charset).encode(encoding)) == [JOSE]


@pytest.mark.parametrize("charset", ["windows-1252", "ISO-8859-1", "us-ascii", "utf-8", "klingon"])
def test_what_is_left_is_the_code_page_of_windows(charset):
    """A euro sign distinguishes it from ISO 8859-1."""
    body = JOSE_JSON.replace("caf", "\u20ac").encode("windows-1252")
    assert read_fields(body, "", typed(f'text/json; charset="{charset}"'))[0]["Reason"] == "\u20ac\u00e9"
    assert read_fields((JOSE_XML % charset).encode("windows-1252")) == [JOSE]
    assert read_fields(JOSE_JSON.encode("windows-1252")) == [JOSE]


@pytest.mark.parametrize(
    ("charset", "text"), [("Shift_JIS", "\u540d\u524d"), ("windows-1251", "\u0438\u043c\u044f")]
)
def test_what_is_declared_counts_where_the_bytes_are_not_unicode(charset, text):
    body = json.dumps({"UniqueCode": text}, ensure_ascii=False).encode(charset)
    assert read_fields(body, "", typed(f"application/json;charset={charset}")) == [{"UniqueCode": text}]
    xml = f'<?xml version="1.0" encoding="{charset}"?><N><UniqueCode>{text}</UniqueCode></N>'
    assert read_fields(xml.encode(charset)) == [{"UniqueCode": text}]
    assert read_fields(xml.encode(charset), "", typed("text/xml; charset=utf-8")) == [{"UniqueCode": text}]


def test_one_foreign_byte_spoils_no_other_field():
    body = JOSE_JSON.encode().replace(b"caf\xc3\xa9", b"caf\xe9")
    assert read_fields(body) == [JOSE]
    for charset in ("windows-1252", "iso-8859-1", "utf-8"):
        assert read_fields(body, "", typed(f"application/json; charset={charset}")) == [JOSE]
    assert read_fields(b'{"a": "\x81\x0b\n"}') == [{"a": "\x81\x0b\n"}]
    assert read_fields(b"a=caf%e9&b=caf%C3%A9&c=\xe9") == [{"a": "caf\u00e9", "b": "caf\u00e9", "c": "\u00e9"}]
    assert read_fields(b"<N><a>x\x0b</a><b>&#x1F;</b></N>") == [{"a": "x\ufffd", "b": "\ufffd"}]


@pytest.mark.parametrize("name", ["idna", "punycode", "undefined", "raw_unicode_escape", "utf-7"])
def test_a_character_set_that_is_none_of_a_document_costs_no_notification(name):
    body = b'{"Reason": "caf\xff"}'
    ((fields),) = read_fields(body, headers=[("content-type", f"application/json; charset={name}")])
    assert fields["Reason"].startswith("caf")


@pytest.mark.parametrize("behind", [b"\0", b"\0" * 500, b"\r\n\0\0 "])
@pytest.mark.parametrize("body", [b'{"a": "1", "b": "2"}', b"<N><a>1</a><b>2</b></N>", b"a=1&b=2"])
def test_zeros_behind_a_body_are_overlooked(body, behind):
    assert read_fields(body + behind) == [{"a": "1", "b": "2"}]
    assert read_fields(body.decode().encode("utf-16-le") + b"\0" * len(behind)) == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize("form", ["a=1&b=2&", "&a=1&&b=2", "a=1&b=2&bare", "a=1&b=2&a=1"])
def test_a_form_may_be_sloppy(form):
    found = {name: value for name, value in read_fields(form.encode())[0].items() if name != "bare"}
    assert found == {"a": "1", "b": "2"}
    assert read_fields(b"", form) == read_fields(form.encode())


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(JOSE_JSON),
        json.dumps(json.dumps(JOSE_JSON)),
        json.dumps({"payload": JOSE_JSON}),
        json.dumps([JOSE_JSON]),
        json.dumps({"d": JOSE_XML % "utf-8"}),
        f'<string xmlns="http://tempuri.org/">{JOSE_JSON}</string>',
        urlencode({"json": JOSE_JSON}),
    ],
)
def test_a_document_in_a_text_is_read(body):
    assert read_fields(body.encode()) == [JOSE]


def test_texts_without_end_are_not():
    deep = "[" * 9, "]" * 9
    body = json.dumps(JOSE_JSON.join(deep)).join(deep)
    with pytest.raises(NotUnderstoodError, match="too deeply"):
        read_fields(body.encode())


RAW = zlib.compressobj(wbits=-15)
PACKED = {
    "gzip": gzip.compress(JOSE_JSON.encode()),
    "x-gzip": gzip.compress(JOSE_JSON.encode()) + b"\0" * 20,
    "GZIP, identity": gzip.compress(JOSE_JSON[:9].encode()) + gzip.compress(JOSE_JSON[9:].encode()),
    "gzip, gzip": gzip.compress(gzip.compress(JOSE_JSON.encode())),
    "deflate": zlib.compress(JOSE_JSON.encode()),
    " deflate ": RAW.compress(JOSE_JSON.encode()) + RAW.flush(),
    "utf-8": JOSE_JSON.encode(),
    "iso-8859-1": JOSE_JSON.encode("iso-8859-1"),
    "identity": gzip.compress(JOSE_JSON.encode()),  # the bytes decide
}


@pytest.mark.parametrize("coding", PACKED)
def test_a_compressed_body_is_read(coding):
    assert read_fields(PACKED[coding], "", typed("text/json", content_encoding=coding)) == [JOSE]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_that_a_framework_has_decompressed_is_read(coding):
    assert read_fields(JOSE_JSON.encode(), "", typed("text/json", content_encoding=coding)) == [JOSE]


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "hex", "gzip, br"])
def test_an_unknown_compression_is_refused(coding):
    with pytest.raises(RefusedBodyError, match="is not known") as refused:
        read_fields(b'{"a": 1}', "", typed("text/json", content_encoding=coding))
    assert refused.value.status == 415


@pytest.mark.parametrize(
    "pack", [gzip.compress, zlib.compress, lambda body: gzip.compress(gzip.compress(body))]
)
def test_a_body_that_is_too_large_without_its_compression_is_refused(pack):
    coding = "deflate" if pack is zlib.compress else "gzip"
    with pytest.raises(RefusedBodyError, match="too large") as refused:
        read_fields(pack(b" " * (1 << 20) + b"{}"), "", typed("", content_encoding=coding))
    assert refused.value.status == 413


def test_a_long_list_is_read_whole_or_refused():
    assert len(read_fields(json.dumps([{"a": 1}] * 1_001).encode())) == 1_001
    assert len(read_fields(b"<L>" + b"<I><a>1</a></I>" * 5_000 + b"</L>")) == 5_000
    with pytest.raises(RefusedBodyError, match="20,000 notifications") as refused:
        read_fields(json.dumps([{"a": 1}] * 20_001).encode())
    assert refused.value.status == 413


MULTIPART = (
    b'--x-1\r\nContent-Disposition: form-data; name="UniqueCode"\r\n\r\nJos\xc3\xa9\r\n'
    b"--x-1\r\nContent-Disposition: form-data; name=Reason\r\n"
    b"Content-Type: text/plain; charset=windows-1252\r\n\r\ncaf\xe9\r\n--x-1--\r\n"
)


@pytest.mark.parametrize("body", [MULTIPART, b"\r\n" + MULTIPART, MULTIPART.replace(b"\r\n", b"\n")])
def test_multipart_is_read(body):
    assert read_fields(body, "", typed("multipart/form-data; boundary=x-1")) == [JOSE]
    assert read_fields(body) == [JOSE]


def test_a_file_in_multipart_is_a_document():
    head = b'--x\r\nContent-Disposition: form-data; name="f"; filename="n.json"\r\n\r\n'
    assert read_fields(head + JOSE_JSON.encode() + b"\r\n--x--") == [JOSE]


def test_an_element_may_be_closed_in_another_case():
    body = b"<N><SurveyId>1</SurveyID><!-- </X> --><Text><![CDATA[<B>]]></TEXT></n>"
    assert read_fields(body) == [{"SurveyId": "1", "Text": "<B>"}]


def test_declarations_of_types_are_no_fields():
    body = b'<N xmlns:xsi="urn:i" xmlns="urn:n"><QuotaID xsi:nil="true"/><a>1</a></N>'
    assert read_fields(body) == [{"QuotaID": "", "a": "1"}]


@given(st.binary(max_size=200), st.text(max_size=20), st.sampled_from(["", "gzip", "deflate", "utf-16", "br"]))
@example(b"\x00{", "", "")
@example(b"\xef\xbb\xbf<", "", "")
@example(b"--x\n\n\xff\n--x", "", "")
@example(b"<a></A", "", "")
def test_no_body_raises_anything_else(body, query, coding):
    with suppress(NotUnderstoodError, RefusedBodyError):
        assert all(read_fields(body, query, typed(f"x; charset={coding}", content_encoding=coding)))
