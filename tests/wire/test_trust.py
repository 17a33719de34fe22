"""TLS contexts from files, from the environment or given by the user; and TLS alerts of servers."""

from __future__ import annotations

import re
import socket
import ssl
from types import SimpleNamespace

import doubles
import pytest
import trustme
import wire
from cryptography.hazmat.primitives import serialization
from wire_kit import client_of

from sampling_async import InvalidRequestError, RetryPolicy, SamplingClient, TransportError
from sampling_async._wire import engine as _engine
from sampling_async._wire.connection import Connection, Traffic
from sampling_async._wire.sockets import Wire
from sampling_async._wire.trust import (
    Unusable,
    alert_in,
    checked_context,
    context_of_files,
    default_context,
    text_of,
)

ONCE = RetryPolicy(max_attempts=1)
ANSWERS = wire.serve_each(lambda _: wire.answer(b"[]"))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority, tmp_path):
    """Return files: authorities, a certificate with its key, and unusable ones."""
    mine = authority.issue_cert("partner@example.org")
    key = serialization.load_pem_private_key(mine.private_key_pem.bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"hunter2")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    chain = mine.cert_chain_pems[0].bytes()
    contents = {
        "authorities": authority.cert_pem.bytes(),
        "mine": mine.private_key_and_cert_chain_pem.bytes(),
        "encrypted": key.private_bytes(*form, encryption) + chain,
        "no key": chain,
        "text": b"certificate",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def server_context(authority: trustme.CA, **settings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    for name, value in settings.items():
        setattr(context, name, value)
    return context


def asking(authority: trustme.CA, **settings) -> ssl.SSLContext:
    """Return the context of a server that requires client certificates of an authority."""
    context = server_context(authority, verify_mode=ssl.CERT_REQUIRED, **settings)
    authority.configure_trust(context)
    return context


# --- Files and variables


@pytest.mark.parametrize(
    ("variable", "name", "says"),
    [
        ("SAMPLING_CA_FILE", "missing", "No such file"),
        ("SAMPLING_CA_FILE", "text", "no certificate"),
        ("SAMPLING_CA_FILE", "", "directory"),
        ("SAMPLING_CLIENT_CERT", "missing", "No such file"),
        ("SAMPLING_CLIENT_CERT", "text", "expected PEM, not encrypted"),
        ("SAMPLING_CLIENT_CERT", "no key", "expected PEM, not encrypted"),
        ("SAMPLING_CLIENT_CERT", "encrypted", "expected PEM, not encrypted"),
    ],
)
def test_an_unusable_file_is_named_with_its_variable(variable, name, says, files, monkeypatch):
    path = str(files / name)
    monkeypatch.setenv(variable, path)
    pattern = f"^{variable}, its option or the profile names {re.escape(path)}, which cannot be used: .*{says}"
    with pytest.raises(InvalidRequestError, match=pattern):
        SamplingClient.from_env(base_url="https://localhost", panel_guid=doubles.PANEL, api_key=doubles.KEY)


def test_without_files_there_is_no_context():
    assert context_of_files(None, "") is None


def test_only_the_authorities_of_a_given_file_are_trusted(files):
    assert len(context_of_files(str(files / "authorities"), None).get_ca_certs()) == 1


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_authorities_of_the_environment_that_are_not_there_are_named(variable, tmp_path, monkeypatch):
    path = str(tmp_path / "missing")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv(variable, path)
    async with client_of("https://127.0.0.1:1", retry=RetryPolicy()) as client:
        with pytest.raises(TransportError, match=f"{variable} names {re.escape(path)}, which") as caught:
            await client.get_settings()
        result = await client.bulk_invite("m1", [1])
    assert (caught.value.permanent, caught.value.delivery) == (True, "not_sent")
    assert caught.value.attempts == 1
    assert result[0].status == "not_sent"


def test_missing_authority_files_are_named_with_a_client_certificate_too(files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "missing"))
    with pytest.raises(InvalidRequestError, match="SSL_CERT_FILE names"):
        context_of_files(None, str(files / "mine"))


@pytest.mark.parametrize("given", [("a\0b", None), (None, "a\0b")])
def test_a_path_that_no_system_has_is_refused(given):
    with pytest.raises(InvalidRequestError, match=r"cannot be used: this system has no such paths$"):
        context_of_files(*given)


def test_authorities_that_are_in_no_variable_are_those_of_certifi(monkeypatch):
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    assert default_context().get_ca_certs()

    def fail(**_: object) -> None:
        raise OSError

    monkeypatch.setattr(ssl, "create_default_context", fail)
    with pytest.raises(Unusable, match=r"^certifi names , which cannot be used: OSError$"):
        default_context()


def test_a_folder_of_authorities_is_used_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    context = default_context()
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert not context.get_ca_certs()


def test_a_context_keeps_its_other_options():
    context = ssl.create_default_context()
    ignores_cuts = getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    context.options |= ignores_cuts
    before = context.options
    assert checked_context(context).options == before & ~ignores_cuts


async def test_the_environment_names_authorities_and_the_client_certificate(authority, files, monkeypatch):
    with wire.serve(ANSWERS, tls=asking(authority)) as url:
        monkeypatch.setenv("SAMPLING_CA_FILE", str(files / "authorities"))
        monkeypatch.setenv("SAMPLING_CLIENT_CERT", str(files / "mine"))
        given = {"base_url": url, "panel_guid": doubles.PANEL, "api_key": doubles.KEY}
        async with SamplingClient.from_env(**given) as client:
            assert len(await client.get_settings()) == 0
        context = ssl.create_default_context(cafile=files / "authorities")
        async with SamplingClient.from_env(**given, ssl_context=context, retry=ONCE) as client:
            with pytest.raises(TransportError, match="certificate required"):  # an argument takes precedence
                await client.get_settings()


@pytest.mark.parametrize("context", ["yes", True, ssl.SSLContext, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)])
def test_only_a_client_context_is_accepted(context):
    text = r"^ssl_context must be an ssl\.SSLContext for clients, such as ssl\.create_default_context\(\)$"
    with pytest.raises(InvalidRequestError, match=text):
        client_of("https://localhost", ssl_context=context)


