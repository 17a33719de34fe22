"""`sampling-async doctor` against services on real sockets, whole ones and broken ones."""

from __future__ import annotations

import json
import ssl
import time
from contextlib import suppress

import broken_services
import httpx
import pytest
import trustme
import wire
from cli_kit import KEY_NAMES, on_terminal, run
from forward_proxy import ForwardProxy

from sampling_async.notifications import Inbox, kept_secrets
from sampling_async.simulator import Fault, Simulator

WRONG_KEY = broken_services.WRONG_KEY
CHECKS = ["Address", "DNS", "Proxy", "TLS", "Service", "Clock", "Key", "Panel", "Settings", "Latency"]


@pytest.fixture(autouse=True)
def no_other_way(monkeypatch):
    """Take variables of the machine away."""
    for name in (*KEY_NAMES, "SAMPLING_PROXY", "SAMPLING_CA_FILE", "SAMPLING_CLIENT_CERT", "SAMPLING_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def examined(environment, monkeypatch, *options):
    """Run the command; return its exit code, its document, and the checks by name."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run("doctor", *options)
    document = json.loads(result.stdout)
    checks = {each["Check"]: each for each in document["Checks"]}
    assert list(checks) == CHECKS
    for secret in (environment["SAMPLING_API_KEY"], environment["SAMPLING_PANEL_GUID"]):
        assert len(secret) != len(WRONG_KEY) or secret.lower() not in result.output.lower()
    return result.exit_code, document, checks


def failed(checks):
    return [name for name, each in checks.items() if each["Verdict"] == "fail"]


def test_a_service_in_order_is_in_order_and_no_invite_is_requested(monkeypatch):
    simulator = Simulator(seed=3)
    with simulator.serve() as base_url:
        code, document, checks = examined(broken_services.environment(simulator, base_url), monkeypatch)
    assert (code, document["Verdict"], failed(checks)) == (0, "ok", [])
    assert checks["Latency"]["Figures"]["Requests"] == 5
    requests = simulator.ledger.requests()
    assert {each.endpoint for each in requests} == {"get_settings"}
    assert len(requests) == 1 + 5
    assert not simulator.ledger.invites


@pytest.mark.parametrize(
    ("title", "broken"),
    [
        ("nginx drops the header", "Key"),
        ("the certificate has expired", "TLS"),
        ("a clock is wrong", "Clock"),
        ("the key is wrong", "Key"),
        ("the proxy is dead", "Proxy"),
    ],
)
def test_a_broken_service_fails_in_what_is_broken_and_in_nothing_else(title, broken, monkeypatch):
    with broken_services.BROKEN[title]() as environment:
        code, document, checks = examined(environment, monkeypatch)
    assert (code, document["Verdict"], failed(checks)) == (1, "fail", [broken])
    assert not [name for name, each in checks.items() if each["Verdict"] == "warn"]
    assert checks[broken]["Remedy"]
    if broken == "Key":
        assert checks["Key"]["Figures"] == {"ProbablyDropped": title == "nginx drops the header"}
    if title == "the certificate has expired":
        assert "certificate has expired" in checks["TLS"]["Found"]
        assert "operator to renew" in checks["TLS"]["Remedy"]
    if title == "a clock is wrong":
        assert 417 < checks["Clock"]["Figures"]["SecondsAhead"] < 421


def test_a_key_that_is_refused_otherwise_than_none_is_wrong_for_certain(monkeypatch):
    simulator = Simulator(seed=3)

    def respond(request: bytes) -> bytes:
        is_keyed = b"API_AUTH_KEY:" in request
        return wire.answer(b'{"Message":"%b"}' % (b"unknown key" if is_keyed else b"no key"), "403 Forbidden")

    with wire.serve(wire.serve_each(respond)) as base_url:
        _, _, checks = examined(broken_services.environment(simulator, base_url), monkeypatch)
    assert failed(checks) == ["Key"]
    assert "API_AUTH_KEY arrives" in checks["Key"]["Found"]


def test_an_unknown_panel_fails(monkeypatch):
    with broken_services.in_order() as environment:
        wrong = {**environment, "SAMPLING_PANEL_GUID": WRONG_KEY}
        _, _, checks = examined(wrong, monkeypatch)
    assert failed(checks) == ["Panel"]
    assert "PANEL_DOES_NOT_EXIST" in checks["Panel"]["Found"]
    assert checks["Key"]["Verdict"] == "ok"


def test_a_node_that_is_ill_is_a_warning_about_the_latency(monkeypatch):
    simulator = Simulator(seed=3)
    simulator.faults.add(Fault.status(503).on("get_settings", every=3))
    with simulator.serve() as base_url:
        code, document, checks = examined(broken_services.environment(simulator, base_url), monkeypatch)
    assert (code, document["Verdict"]) == (0, "warn")
    assert checks["Latency"]["Found"].startswith("2 of 5 requests in a row were refused or lost (503)")
    assert checks["Latency"]["Figures"]["Requests"] == 3


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("SAMPLING_BASE_URL", "http://service.example", "Address"),
        ("SAMPLING_BASE_URL", "service.example", "Address"),
        ("SAMPLING_PANEL_GUID", "panel", "Panel"),
        ("SAMPLING_API_KEY", "sesame-open", "Key"),
        ("SAMPLING_PROXY", "socks5://agent:sesame-open@proxy.example", "Proxy"),
        ("SAMPLING_CA_FILE", "missing.pem", "TLS"),
    ],
)
def test_what_the_client_would_refuse_is_found_before_anything_is_sent(name, value, check, monkeypatch):
    simulator = Simulator(seed=3)
    with simulator.serve() as base_url:
        environment = {**broken_services.environment(simulator, base_url), name: value}
        code, _, checks = examined(environment, monkeypatch)
    assert (code, failed(checks)) == (1, [check])
    assert "sesame" not in str(checks)
    assert len(simulator.ledger.requests()) == 0


def test_a_missing_key_is_found_after_the_way_was_checked(monkeypatch):
    with broken_services.in_order() as environment:
        _, _, checks = examined({**environment, "SAMPLING_API_KEY": ""}, monkeypatch)
    assert failed(checks) == ["Key"]
    assert checks["Clock"]["Verdict"] == "ok"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("path", ["/IPExternalSamplingService/ExternalSample/{}/m000001/Invites", "/x/{}"])
def test_no_form_of_the_output_shows_what_the_address_holds_or_the_service_echoes(
    is_terminal, path, monkeypatch
):
    if is_terminal:
        on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    simulator = Simulator(seed=3)
    key, guid = simulator.api_key, simulator.panel_guid
    echo = f"Server: nginx {key.upper()}"
    names = json.dumps([{"Name": f"{each} URL", "Description": "", "Value": "x"} for each in (key, guid)])
    with wire.serve(wire.serve_each(lambda _: wire.answer(names.encode(), "200 OK", echo))) as base_url:
        for address in (base_url, base_url + path.format(guid)):
            for name, value in broken_services.environment(simulator, address).items():
                monkeypatch.setenv(name, value)
            text = run("doctor").output.lower()
            assert address != base_url or "<hidden>" in text
            for private in (key[:18], key.replace("-", ""), guid[:18], "m000001"):
                assert private.lower() not in text


@pytest.mark.parametrize("seconds", ["nan", "-1", "0"])
def test_a_timeout_that_is_no_time_is_a_usage_error(seconds, monkeypatch):
    for name, value in broken_services.environment(Simulator(seed=3), "http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    assert run("doctor", "--timeout", seconds).exit_code == run("settings", "--timeout", seconds).exit_code == 2


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_a_timeout_without_an_end_is_taken(seconds, monkeypatch):
    with broken_services.in_order() as environment:
        code, _, _ = examined(environment, monkeypatch, "--timeout", seconds)
    assert code == 0


def test_quiet_writes_nothing_into_a_pipe_if_all_is_in_order(monkeypatch):
    with broken_services.in_order() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        quiet, asked = run("doctor", "--quiet"), run("doctor", "--quiet", "--json")
        monkeypatch.setenv("HTTP_PROXY", "http://proxy.example")
        warned = run("doctor", "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert json.loads(asked.stdout)["Verdict"] == "ok"
    assert json.loads(warned.stdout)["Verdict"] == "warn"


def test_a_missing_address_is_a_usage_error():
    result = run("doctor")
    assert result.exit_code == 2
    assert "SAMPLING_BASE_URL" in result.stderr


# --- TLS and proxies --------------------------------------------------------------------------------------


def served_by_tls(tmp_path, *, for_host="localhost"):
    """Return the options of a server, and write the files of both sides."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(f"{tmp_path}/authority.pem")
    authority.issue_cert(for_host).private_key_and_cert_chain_pem.write_to_path(f"{tmp_path}/server.pem")
    authority.issue_cert("me@example.org").private_key_and_cert_chain_pem.write_to_path(f"{tmp_path}/mine.pem")
    return {"ssl_certfile": f"{tmp_path}/server.pem", "ssl_keyfile": f"{tmp_path}/server.pem"}


def test_tls_with_a_client_certificate_is_examined(tmp_path, monkeypatch):
    files = served_by_tls(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=f"{tmp_path}/authority.pem")
    context.load_cert_chain(files["ssl_certfile"])
    context.verify_mode = ssl.CERT_REQUIRED
    with wire.serve(wire.serve_each(lambda _: wire.answer(SETTINGS)), context) as base_url:
        more = {"SAMPLING_CA_FILE": f"{tmp_path}/authority.pem"}
        environment = broken_services.environment(Simulator(seed=3), base_url, **more)
        _, _, without = examined(environment, monkeypatch)
        environment["SAMPLING_CLIENT_CERT"] = f"{tmp_path}/mine.pem"
        code, _, checks = examined(environment, monkeypatch)
    assert failed(without) == ["TLS"]
    assert "SAMPLING_CLIENT_CERT" in without["TLS"]["Remedy"]
    assert (code, failed(checks)) == (0, [])
    assert checks["TLS"]["Figures"]["Days"] > 300


@pytest.mark.parametrize(
    ("host", "trusted", "words"),
    [("localhost", False, "certificate was refused: "), ("other.example", True, "refused: Hostname mismatch")],
)
def test_a_certificate_that_is_not_trusted_fails(tmp_path, monkeypatch, host, trusted, words):
    simulator = Simulator(seed=3)
    with broken_services.served(simulator.app, **served_by_tls(tmp_path, for_host=host)) as port:
        files = {"SAMPLING_CA_FILE": f"{tmp_path}/authority.pem"} if trusted else {}
        environment = broken_services.environment(simulator, f"https://localhost:{port}", **files)
        _, _, checks = examined(environment, monkeypatch)
    assert failed(checks) == ["TLS"]
    assert words in checks["TLS"]["Found"]
    assert len(simulator.ledger.requests()) == 0


def test_a_port_that_speaks_no_tls_fails(monkeypatch):
    with broken_services.in_order() as environment:
        base_url = environment["SAMPLING_BASE_URL"].replace("http://127.0.0.1", "https://localhost")
        _, _, checks = examined({**environment, "SAMPLING_BASE_URL": base_url}, monkeypatch)
    assert failed(checks) == ["TLS"]
    assert "_ssl.c" not in checks["TLS"]["Found"]


def test_authorities_that_cannot_be_read_are_named(monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "missing.pem")
    with broken_services.in_order() as environment:
        base_url = environment["SAMPLING_BASE_URL"].replace("http://127.0.0.1", "https://localhost")
        _, _, checks = examined({**environment, "SAMPLING_BASE_URL": base_url}, monkeypatch)
    assert failed(checks) == ["TLS"]
    assert "SSL_CERT_FILE names missing.pem" in checks["TLS"]["Found"]


def test_a_host_without_an_address_fails(monkeypatch):
    environment = broken_services.environment(Simulator(seed=3), "https://sampling.invalid")
    _, _, checks = examined(environment, monkeypatch)
    assert failed(checks) == ["DNS"]


def test_a_proxy_is_examined_by_a_tunnel(tmp_path, monkeypatch):
    simulator = Simulator(seed=3)
    with (
        broken_services.served(simulator.app, **served_by_tls(tmp_path)) as port,
        ForwardProxy(credentials="agent:sesame") as proxy,
    ):
        more = {"SAMPLING_CA_FILE": f"{tmp_path}/authority.pem", "SAMPLING_PROXY": proxy.url}
        environment = broken_services.environment(simulator, f"https://localhost:{port}", **more)
        code, _, checks = examined(environment, monkeypatch)
        wrong = {**environment, "SAMPLING_PROXY": proxy.url.replace("sesame", "hunter2")}
        _, _, refused = examined(wrong, monkeypatch)
    assert (code, failed(checks)) == (0, [])
    assert "opens a tunnel (CONNECT)" in checks["Proxy"]["Found"]
    assert checks["DNS"]["Found"] == "the proxy looks the host up"
    assert failed(refused) == ["Proxy"]
    assert "the proxy answered 407: check the user and password" in refused["Proxy"]["Found"]
    assert "hunter2" not in str(refused) + str(checks)


def test_a_proxy_that_fetches_http_is_examined_by_a_connection(monkeypatch):
    with broken_services.in_order() as environment, ForwardProxy() as proxy:
        _, _, checks = examined({**environment, "SAMPLING_PROXY": proxy.url}, monkeypatch)
    assert "takes connections" in checks["Proxy"]["Found"]
    assert failed(checks) == []


def test_a_proxy_of_other_programs_is_named(monkeypatch):
    with broken_services.in_order() as environment:
        code, _, checks = examined({**environment, "HTTP_PROXY": "http://a:sesame@proxy"}, monkeypatch)
    assert (code, checks["Proxy"]["Verdict"]) == (0, "warn")
    assert "HTTP_PROXY is set" in checks["Proxy"]["Found"]


# --- Odd services -----------------------------------------------------------------------------------------

SETTINGS = b'[{"Name":"Qualified URL","Description":"","Value":"https://partner.example/[pid]"}]'


def test_a_service_that_is_silent_or_no_http_fails(monkeypatch):
    with wire.serve(lambda connection: connection.send(b"220 mail ready\r\n")) as base_url:
        _, _, checks = examined(broken_services.environment(Simulator(seed=3), base_url), monkeypatch)
    assert failed(checks) == ["Service"]
    with wire.serve(wire.Silent()) as base_url:
        environment = broken_services.environment(Simulator(seed=3), base_url)
        _, _, checks = examined(environment, monkeypatch, "--timeout", "0.01")
    assert failed(checks) == ["Service"]
    assert checks["Service"]["Found"] == "a time limit passed (ReadTimeout)"
    assert checks["Service"]["Remedy"].startswith("Allow more time with --timeout")


def test_settings_that_cannot_be_read_fail(monkeypatch):
    with wire.serve(wire.serve_each(lambda _: wire.answer(b"<html>"))) as base_url:
        _, _, checks = examined(broken_services.environment(Simulator(seed=3), base_url), monkeypatch)
    assert failed(checks) == ["Panel"]
    assert checks["Key"]["Verdict"] == "skipped"
    assert checks["Panel"]["Found"] == "Get Settings was answered with 200, and not with settings"


@pytest.mark.parametrize(("status", "fails"), [("200 OK", "Panel"), ("400 Bad Request", "Service")])
@pytest.mark.parametrize(
    "date", ["Mon, 99999999999999999999 Nov 2026 10:00:00 GMT", "1 Nov 2026 1:0 +" + "9" * 14]
)
def test_odd_dates_and_deep_bodies_are_findings(status, fails, date, monkeypatch):
    response = wire.answer(b"[" * 200_000, status, f"Date: {date}")
    with wire.serve(wire.serve_each(lambda _: response)) as base_url:
        environment = broken_services.environment(Simulator(seed=3), base_url)
        code, _, checks = examined(environment, monkeypatch)
    assert (code, failed(checks), checks["Clock"]["Verdict"]) == (1, [fails], "skipped")


def test_notification_urls_are_compared_with_the_store(tmp_path, monkeypatch):
    path, simulator = tmp_path / "notifications.db", Simulator(seed=3)
    inbox = Inbox(path, secrets=kept_secrets(path))
    options = ("--store", path, "--public-url", "https://partner.example")
    with simulator.serve() as base_url:
        environment = broken_services.environment(simulator, base_url)
        _, _, strange = examined(environment, monkeypatch, *options)
        urls = inbox.urls("https://partner.example")
        simulator.notification_urls = {str(kind): url for kind, url in urls.items()}
        code, _, checks = examined(environment, monkeypatch, *options)
    assert failed(strange) == ["Settings"]
    assert "not the URL of your store" in strange["Settings"]["Found"]
    assert (code, failed(checks)) == (0, [])
    assert "notifications go to your store" in checks["Settings"]["Found"]


def test_a_service_that_drips_is_reported_with_the_whole_time_it_had(monkeypatch):
    broken_services.connect_within(monkeypatch, 0.2)

    def drip(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(b"HTTP/1.1 200 OK\r\n")
        with suppress(OSError):
            while True:
                connection.send(b"X: y\r\n")
                time.sleep(0.02)

    with wire.serve(drip) as base_url:
        environment = broken_services.environment(Simulator(3), base_url)
        _, _, checks = examined(environment, monkeypatch, "--timeout", "0.1")
    assert checks["Service"]["Found"].startswith("no complete response within 0.3 s")


def test_an_agent_that_has_patched_httpx_hides_the_headers_only(monkeypatch):
    """Requests go through httpx's own engine then, so that mocks and agents see them."""
    send = httpx.AsyncHTTPTransport.handle_async_request

    async def traced(self, request):
        return await send(self, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", traced)
    with broken_services.in_order() as environment:
        code, document, checks = examined(environment, monkeypatch)
    assert (code, document["Verdict"], failed(checks)) == (0, "ok", [])
    assert checks["Clock"]["Verdict"] == "skipped"


def test_the_options_of_a_receiver_belong_together(tmp_path, monkeypatch):
    for options in (["--store", tmp_path / "no.db"], ["--public-url", "https://x"]):
        result = run("doctor", *options)
        assert result.exit_code == 2
        assert "give --store and --public-url together" in result.stderr
    missing = run("doctor", "--store", tmp_path / "no.db", "--public-url", "https://x")
    assert "no such store" in missing.stderr


# --- On a terminal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 80])
def test_on_a_terminal_the_checks_fit_the_lines(columns, monkeypatch):
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    with broken_services.wrong_key() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        result, quiet = run("doctor"), run("doctor", "--quiet")
    assert result.exit_code == quiet.exit_code == 1
    shown = result.stdout.splitlines()
    assert max(map(len, shown)) <= columns
    assert any(line.startswith("FAIL  Key") for line in shown)
    assert "3 must wait until that is mended." in " ".join(" ".join(shown).split())
    assert not [line for line in quiet.stdout.splitlines() if line.startswith(("ok", "skip"))]
    assert "FAIL" in quiet.stdout
    assert environment["SAMPLING_API_KEY"] not in result.output
