"""What `doctor` concludes from numbers and responses, without a network."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import PartnerSettings, Setting
from sampling_async._cli import _doctor
from sampling_async._cli import _doctor_findings as judge
from sampling_async._cli._doctor import CHECKS, not_made
from sampling_async._cli._doctor_findings import Finding, ProbeResponse

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
GUID = "6f0c2b1e-3f0a-4a52-9b87-8d5a0d7a4c11"
KEY = "0b9a4d52-7c43-4a39-8f6e-2d1f5f1c9e77"


def issued(**dates):
    """Return a certificate in DER."""
    made = trustme.CA().issue_cert("localhost", **dates).cert_chain_pems[0].bytes().decode()
    return ssl.PEM_cert_to_DER_cert(made)


def valid(days, *, since=-30):
    return issued(not_before=NOW + timedelta(days=since), not_after=NOW + timedelta(days=days))


GOOD = valid(90)


def settings(**values):
    return PartnerSettings([Setting(name.replace("_", " "), "", value) for name, value in values.items()])


# --- The way to the service -------------------------------------------------------------------------------


def test_an_address_with_a_path_of_the_interface_fails():
    found = judge.address(
        "https://sampling.example/IPExternalSamplingService", is_http=False, is_loopback=False
    )
    assert found.verdict == "fail"
    assert "which the client adds itself" in found.found


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("IPExternalSamplingService/ExternalSample/{}/m000001/Invites", "IPExternalSamplingService/..."),
        ("IPExternal%53amplingService/ExternalSample/{}/m000001", "IPExternalSamplingService/..."),
        ("a/integratedpanelservice", "a/integratedpanelservice"),
        ("{}/IPExternalSamplingService", "<hidden>/..."),
        ("x/{}", "x/<hidden>"),
        ("x/%7B{}%7D/m000001", "x/{{<hidden>/..."),
        ("x%20y", "x%20y"),
    ],
)
@pytest.mark.parametrize("guid", [GUID, GUID.upper(), GUID.replace("-", "")])
def test_an_address_is_shown_without_guids_and_what_comes_after_them(path, shown, guid):
    found = judge.address(f"http://h/{path.format(guid)}", is_http=True, is_loopback=True)
    assert found.found.split(" has ")[0] == f"http://h/{shown.format()}"
    assert "m000001" not in str(found)


@pytest.mark.parametrize(
    "spelling",
    [
        *(KEY, KEY.upper(), KEY.replace("-", ""), KEY.replace("-", "_")),
        *(KEY.replace("-", "%2D"), KEY.replace("-", " - ")),
    ],
)
def test_guids_are_hidden_in_all_texts_of_a_finding(spelling):
    found = Finding("Panel", "ok", f"a panel ({spelling})", f"{spelling}.")
    assert (found.found, found.remedy) == ("a panel (<hidden>)", "<hidden>.")
    pages = judge.end_pages(PartnerSettings([Setting(f"{spelling} URL", "", None)]))
    assert pages.figures["NotSet"] == ["<hidden> URL"]


def test_half_a_key_is_not_shown():
    response = ProbeResponse(403, {"server": "x" * 30 + KEY})
    assert judge.service(response).figures["Server"] == "x" * 30 + "<hidden>"


@pytest.mark.parametrize(
    ("is_http", "is_loopback", "verdict"), [(False, False, "ok"), (True, True, "ok"), (True, False, "warn")]
)
def test_plain_http_warns_unless_it_stays_on_this_machine(is_http, is_loopback, verdict):
    assert judge.address("x://host", is_http=is_http, is_loopback=is_loopback).verdict == verdict


@pytest.mark.parametrize(
    ("der", "verdict", "words"),
    [
        (valid(90), "ok", "valid for 90 days, until 2027-02-21"),
        (valid(13), "warn", "valid for 13 days"),
        (valid(0.5), "warn", "valid for 12 hours"),
        (valid(-3), "fail", "expired 3 days ago, on 2026-11-20"),
        (valid(-1), "fail", "expired 24 hours ago"),
        (valid(90, since=2), "fail", "valid from 2026-11-25 only"),
        (None, "ok", "its dates could not be read"),
    ],
)
def test_a_certificate_is_judged_by_its_dates(der, verdict, words):
    found = judge.certificate("TLS", der, NOW)
    assert (found.verdict, words in found.found) == (verdict, True)
    assert bool(found.remedy) == (verdict != "ok")


def test_dates_from_2050_on_have_four_digits_of_the_year():
    begins, ends = datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2061, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert judge.validity_of(issued(not_before=begins, not_after=ends)) == (begins, ends)


@given(st.data())
def test_damaged_bytes_have_no_dates_or_others_and_never_end_in_an_error(data):
    der = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        der[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    assert judge.certificate("TLS", bytes(der), NOW).check == "TLS"
    assert judge.certificate("TLS", bytes(der[: data.draw(st.integers(0, len(der)))]), NOW).check == "TLS"


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("Hostname mismatch, certificate is not valid for", "host for which the certificate was issued"),
        ("unable to get local issuer certificate", "SAMPLING_CA_FILE"),
        ("certificate has expired", "for the operator to renew"),
        ("certificate is not yet valid", "clock of this machine"),
    ],
)
def test_the_remedy_of_a_refused_certificate_fits_its_reason(problem, words):
    found = judge.no_tls(f"the TLS certificate was refused: {problem}")
    assert (found.check, found.verdict) == ("TLS", "fail")
    assert words in found.remedy


def test_who_renews_a_certificate_is_named():
    found = judge.certificate("Client cert", valid(5), NOW, whose="you")
    assert found.remedy == "It is for you to renew it soon."


def date(seconds):
    return format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("seconds", "verdict", "words"),
    [
        (0, "ok", "agrees"),
        (1, "ok", "agrees"),
        (-2, "ok", "agrees"),
        (5, "warn", "4 seconds ahead of"),
        (-30, "warn", "29 seconds behind"),
        (61, "fail", "60 seconds ahead of"),
        (-420, "fail", "7 minutes behind"),
        (7200 * 12, "fail", "24 hours ahead of"),
        (86_400 * 3, "fail", "3 days ahead of"),
    ],
)
def test_clocks_may_differ_by_what_the_date_header_cannot_show(seconds, verdict, words):
    began = NOW.timestamp()
    found = judge.clock(date(seconds), None, began, began + 0.6)
    assert (found.verdict, words in found.found) == (verdict, True)


def test_a_slow_response_is_no_wrong_clock():
    assert judge.clock(date(4), None, NOW.timestamp(), NOW.timestamp() + 9).verdict == "ok"


@pytest.mark.parametrize(
    ("said", "age"),
    [
        (None, None),
        ("yesterday", None),
        (date(500), "500"),
        ("Mon, 99999999999999999999 Nov 2026 10:00:00 GMT", None),
        ("Mon, 23 Nov 2026 10:00:00 +99999999999999", None),
    ],
)
def test_without_a_date_of_now_the_clock_is_not_judged(said, age):
    assert judge.clock(said, age, NOW.timestamp(), NOW.timestamp()).verdict == "skipped"
    assert judge.clock(date(0), "0", NOW.timestamp(), NOW.timestamp()).verdict == "ok"


def test_the_latency_is_the_median_of_what_was_answered():
    seconds = (0.2, 9.0, 0.25)
    found = judge.latency([ProbeResponse(200, seconds=each) for each in seconds])
    assert (found.verdict, found.found) == ("ok", "250 ms for Get Settings, the median of 3")
    assert found.figures == {"MedianSeconds": 0.25, "Requests": 3}
    assert judge.latency([ProbeResponse(200, seconds=0.0123)]).found.startswith("12.3 ms")
    assert judge.latency([ProbeResponse(problem="lost")]).verdict == "warn"
    mixed = [
        ProbeResponse(200, seconds=0.2),
        ProbeResponse(500),
        ProbeResponse(),
        ProbeResponse(500),
        ProbeResponse(200, seconds=0.3),
    ]
    found = judge.latency(mixed)
    assert found.verdict == "warn"
    assert found.found.startswith("3 of 5 requests in a row were refused or lost (500, no response); 250 ms")


def test_a_proxy_says_what_it_does():
    assert "CONNECT" in judge.proxy("proxy:3128").found
    assert "takes connections" in judge.proxy("proxy:3128", is_tunnel=False).found


# --- The service's answers --------------------------------------------------------------------------------

DENIED = b'{"Message":"Authorization has been denied for this request."}'


def seen(status=403, body=DENIED, server="", **more):
    return ProbeResponse(status, {"server": server, "content-type": "application/json"}, body, **more)


def refused(own, none, others):
    header, key = judge.refused(own, none, others)
    assert (key.check, key.verdict) == ("Key", "fail")
    assert header.check == "Key header"
    return header


@pytest.mark.parametrize("other", [seen(400, b"{}"), seen(401), seen(403, b'{"Message":"Unknown key"}')])
def test_a_key_that_changes_the_response_has_arrived(other):
    for own, others in ((other, [other, other]), (seen(), [seen(), other])):
        assert refused(own, [seen(), seen()], others).verdict == "ok"


def test_the_same_response_to_all_keys_cannot_be_explained_for_certain():
    for server, dropped in (
        ("nginx/1.22.1", True),
        ("gunicorn", True),
        ("Microsoft-IIS/10.0", False),
        ("", False),
    ):
        header = refused(seen(server=server), [seen(), seen()], [seen(), seen()])
        assert header.verdict == "warn"
        assert "the same with your key" in header.found
        assert header.figures == {"ProbablyDropped": dropped}
    assert "underscores_in_headers on" in refused(seen(server="nginx"), [seen()] * 2, [seen()] * 2).remedy
    assert "header_map = dangerous" in refused(seen(server="gunicorn"), [seen()] * 2, [seen()] * 2).remedy


def test_a_page_of_nginx_itself_is_about_neither_key_nor_header():
    page = seen(body=b"<html><center><h1>403 Forbidden</h1></center><hr><center>nginx</center>", server="nginx")
    header = refused(page, [page, page], [page, page])
    assert "a page of nginx itself" in header.found
    assert "addresses" in header.remedy


def test_a_number_of_the_request_in_the_body_is_no_difference():
    bodies = [b'{"Message":"no","Id":"%d-0b9a4d52-7c43"}' % n for n in range(5)]
    own, *none = (seen(body=body) for body in bodies[:3])
    assert refused(own, none, [seen(body=body) for body in bodies[3:]]).verdict == "warn"


def test_bodies_that_differ_by_themselves_prove_nothing():
    words = [b"alpha", b"beta", b"gamma", b"delta", b"epsilon"]
    own, *none = (seen(body=body) for body in words[:3])
    assert refused(own, none, [seen(body=body) for body in words[3:]]).verdict == "warn"
    assert refused(own, none, [seen(400), seen(400)]).verdict == "ok"  # but statuses do


def test_a_comparison_with_a_response_missing_is_none():
    gone = ProbeResponse(problem="no connection")
    assert "not all requests" in refused(seen(), [seen(), gone], [seen(), seen()]).found


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (seen(200, server="nginx"), "ok", "it answers 200 (nginx)"),
        (seen(301), "fail", "it answers 301"),
        (seen(400), "fail", "it answers 400"),
        (seen(400, b'{"ResultCode": 3}'), "ok", "it answers 400"),
        (seen(407), "fail", "it answers 407"),
        (seen(429), "fail", "it answers 429"),
        (seen(404), "fail", "it answers 404"),
        (seen(503), "fail", "it answers 503"),
        (ProbeResponse(problem="the connection was lost"), "fail", "the connection was lost"),
        (seen(200, server="a\x1b[31mb" + "z" * 99), "ok", "(a[31mb" + "z" * 34 + ")"),
    ],
)
def test_a_service_answers_or_it_does_not(answer, verdict, words):
    found = judge.service(answer)
    assert (found.verdict, words in found.found) == (verdict, True)
    assert bool(found.remedy) == (verdict == "fail")


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (seen(400, b"<center>No required SSL certificate was sent</center>"), "SAMPLING_CLIENT_CERT"),
        (seen(400, b"The plain HTTP request was sent to HTTPS port"), "https://"),
        (seen(400, b"<html>"), "something on the way"),
        (seen(407), "SAMPLING_PROXY"),
        (seen(429), "too many requests"),
        (
            ProbeResponse(302, {"location": f"https://login.example:8443/{GUID}?m=m000001"}),
            "https://login.example:8443.",
        ),
        (ProbeResponse(302, {"location": f"/{GUID}/m000001"}), "leads to."),
        (ProbeResponse(problem="the response is not valid HTTP/1.1: x"), "http or https"),
        (ProbeResponse(problem="the proxy answered 407"), "SAMPLING_PROXY"),
        (ProbeResponse(problem="the connection was lost"), "Run this again"),
    ],
)
def test_who_answers_in_place_of_the_service_is_distinguished(answer, remedy):
    found = judge.service(answer)
    assert (found.verdict, remedy in found.remedy) == ("fail", True)
    assert not any(each in str(found) for each in (GUID, "m000001", "\x0b"))


def test_what_a_proxy_says_of_the_host_is_not_the_fault_of_the_proxy():
    for problem, words in (
        ("the proxy answered 503", "does not reach h."),
        ("the proxy answered 403: no", "to h."),
    ):
        assert words in judge.proxy("p:3128", problem, host="h").remedy
    assert "SAMPLING_PROXY" in judge.proxy("p:3128", "the proxy answered 407", host="h").remedy


def test_a_panel_is_known_if_its_own_settings_come():
    assert judge.panel(GUID, settings(Panel_GUID=GUID)).verdict == "ok"
    assert judge.panel(GUID, settings(Panel_GUID=f"{{{GUID}}}")).verdict == "ok"
    assert judge.panel(GUID, settings(Qualified_URL="x")).verdict == "ok"
    assert judge.panel(GUID, settings()).verdict == "warn"
    assert judge.panel(GUID.upper(), settings(Panel_GUID=GUID)).verdict == "ok"
    other = judge.panel(GUID.replace("6", "7"), settings(Panel_GUID=GUID))
    assert other.verdict == "fail"
    assert GUID not in other.found + other.remedy


def test_a_key_is_accepted_only_where_settings_came_for_it():
    header, key = judge.accepted(seen(200, b"[]"), has_settings=True)
    assert (header.verdict, key.verdict, key.found) == ("ok", "ok", "it is accepted")
    header, key = judge.accepted(seen(400, b'{"ResultCode": 3}'), has_settings=False)
    assert (header.verdict, key.verdict) == ("ok", "ok")
    for status, body in ((200, b"<html>"), (400, b"<html>"), (429, b""), (405, b"")):
        header, key = judge.accepted(seen(status, body), has_settings=False)
        assert (header.verdict, key.verdict) == ("skipped", "skipped")
        assert f"after {status}" in key.found


def test_an_unknown_panel_is_named_by_its_result_code():
    assert "PANEL_DOES_NOT_EXIST" in judge.unknown_panel(seen(400, b'{"ResultCode": 3}')).found
    for body in (b"{}", b"[]", b"no json", b"[" * 200_000, b"9" * 5_000):
        assert judge.unknown_panel(seen(400, body)).found == "Get Settings was answered with 400"


def test_end_pages_should_say_which_member_comes():
    good = "https://partner.example/end?member=[pid]"
    found = judge.end_pages(settings(Qualified_URL=good, No_Surveys_URL=None, Max_Surveys_To_Fetch="0"))
    assert (found.verdict, found.found) == ("ok", "1 of 2 are set, with [pid]")
    assert judge.end_pages(settings(Qualified_URL="")).found == "none is set"
    bad = settings(Qualified_URL="https://partner.example", Terminate_URL="http://partner.example/[pid]")
    found = judge.end_pages(bad)
    assert found.verdict == "warn"
    assert found.found == "without [pid]: Qualified URL; not https: Terminate URL"
    assert "partner.example" not in found.found


def test_notification_urls_should_be_https_and_that_of_this_package():
    ours = {"Completion Notification URL": "https://partner.example/secret"}
    found = judge.notifications(settings(Completion_Notification_URL=ours["Completion Notification URL"]), ours)
    assert (found.verdict, "all to your store" in found.found) == ("ok", True)
    other = settings(Completion_Notification_URL="https://partner.example/other")
    assert judge.notifications(other, None).verdict == "ok"
    found = judge.notifications(other, ours)
    assert (found.verdict, "not the URL of your store" in found.found) == ("fail", True)
    assert "partner.example" not in found.found
    bare = settings(Terminate_Notification_URL="http://partner.example", Quota_Notifications_Enabled="True")
    found = judge.notifications(bare, None)
    assert found.verdict == "warn"
    assert "not https: Terminate Notification URL" in found.found
    assert "enabled, but not set: Quota Notification URL" in found.found
    assert judge.notifications(settings(Quota_Notifications_Enabled="perhaps"), None).verdict == "ok"


# --- What is shown ----------------------------------------------------------------------------------------

LONG = Finding("Key header", "warn", "word " * 40, "way out " * 20)


@pytest.mark.parametrize("width", [40, 59, 60, 80, 132])
def test_no_line_is_wider_than_the_terminal(width):
    shown = [line.plain for line in _doctor.lines(LONG, width)]
    assert max(map(len, shown)) <= width
    assert shown[0].startswith("warn  Key header")
    assert sum("-> " in line for line in shown) == 1


def test_a_profile_that_is_named_like_its_panel_is_not_shown():
    assert _doctor.document([LONG], GUID)["Profile"] == "<hidden>"
    assert (_doctor.document([LONG], "us")["Profile"], _doctor.document([], "")["Profile"]) == ("us", None)


def test_control_characters_of_a_service_are_not_printed():
    shown = "".join(line.plain for line in _doctor.lines(Finding("TLS", "fail", "a\x1b[31mb"), 80))
    assert "\x1b" not in shown


def test_the_last_line_counts_the_checks():
    blocked = not_made([LONG])
    assert [each.check for each in blocked] == [name for name in CHECKS if name != "Key header"]
    failed = Finding("Key", "fail", "it is refused")
    assert _doctor.closing_text([Finding("TLS", "ok", "")], 80).plain == "\nAll is in order: 1 checks."
    assert _doctor.closing_text([LONG], 80).plain == "\n0 failed, 1 to look at, 0 in order."
    assert "12 must wait until that is mended" in _doctor.closing_text([failed, *blocked], 80).plain
    assert (_doctor.worst([LONG]), _doctor.worst([LONG, failed]), _doctor.worst(blocked)) == (
        "warn",
        "fail",
        "ok",
    )