# --- Contexts given by the user


async def test_a_given_context_is_used_and_offers_http_1(authority):
    chosen = []

    def script(connection: wire.Connection) -> None:
        chosen.append(connection.sock.selected_alpn_protocol())
        ANSWERS(connection)

    server = server_context(authority)
    server.set_alpn_protocols(["h2", "http/1.1"])
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    with wire.serve(script, tls=server) as url:
        async with client_of(url, ssl_context=context) as client:
            assert len(await client.get_settings()) == 0
    assert chosen == ["http/1.1"]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_sessions_are_resumed(version, authority, monkeypatch):
    resumed = []

    def script(connection: wire.Connection) -> None:
        resumed.append(connection.sock.session_reused)
        ANSWERS(connection)

    server = server_context(authority, maximum_version=version)
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    with wire.serve(script, tls=server) as url:
        async with client_of(url, ssl_context=context) as client:
            for _ in range(3):
                await client.get_settings()
                client._session.close_idle()
    assert resumed == [False, True, True]


async def test_a_server_that_refuses_resumed_sessions_gets_full_handshakes(authority, monkeypatch):
    resumed = []

    def script(connection: wire.Connection) -> None:
        resumed.append(connection.sock.session_reused)
        ANSWERS(connection)

    async def connect(*args, session=None, **named) -> Wire:
        offered.append(session is not None)
        if session is not None:
            raise Alert(
                "TLSV1_ALERT_INTERNAL_ERROR"
            )  # as OpenSSL does if its application set no session ID context
        return await _connect(*args, **named)

    offered, _connect = [], _engine.connect
    monkeypatch.setattr(_engine, "connect", connect)
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    with wire.serve(script, tls=server_context(authority)) as url:
        async with client_of(url, ssl_context=context) as client:
            for _ in range(3):
                await client.get_settings()
                client._session.close_idle()
    assert offered == [False, True, False, False]
    assert resumed == [False] * 3


async def test_a_temporary_alert_may_be_retried(authority):
    server = server_context(authority)
    server.sni_callback = lambda *_: ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    with wire.serve(ANSWERS, tls=server) as url:
        async with client_of(url, ssl_context=context) as client:
            with pytest.raises(TransportError, match="alert 'internal error'") as caught:
                await client.get_settings()
    assert (caught.value.permanent, caught.value.delivery) == (False, "not_sent")


