"""What `doctor` concludes from numbers and responses, without a network."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from sampling_async import PartnerSettings, Setting
from sampling_async._cli import _doctor
from sampling_async._cli import _doctor_findings as way
from sampling_async._cli import _doctor_service as service
from sampling_async._cli._connection import ServiceOptions, Validity
from sampling_async._cli._doctor_findings import Finding, Wave
from sampling_async._cli._doctor_probes import crowd as crowd_of
from sampling_async._cli._doctor_probes import widths
from sampling_async._cli._doctor_rounds import CHECKS, skipped_beside, worst
from sampling_async._cli._doctor_service import Seen
from sampling_async._wire.address import Secret

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
GUID = "6f0c2b1e-3f0a-4a52-9b87-8d5a0d7a4c11"
KEY = "0b9a4d52-7c43-4a39-8f6e-2d1f5f1c9e77"


def valid(days, *, since=-30):
    return Validity(NOW + timedelta(days=since), NOW + timedelta(days=days))


def settings(**values):
    return PartnerSettings([Setting(name.replace("_", " "), "", value) for name, value in values.items()])


# --- The way to the service -------------------------------------------------------------------------------


def test_an_address_with_a_path_of_the_interface_fails():
    found = way.address("https://sampling.example/IPExternalSamplingService", is_http=False, is_loopback=False)
    assert found.verdict == "fail"
    assert "which the client adds itself" in found.found


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("IPExternalSamplingService/ExternalSample/{}/m000001/Invites", "IPExternalSamplingService/..."),
        ("IPExternal%53amplingService/ExternalSample/{}/m000001", "IPExternalSamplingService/..."),
        ("a/integratedpanelservice", "a/integratedpanelservice"),
        ("{}/IPExternalSamplingService", "<hidden>/...IPExternalSamplingService"),
        ("x/{}", "x/<hidden>"),
        ("x/%7B{}%7D/m000001", "x/{{<hidden>/..."),
        ("x%20y", "x%20y"),
    ],
)
@pytest.mark.parametrize("guid", [GUID, GUID.upper(), GUID.replace("-", "")])
def test_an_address_is_shown_without_guids_and_what_comes_after_them(path, shown, guid):
    found = way.address(f"http://h/{path.format(guid)}", is_http=True, is_loopback=True)
    assert found.found.split(" has ")[0] == f"http://h/{shown.format()}"
    assert "m000001" not in str(found)


@pytest.mark.parametrize(
    "spelling",
    [
        *(KEY, KEY.upper(), KEY.replace("-", ""), KEY.replace("-", "_"), " ".join(KEY.replace("-", ""))),
        *(KEY.replace("-", "%2D"), KEY.replace("-", " - ")),
    ],
)
def test_the_key_and_the_panel_are_hidden_in_all_texts_of_a_finding(spelling):
    hidden = way.hiding(Secret(KEY), Secret(GUID), None, Secret("panel"))
    figures = {"Seen": [spelling, 1], "Of": {spelling: GUID}, "No": None}
    found = hidden(Finding("Panel", "ok", f"a panel ({spelling})", f"{GUID}.", figures))
    assert (found.found, found.remedy) == ("a panel (<hidden>)", "<hidden>.")
    assert found.figures == {"Seen": ["<hidden>", 1], "Of": {"<hidden>": "<hidden>"}, "No": None}
    assert way.hiding(None)(found) == found


@pytest.mark.parametrize(
    ("is_http", "is_loopback", "verdict"), [(False, False, "ok"), (True, True, "ok"), (True, False, "warn")]
)
def test_plain_http_warns_unless_it_stays_on_this_machine(is_http, is_loopback, verdict):
    assert way.address("x://host", is_http=is_http, is_loopback=is_loopback).verdict == verdict


def test_addresses_are_shown_up_to_four():
    assert way.names("host", ["::1", "127.0.0.1"]).found == "::1, 127.0.0.1"
    assert way.names("host", list("abcdef")).found == "a, b, c, d and 2 more"
    assert way.names("host", [], "Name or service not known").verdict == "fail"


@pytest.mark.parametrize(
    ("validity", "refusal", "verdict", "words"),
    [
        (valid(90), "", "ok", "valid for 90 days, until 2027-02-21"),
        (valid(13), "", "warn", "valid for 13 days"),
        (valid(0.5), "", "warn", "valid for 12 hours"),
        (valid(-3), "certificate has expired", "fail", "expired 3 days ago, on 2026-11-20"),
        (valid(-1), "", "fail", "expired 1 day ago"),
        (valid(90, since=2), "not yet valid", "fail", "valid from 2026-11-25 only"),
        (valid(90), "self-signed certificate", "fail", "refused: self-signed certificate"),
        (None, "self-signed certificate", "fail", "refused: self-signed certificate"),
        (None, "", "ok", "is trusted; its dates could not be read"),
    ],
)
def test_a_certificate_is_judged_by_its_dates_and_by_what_openssl_says(validity, refusal, verdict, words):
    found = way.certificate("TLS", validity, NOW, refusal=refusal)
    assert (found.verdict, words in found.found) == (verdict, True)
    assert bool(found.remedy) == (verdict != "ok")


def test_the_remedy_of_a_refused_certificate_fits_its_reason():
    wrong_host = way.certificate(
        "TLS", valid(9), NOW, refusal="Hostname mismatch, certificate is not valid for"
    )
    assert "host for which the certificate was issued" in wrong_host.remedy
    private = way.certificate("TLS", valid(9), NOW, refusal="unable to get local issuer certificate")
    assert "SAMPLING_CA_FILE" in private.remedy
    ours = way.certificate("Client cert", valid(5), NOW, whose="you")
    assert ours.remedy == "It is for you to renew it soon."


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
    found = way.clock(date(seconds), None, began, began + 0.6)
    assert (found.verdict, words in found.found) == (verdict, True)


def test_a_slow_response_is_no_wrong_clock():
    assert way.clock(date(4), None, NOW.timestamp(), NOW.timestamp() + 9).verdict == "ok"


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
    assert way.clock(said, age, NOW.timestamp(), NOW.timestamp()).verdict == "skipped"
    assert way.clock(date(0), "0", NOW.timestamp(), NOW.timestamp()).verdict == "ok"


@pytest.mark.parametrize(
    ("closed_after", "verdict", "words"),
    [
        (None, "ok", "still open after 6 s"),
        (0.0, "warn", "closes each connection after its response"),
        (2.0, "warn", "after 2.0 s; the client keeps it for 4 s"),
        (5.0, "ok", "after 5.0 s; the client keeps it for 4 s"),
    ],
)
def test_the_idle_time_is_compared_with_the_clients(closed_after, verdict, words):
    found = way.keep_alive(closed_after, 6, 4.0)
    assert (found.verdict, words in found.found) == (verdict, True)
    if closed_after == 2.0:
        assert "idle_seconds=1.6" in found.remedy


def test_the_latency_is_the_median_and_the_line_per_id_is_not_made_up():
    found = way.latency([0.2, 9.0, 0.25])
    assert found.found.startswith("250 ms")
    assert "seconds_per_id" in found.found
    assert found.figures == {"MedianSeconds": 0.25, "Requests": 3}
    assert way.latency([0.0123]).found.startswith("12.3 ms")
    assert way.latency([]).verdict == "warn"
    found = way.latency([0.2, 0.3], [500, 0, 500])
    assert found.verdict == "warn"
    assert found.found.startswith("3 of 5 requests in a row were refused or lost (500, no response); 250 ms")


def test_the_width_is_the_widest_wave_without_a_refusal():
    waves = [Wave(1, [0.1], []), Wave(2, [0.1, 0.1], []), Wave(4, [0.1], [429, 429, 503])]
    found = way.width(waves)
    assert found.verdict == "warn"
    assert found.found == "of 4 at the same time, the service refused 3 (429 and 503); 2 were taken"
    assert "--max-concurrency 2" in found.remedy
    assert found.figures["Taken"] == 2
    assert "no response" in way.width([Wave(1, [], [0])]).found


def test_a_service_that_lets_requests_wait_is_told():
    alone = Wave(1, [0.1], [])
    assert way.width([alone, Wave(2, [0.1, 0.11], [])]).found == "2 at the same time were all answered"
    assert "in 400 ms each and not 100 ms" in way.width([alone, Wave(2, [0.4, 0.4], [])]).found
    quick = [Wave(1, [0.001], []), Wave(8, [0.01] * 8, [])]
    assert "wait" not in way.width(quick).found  # the machine's own load


def test_waves_double_up_to_the_limit():
    assert widths(1) == [1]
    assert widths(8) == [1, 2, 4, 8]
    assert widths(12) == [1, 2, 4, 8, 12]


def test_a_proxy_that_other_programs_use_is_named():
    assert way.no_proxy("").verdict == "skipped"
    assert "HTTPS_PROXY is set" in way.no_proxy("HTTPS_PROXY").found
    assert "CONNECT" in way.proxy("proxy:3128", "").found
    assert "takes connections" in way.proxy("proxy:3128", "", is_tunnel=False).found


# --- The service's answers --------------------------------------------------------------------------------

DENIED = b'{"Message":"Authorization has been denied for this request."}'


def seen(status=403, body=DENIED, server="", **more):
    return Seen(status, {"server": server, "content-type": "application/json"}, body, **more)


def refused(own, none, others):
    header, key = service.refused(own, none, others)
    assert (key.check, key.verdict) == ("Key", "fail")
    assert header.check == "Key header"
    return header


@pytest.mark.parametrize("other", [seen(400, b"{}"), seen(401), seen(403, b'{"Message":"Unknown key"}')])
def test_a_key_that_changes_the_response_has_arrived(other):
    for own, others in ((other, [other, other]), (seen(), [seen(), other])):
        assert refused(own, [seen(), seen()], others).verdict == "ok"


def test_the_same_response_to_all_keys_cannot_be_told_for_certain():
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
    gone = Seen(problem="no connection")
    assert "not all requests" in refused(seen(), [seen(), gone], [seen(), seen()]).found


@pytest.mark.parametrize(
    ("hyphens", "underscores", "is_proof"),
    [
        (400, 403, True),
        (431, 403, True),
        (400, 400, False),
        (403, 403, False),
        (0, 403, False),
        (400, 0, False),
    ],
)
def test_a_header_is_dropped_for_certain_if_a_crowd_with_underscores_vanishes(hyphens, underscores, is_proof):
    before = service.refused(seen(), [seen(), seen()], [seen(), seen()])
    found = service.dropped(before, seen(), seen(hyphens), seen(underscores))
    assert (found is before) != is_proof
    if is_proof:
        assert [(each.check, each.verdict) for each in found] == [("Key header", "fail"), ("Key", "skipped")]


def test_a_crowd_is_more_than_servers_take_and_less_than_nginx_takes():
    crowd = crowd_of("_")
    size = sum(len(f"{name}: {value}\r\n") for name, value in crowd.items())
    assert len(crowd) > 100
    assert 16 * 1024 < size < 32 * 1024
    assert all(name.startswith("API_AUTH_KEY_") for name in crowd)
    assert not any("_" in name for name in crowd_of("-"))


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
        (Seen(problem="the connection was lost"), "fail", "the connection was lost"),
        (seen(200, server="a\x1b[31mb" + "z" * 99), "ok", "(a[31mb" + "z" * 34 + ")"),
    ],
)
def test_a_service_answers_or_it_does_not(answer, verdict, words):
    found = service.service(answer)
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
            Seen(302, {"location": f"https://login.example:8443/{GUID}?m=m000001"}),
            "https://login.example:8443.",
        ),
        (Seen(302, {"location": f"/{GUID}/m000001"}), "leads to."),
        (Seen(403, {"x-squid-error": "ERR_ACCESS_DENIED 0"}), "whoever runs the proxy to let you through"),
        (Seen(503, {"x-squid-error": "ERR_DNS_FAIL -2"}), "does not reach the host"),
        (Seen(503, {"x-squid-error": "\x0b"}), "does not reach the host"),
        (Seen(problem="the response is not valid HTTP/1.1: x"), "http or https"),
        (Seen(problem="the proxy answered 407"), "SAMPLING_PROXY"),
        (Seen(problem="the connection was lost"), "Run this again"),
    ],
)
def test_who_answers_in_place_of_the_service_is_told_apart(answer, remedy):
    found = service.service(answer)
    assert (found.verdict, remedy in found.remedy) == ("fail", True)
    assert not any(each in str(found) for each in (GUID, "m000001", "\x0b"))


def test_what_a_proxy_says_of_the_host_is_not_the_fault_of_the_proxy():
    for problem, words in (
        ("the proxy answered 503", "does not reach h."),
        ("the proxy answered 403: no", "to h."),
    ):
        assert words in way.proxy("p:3128", problem, host="h").remedy
    assert "SAMPLING_PROXY" in way.proxy("p:3128", "the proxy answered 407", host="h").remedy


def test_the_same_response_to_all_keys_may_be_that_of_a_proxy():
    header, _ = service.refused(seen(server="squid"), [seen()] * 2, [seen()] * 2, is_proxied=True)
    assert "may be that of your proxy" in header.found
    header, _ = service.refused(seen(), [seen(401)] * 2, [seen()] * 2, is_proxied=True)
    assert header.verdict == "ok"


def test_a_panel_is_known_if_its_own_settings_come():
    assert service.panel(GUID, settings(Panel_GUID=GUID)).verdict == "ok"
    assert service.panel(GUID, settings(Panel_GUID=f"{{{GUID}}}")).verdict == "ok"
    assert service.panel(GUID, settings(Qualified_URL="x")).verdict == "ok"
    assert service.panel(GUID, settings()).verdict == "warn"
    other_case = service.panel(GUID.upper(), settings(Panel_GUID=GUID))
    assert other_case.verdict == "warn"
    assert "capital letters" in other_case.found
    other = service.panel(GUID.replace("6", "7"), settings(Panel_GUID=GUID))
    assert other.verdict == "fail"
    assert all(GUID not in each.found + each.remedy for each in (other_case, other))


def test_a_key_is_accepted_only_where_settings_came_for_it():
    header, key = service.accepted(seen(200, b"[]"), has_settings=True)
    assert (header.verdict, key.verdict, key.found) == ("ok", "ok", "it is accepted")
    header, key = service.accepted(seen(400, b'{"ResultCode": 3}'), has_settings=False)
    assert (header.verdict, key.verdict) == ("ok", "ok")
    for status, body in ((200, b"<html>"), (400, b"<html>"), (429, b""), (405, b"")):
        header, key = service.accepted(seen(status, body), has_settings=False)
        assert (header.verdict, key.verdict) == ("skipped", "skipped")
        assert f"an answer with {status}" in key.found


def test_without_a_server_header_neither_key_nor_header_is_blamed():
    same = seen(403, DENIED)
    header = refused(same, [same, same], [same, same])
    assert "either the key or its header is the reason" in header.found


def test_an_unknown_panel_is_told_by_its_result_code():
    assert "PANEL_DOES_NOT_EXIST" in service.unknown_panel(seen(400, b'{"ResultCode": 3}')).found
    for body in (b"{}", b"[]", b"no json", b"[" * 200_000, b"9" * 5_000):
        assert service.unknown_panel(seen(400, body)).found == "Get Settings was answered with 400"


def test_end_pages_should_say_which_member_comes():
    good = "https://partner.example/end?member=[pid]"
    found = service.end_pages(settings(Qualified_URL=good, No_Surveys_URL=None, Max_Surveys_To_Fetch="0"))
    assert (found.verdict, found.found) == ("ok", "1 of 2 are set, with [pid]")
    assert service.end_pages(settings(Qualified_URL="")).found == "none is set"
    bad = settings(Qualified_URL="https://partner.example", Terminate_URL="http://partner.example/[pid]")
    found = service.end_pages(bad)
    assert found.verdict == "warn"
    assert found.found == "without [pid]: Qualified URL; not https: Terminate URL"
    assert "partner.example" not in found.found


def test_notification_urls_should_be_https_and_ours():
    ours = {"Completion Notification URL": "https://partner.example/secret"}
    found = service.notifications(
        settings(Completion_Notification_URL=ours["Completion Notification URL"]), ours
    )
    assert (found.verdict, "all to your store" in found.found) == ("ok", True)
    other = settings(Completion_Notification_URL="https://partner.example/other")
    assert service.notifications(other, None).verdict == "ok"
    found = service.notifications(other, ours)
    assert (found.verdict, "not the URL of your store" in found.found) == ("fail", True)
    assert "partner.example" not in found.found
    bare = settings(Terminate_Notification_URL="http://partner.example", Quota_Notifications_Enabled="True")
    found = service.notifications(bare, None)
    assert found.verdict == "warn"
    assert "not https: Terminate Notification URL" in found.found
    assert "Quota Notification URL is not set" in found.found
    assert service.notifications(settings(Quota_Notifications_Enabled="perhaps"), None).verdict == "ok"


def test_a_receiver_that_knows_its_secrets_takes_no_head():
    assert service.reached({"A": 405, "B": 403}).verdict == "ok"
    found = service.reached({"A": 404, "B": 0, "C": 200, "D": 405})
    assert found.verdict == "warn"
    assert found.found == "no response: B; the secret is not known there: A; something else answers: C"


# --- What is examined -------------------------------------------------------------------------------------


def test_the_width_is_that_of_the_client_and_at_most_32():
    options = _doctor.DoctorOptions()
    assert options.wishes(ServiceOptions(), None).most == 8
    assert options.wishes(ServiceOptions(max_concurrency=12), None).most == 12
    assert options.wishes(ServiceOptions(max_concurrency=500), None).most == 32


def test_a_thorough_examination_watches_an_idle_connection_for_longer():
    assert _doctor.DoctorOptions().wishes(ServiceOptions(), None).idle_limit == 6
    assert _doctor.DoctorOptions(thorough=True).wishes(ServiceOptions(), None).idle_limit == 90


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
    blocked = skipped_beside([LONG], "Key")
    assert [each.check for each in blocked] == [name for name in CHECKS if name != "Key header"]
    failed = Finding("Key", "fail", "it is refused")
    assert _doctor.closing([Finding("TLS", "ok", "")], 80).plain == "\nAll is in order: 1 checks."
    assert _doctor.closing([LONG], 80).plain == "\n0 failed, 1 to look at, 0 in order."
    assert "15 must wait until that is mended" in _doctor.closing([failed, *blocked], 80).plain
    assert (worst([LONG]), worst([LONG, failed]), worst(blocked)) == ("warn", "fail", "ok")
