"""What `doctor` concludes from numbers and responses, without a network."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from rich.console import Console

from sampling_async import PartnerSettings, Setting
from sampling_async._cli import _doctor
from sampling_async._cli import _doctor_findings as judge
from sampling_async._cli._doctor import CHECKS
from sampling_async._cli._doctor_findings import Finding, ProbeResponse
from sampling_async._wire.address import proxy_of

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
GUID = "6f0c2b1e-3f0a-4a52-9b87-8d5a0d7a4c11"
KEY = "0b9a4d52-7c43-4a39-8f6e-2d1f5f1c9e77"


def settings(**values):
    return PartnerSettings([Setting(name.replace("_", " "), "", value) for name, value in values.items()])


# --- The way to the service -------------------------------------------------------------------------------


def address(url):
    return judge.address(httpx.URL(url))


def test_an_address_with_a_path_of_the_interface_fails():
    found = address("https://sampling.example/IPExternalSamplingService")
    assert found.verdict == "fail"
    assert "has /IPExternalSamplingService in it, which the client adds itself" in found.found


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("IPExternalSamplingService/ExternalSample/{}/m000001/Invites", "..."),
        ("IPExternal%53amplingService/ExternalSample/{}/m000001", "..."),
        ("a/integratedpanelservice", "..."),
        ("x/{}", "..."),
        ("x/%7B{}%7D/m000001", "..."),
        ("x%20y", "x%20y"),
    ],
)
@pytest.mark.parametrize("guid", [GUID, GUID.upper(), GUID.replace("-", "")])
def test_of_an_address_with_guids_only_the_host_is_shown(path, shown, guid):
    found = address(f"http://127.0.0.1/{path.format(guid)}")
    assert found.found.split(" has ")[0] == f"http://127.0.0.1/{shown}"
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
    found = judge.urls(PartnerSettings([Setting(f"{spelling} URL", "", None)]), None)
    assert found.figures["NotSet"] == ["<hidden> URL"]


def test_half_a_key_is_not_shown():
    response = ProbeResponse(403, {"server": "x" * 30 + KEY})
    assert judge.service(response).figures["Server"] == "x" * 30 + "<hidden>"


@pytest.mark.parametrize(
    ("url", "verdict"), [("https://h", "ok"), ("http://[::1]:8000", "ok"), ("http://h.example", "warn")]
)
def test_plain_http_warns_unless_it_stays_on_this_machine(url, verdict):
    assert address(url).verdict == verdict


@pytest.mark.parametrize(
    ("certificate", "verdict", "found"),
    [
        ({"notAfter": "Feb 21 12:00:00 2027 GMT"}, "ok", "valid for 90 days, until 2027-02-21"),
        ({"notAfter": "Dec  6 12:00:00 2026 GMT"}, "warn", "valid for 13 days, until 2026-12-06"),
        ({}, "ok", "the certificate is trusted"),
    ],
)
def test_a_certificate_is_judged_by_its_end(certificate, verdict, found):
    finding = judge.tls("https", certificate, NOW)
    assert (finding.verdict, found in finding.found) == (verdict, True)
    assert bool(finding.remedy) == (verdict != "ok")


@pytest.mark.parametrize(
    ("problem", "check", "remedy"),
    [
        ("the TLS certificate was refused: Hostname mismatch, it is not valid for x", "TLS", "issued"),
        ("the TLS certificate was refused: unable to get issuer certificate", "TLS", "SAMPLING_CA_FILE"),
        ("the TLS certificate was refused: certificate has expired", "TLS", "for the operator to renew"),
        ("the TLS certificate was refused: it is not yet valid", "TLS", "clock of this machine"),
        ("the server ended TLS with the alert 'certificate expired'", "TLS", "SAMPLING_CLIENT_CERT"),
        ("the proxy answered 503; nothing was sent", "Proxy", "does not reach the host"),
        ("the proxy answered 403: no", "Proxy", "let you through"),
        ("the proxy answered 407: check the user and password", "Proxy", "SAMPLING_PROXY"),
        (
            "no connection (x: Connection refused), on the way to h; it goes through the proxy",
            "Proxy",
            "unset it",
        ),
        ("no connection (x: Connection refused), on the way to h", "Service", "Nothing listens"),
        ("the response is not valid HTTP/1.1: is the port right", "Service", "http or https"),
        ("no complete response within 5 s", "Service", "--timeout"),
        ("a time limit passed (ReadTimeout)", "Service", "--timeout"),
        ("a time limit passed (ConnectTimeout), on the way to h", "Service", "firewall"),
        ("the connection was lost", "Service", "Run this again"),
    ],
)
def test_a_failed_request_is_about_one_check(problem, check, remedy):
    found = judge.failure(problem, proxy_of("http://p:3128"))
    where = "p:3128: " if check == "Proxy" else ""
    assert (found.check, found.verdict, found.found) == (check, "fail", where + problem)
    assert remedy in found.remedy


def clock(seconds, *, took=0.0, age="0"):
    date = format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)
    return judge.clock(ProbeResponse(200, {"date": date, "age": age}, began=NOW.timestamp(), seconds=took))


@pytest.mark.parametrize(
    ("seconds", "verdict", "words"),
    [
        (0, "ok", "agrees"),
        (1, "ok", "agrees"),
        (-2, "ok", "agrees"),
        (5, "warn", "0:00:04 ahead of"),
        (-30, "warn", "0:00:29 behind"),
        (61, "fail", "0:01:00 ahead of"),
        (-420, "fail", "0:06:59 behind"),
        (86_400 * 3, "fail", "2 days, 23:59:59 ahead of"),
    ],
)
def test_clocks_may_differ_by_what_the_date_header_cannot_show(seconds, verdict, words):
    found = clock(seconds, took=0.6)
    assert (found.verdict, words in found.found) == (verdict, True)


def test_a_slow_response_is_no_wrong_clock():
    assert clock(4, took=9).verdict == "ok"


def test_without_a_date_of_now_the_clock_is_not_judged():
    assert clock(500, age="500").verdict == "skipped"
    for date in ("", "yesterday", "Mon, 99999999999999999999 Nov 2026 10:00:00 GMT"):
        assert judge.clock(ProbeResponse(200, {"date": date})).verdict == "skipped"
    assert judge.clock(ProbeResponse(200)).verdict == "skipped"


def test_the_latency_is_the_median_of_what_was_answered():
    seconds = (0.2, 9.0, 0.25)
    found = judge.latency([ProbeResponse(200, seconds=each) for each in seconds])
    assert (found.verdict, found.found) == ("ok", "250.0 ms for Get Settings, the median of 3")
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
    assert found.found.startswith("3 of 5 requests in a row were refused or lost (500, no response); 250.0 ms")


# --- The service's answers --------------------------------------------------------------------------------

DENIED = b'{"Message":"Authorization has been denied for this request."}'


def seen(status=403, body=DENIED, server="", **more):
    return ProbeResponse(status, {"server": server, "content-type": "application/json"}, body, **more)


def refused(own, none, others):
    key = judge.refused(own, none, others)
    assert (key.check, key.verdict) == ("Key", "fail")
    assert key.found.startswith("it is refused (")
    return key


@pytest.mark.parametrize("other", [seen(400, b"{}"), seen(401), seen(403, b'{"Message":"Unknown key"}')])
def test_a_key_that_changes_the_response_has_arrived(other):
    for own, others in ((other, [other, other]), (seen(), [seen(), other])):
        assert "arrives: without it" in refused(own, [seen(), seen()], others).found


def test_the_same_response_to_all_keys_cannot_be_explained_for_certain():
    for server, dropped in (
        ("nginx/1.22.1", True),
        ("gunicorn", True),
        ("Microsoft-IIS/10.0", False),
        ("", False),
    ):
        key = refused(seen(server=server), [seen(), seen()], [seen(), seen()])
        assert "the same with a wrong key and with none" in key.found
        assert key.figures == {"ProbablyDropped": dropped}
    assert "underscores_in_headers on" in refused(seen(server="nginx"), [seen()] * 2, [seen()] * 2).remedy
    assert "header_map = dangerous" in refused(seen(server="gunicorn"), [seen()] * 2, [seen()] * 2).remedy


def test_a_page_of_nginx_itself_is_about_neither_key_nor_header():
    page = seen(body=b"<html><center><h1>403 Forbidden</h1></center><hr><center>nginx</center>", server="nginx")
    key = refused(page, [page, page], [page, page])
    assert "a page of nginx itself" in key.found
    assert "addresses" in key.remedy


def test_a_number_of_the_request_in_the_body_is_no_difference():
    bodies = [b'{"Message":"no","Id":"%d-0b9a4d52-7c43"}' % n for n in range(5)]
    own, *none = (seen(body=body) for body in bodies[:3])
    assert "the same" in refused(own, none, [seen(body=body) for body in bodies[3:]]).found


def test_bodies_that_differ_by_themselves_prove_nothing():
    words = [b"alpha", b"beta", b"gamma", b"delta", b"epsilon"]
    own, *none = (seen(body=body) for body in words[:3])
    assert "the same" in refused(own, none, [seen(body=body) for body in words[3:]]).found
    assert "arrives: without it" in refused(own, none, [seen(400), seen(400)]).found  # but statuses do


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
        (seen(200, server="z" * 99), "ok", f"({'z' * 40})"),
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
        (seen(429), "Wait a while"),
        (
            ProbeResponse(302, {"location": f"https://login.example:8443/{GUID}?m=m000001"}),
            "https://login.example:8443.",
        ),
        (ProbeResponse(302, {"location": f"/{GUID}/m000001"}), "leads to."),
    ],
)
def test_who_answers_in_place_of_the_service_is_distinguished(answer, remedy):
    found = judge.service(answer)
    assert (found.verdict, remedy in found.remedy) == ("fail", True)
    assert not any(each in str(found) for each in (GUID, "m000001", "\x0b"))


def test_a_panel_is_known_if_its_own_settings_come():
    def panel(given, guid=GUID):
        return judge.panel(guid, seen(200), given)

    assert panel(settings(Panel_GUID=GUID)).verdict == "ok"
    assert panel(settings(Panel_GUID=f"{{{GUID}}}")).verdict == "ok"
    assert panel(settings(Qualified_URL="x")).verdict == "ok"
    assert panel(settings()).verdict == "warn"
    assert panel(settings(Panel_GUID=GUID), GUID.upper()).verdict == "ok"
    other = panel(settings(Panel_GUID=GUID), GUID.replace("6", "7"))
    assert other.verdict == "fail"
    assert GUID not in other.found + other.remedy


def test_a_key_is_accepted_only_where_settings_came_for_it():
    key = judge.accepted(seen(200, b"[]"), settings())
    assert (key.verdict, key.found) == ("ok", "it is accepted")
    assert judge.accepted(seen(400, b'{"ResultCode": 3}'), None).verdict == "ok"
    for status in (200, 405):
        key = judge.accepted(seen(status, b"<html>"), None)
        assert key.verdict == "skipped"
        assert f"after {status}" in key.found


def test_an_unknown_panel_is_named_by_its_result_code():
    assert "PANEL_DOES_NOT_EXIST" in judge.panel(GUID, seen(400, b'{"ResultCode": 3}'), None).found
    for body in (b"{}", b"[]", b"no json", b"[" * 200_000, b"9" * 5_000):
        assert judge.panel(GUID, seen(400, body), None).found.startswith("Get Settings was answered with 400")


def test_end_pages_should_say_which_member_comes():
    good = "https://partner.example/end?member=[pid]"
    found = judge.urls(settings(Qualified_URL=good, No_Surveys_URL=None, Max_Surveys_To_Fetch="0"), None)
    assert (found.verdict, found.found) == ("ok", "1 of 2 URLs are set")
    bad = settings(Qualified_URL="https://partner.example", Terminate_URL="http://partner.example/[pid]")
    found = judge.urls(bad, None)
    assert found.verdict == "warn"
    assert "without [pid], so your page cannot know the member: Qualified URL;" in found.found
    assert found.found.endswith("; not https: Terminate URL")
    assert "partner.example" not in found.found


def test_notification_urls_should_be_https_and_that_of_this_package():
    ours = {"Completion Notification URL": "https://partner.example/secret"}
    found = judge.urls(settings(Completion_Notification_URL=ours["Completion Notification URL"]), ours)
    assert (found.verdict, "notifications go to your store" in found.found) == ("ok", True)
    other = settings(Completion_Notification_URL="https://partner.example/other")
    assert judge.urls(other, None).verdict == "ok"
    found = judge.urls(other, ours)
    assert (found.verdict, "not the URL of your store" in found.found) == ("fail", True)
    assert "partner.example" not in found.found
    bare = settings(Terminate_Notification_URL="http://partner.example", Quota_Notifications_Enabled="True")
    found = judge.urls(bare, None)
    assert found.verdict == "warn"
    assert "not https: Terminate Notification URL" in found.found
    assert "enabled, but not set: Quota Notification URL" in found.found
    assert judge.urls(settings(Quota_Notifications_Enabled="perhaps"), None).verdict == "ok"


# --- What is shown ----------------------------------------------------------------------------------------

LONG = Finding("Settings", "warn", "word " * 40, "way out " * 20)


def screen_of(finding, width):
    console = Console(width=width)
    with console.capture() as shown:
        console.print(_doctor.row(finding))
    return shown.get().splitlines()


@pytest.mark.parametrize("width", [40, 59, 80, 132])
def test_no_line_is_wider_than_the_terminal(width):
    shown = screen_of(LONG, width)
    assert max(map(len, shown)) <= width
    assert shown[0].startswith("warn  Settings")
    assert sum("-> " in line for line in shown) == 1


def test_a_profile_that_is_named_like_its_panel_is_not_shown():
    assert _doctor.document([LONG], GUID)["Profile"] == "<hidden>"
    assert _doctor.document([LONG], "us")["Profile"] == "us"


def test_control_characters_of_a_service_are_not_printed():
    assert "\x1b" not in "".join(screen_of(Finding("TLS", "fail", "a\x1b[31mb"), 80))


def test_a_check_that_was_not_made_is_skipped_in_the_document():
    checks = _doctor.document([Finding("Address", "ok", ""), Finding("DNS", "fail", "")], "")["Checks"]
    assert [each["Check"] for each in checks] == list(CHECKS)
    assert {each["Verdict"] for each in checks[2:]} == {"skipped"}
    assert checks[2]["Found"] == "not before DNS is mended"


def test_the_last_line_counts_the_checks():
    failed, fine = Finding("Key", "fail", "it is refused"), Finding("TLS", "ok", "")
    assert _doctor.closing_text([LONG] * 10).plain == "0 failed, 10 to look at, 0 in order."
    shown = _doctor.closing_text([fine, failed]).plain
    assert shown == "1 failed, 0 to look at, 1 in order; 8 must wait until that is mended."
    assert [_doctor.worst(each) for each in ([LONG, fine], [LONG, failed], [fine], [])] == [
        "warn",
        "fail",
        "ok",
        "ok",
    ]