# --- Alerts


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("who", ["nobody", "a stranger"])
async def test_a_refused_client_certificate_is_reported(who, version, authority):
    """With TLS 1.3 the server refuses when the request is on its way; it has not read the request."""
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    if who == "a stranger":
        trustme.CA().issue_cert("partner@example.org").configure_cert(context)
    says = {
        ("nobody", ssl.TLSVersion.TLSv1_2): "'handshake failure': it may require a client certificate",
        ("nobody", ssl.TLSVersion.TLSv1_3): "'certificate required': it requires a client certificate",
    }.get((who, version), "'unknown ca': it does not know the authority that signed the client certificate")
    received = []

    def script(connection: wire.Connection) -> None:
        received.append(connection.read_request())

    with wire.serve(script, tls=asking(authority, maximum_version=version)) as url:
        async with client_of(url, ssl_context=context) as client:
            for _ in range(10):
                with pytest.raises(TransportError, match=f"alert {says}") as caught:
                    await client.get_settings()
                assert (caught.value.delivery, caught.value.permanent) == ("not_sent", True)
            result = await client.bulk_invite("m1", range(1, 301))
    assert {outcome.status for outcome in result} == {"not_sent"}
    assert received == []


@pytest.mark.parametrize(
    ("later", "before", "received", "alert", "proves"),
    [
        (False, 0.0, 0, "TLSV13_ALERT_CERTIFICATE_REQUIRED", True),
        (
            True,
            0.0,
            0,
            "TLSV13_ALERT_CERTIFICATE_REQUIRED",
            False,
        ),  # the server may ask after it has read a request
        (False, 1.0, 0, "TLSV13_ALERT_CERTIFICATE_REQUIRED", False),
        (False, 0.0, 9, "TLSV13_ALERT_CERTIFICATE_REQUIRED", False),
        (False, 0.0, 0, "TLSV1_ALERT_INTERNAL_ERROR", False),
        (False, 0.0, 0, None, False),
    ],
)
def test_an_alert_proves_that_no_request_was_read_only_as_the_end_of_the_handshake(
    later, before, received, alert, proves
):
    connection = Connection(SimpleNamespace(post_handshake_auth=later), Traffic())
    connection.used_at, connection.received = before, received
    assert connection.was_refused(Alert(alert)) is proves


async def test_the_context_says_whether_a_server_may_ask_for_a_certificate_later():
    ours, theirs = socket.socketpair()
    context = ssl.create_default_context()
    with ours, theirs:
        wrapped = context.wrap_socket(ours, server_hostname="localhost", do_handshake_on_connect=False)
        line = Wire(wrapped)
        assert not line.post_handshake_auth
        context.post_handshake_auth = True
        assert line.post_handshake_auth
        line.close()


async def test_an_alert_handled_by_somebody_else_says_nothing_about_our_request():
    """An exception raised in an except block has the handled error as its context."""

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.reset()

    with wire.serve(script) as url:
        async with client_of(url) as client:
            try:
                raise Alert("TLSV13_ALERT_CERTIFICATE_REQUIRED")
            except ssl.SSLError:
                with pytest.raises(TransportError) as caught:
                    await client.generate_invite("m1", 1)
    assert caught.value.delivery == "unknown"
    assert "alert" not in str(caught.value)


class Alert(ssl.SSLError):
    def __init__(self, reason: str | None) -> None:
        super().__init__(1, "x")
        self.reason = reason


@pytest.mark.parametrize(
    ("reason", "alert"),
    [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "certificate required"),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "bad certificate"),
        ("TLSV1_UNRECOGNIZED_NAME", "unrecognized name"),
        ("CERTIFICATE_VERIFY_FAILED", ""),
        ("WRONG_VERSION_NUMBER", ""),
        (None, ""),
    ],
)
def test_alerts_are_reported_by_name(reason, alert):
    error = OSError("x")
    error.__cause__ = Alert(reason)
    assert alert_in(error) == alert_in(error.__cause__) == alert
    assert alert_in(OSError("x")) == alert_in(None) == alert_in(ssl.SSLError("made by hand")) == ""
    foreign = Exception("not of OpenSSL")
    foreign.reason = "TLSV1_ALERT_UNKNOWN_CA"
    assert alert_in(foreign) == ""
    assert text_of("bad certificate") == "the server ended TLS with the alert 'bad certificate'"
