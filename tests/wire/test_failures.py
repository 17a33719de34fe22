"""What is made of the exceptions of a transport: the error, and what it says of the request."""

from __future__ import annotations

import errno
import ssl

import httpx
import httpx2
import pytest

from sampling_async import TransportError, TransportTimeoutError
from sampling_async._wire.failures import Refusal, failure_of_test, translated, was_never_sent
from sampling_async._wire.http1 import NotHttp
from sampling_async._wire.trust import text_of


def caused(exc: Exception, cause: BaseException | None) -> Exception:
    exc.__cause__ = cause
    return exc


class Alert(ssl.SSLError):
    def __init__(self, reason: str) -> None:
        super().__init__(1, "alert")
        self.reason = reason


def not_trusted() -> ssl.SSLCertVerificationError:
    exc = ssl.SSLCertVerificationError(1, "failed")
    exc.verify_message = "self-signed certificate"
    return exc


def lost_by(reason: str) -> Exception:
    return caused(httpx.ReadError("x"), Alert(reason))


LATE = "a time limit passed (%s)"
NOT_TRUSTED = "the TLS certificate was refused: self-signed certificate"
NOT_HTTP = "the response is not valid HTTP/1.1: is the port right, and http or https?"
NO_TLS = "what answers there does not speak TLS: another port, or an http:// address?"
MISTAKE = "your transport or http_client raised KeyError %s"
RAISED = "your transport or http_client raised ValueError %s"
CUT = "the connection was lost after the request was sent"


@pytest.mark.parametrize("delivery", ["not_sent", "unknown"])
@pytest.mark.parametrize(
    ("exc", "sent", "kind", "says"),
    [
        (Refusal("the proxy answered 502"), False, TransportError, ("the proxy answered 502", False)),
        (Refusal("no", permanent=True), False, TransportError, ("no", True)),
        (httpx.ConnectTimeout("x"), False, TransportTimeoutError, (LATE % "ConnectTimeout", False)),
        (httpx.ReadTimeout("x"), True, TransportTimeoutError, (LATE % "ReadTimeout", False)),
        (lost_by("TLSV1_ALERT_UNKNOWN_CA"), True, TransportError, (text_of("unknown ca"), True)),
        (lost_by("TLSV1_ALERT_INTERNAL_ERROR"), True, TransportError, (text_of("internal error"), False)),
        (caused(httpx.ConnectError("x"), not_trusted()), False, TransportError, (NOT_TRUSTED, True)),
        (
            caused(httpx.ConnectError("x"), caused(ValueError(), not_trusted())),
            False,
            TransportError,
            (NOT_TRUSTED, True),
        ),
        (
            caused(httpx.ConnectError("x"), OSError(errno.ECONNREFUSED, "Connection refused")),
            False,
            TransportError,
            ("no connection (ConnectError: Connection refused)", False),
        ),
        (
            caused(httpx.ConnectError("x"), Alert("WRONG_VERSION_NUMBER")),
            False,
            TransportError,
            (f"no connection (ConnectError: {NO_TLS})", False),
        ),
        (
            caused(httpx.ReadError("secret"), OSError(errno.ECONNRESET, "reset")),
            True,
            TransportError,
            (f"{CUT} (ReadError)", False),
        ),
        (ValueError("secret"), True, TransportError, (RAISED % "when the request may have been sent", False)),
        (ValueError("secret"), False, TransportError, (RAISED % "before anything was sent", False)),
        (KeyError("secret"), False, TransportError, (MISTAKE % "before anything was sent", True)),
        (NotHttp(), True, TransportError, (NOT_HTTP, False)),
    ],
)
def test_an_exception_of_a_transport_becomes_an_error_that_quotes_nothing(exc, sent, kind, says, delivery):
    text, permanent = says
    error = translated(exc, delivery, sent=sent)
    assert type(error) is kind
    assert (error.args[0], error.delivery, error.permanent) == (text, delivery, permanent)


@pytest.mark.parametrize(
    "name",
    [
        each
        for each in httpx.__all__
        if isinstance(getattr(httpx, each), type) and issubclass(getattr(httpx, each), httpx.TransportError)
    ],
)
def test_errors_of_httpx_and_httpx2_mean_the_same(name):

    def seen(library):
        exc = getattr(library, name)("x")
        error = translated(exc, "unknown", sent=True)
        return type(error), error.args, error.permanent, was_never_sent(exc)

    assert seen(httpx) == seen(httpx2)


def test_a_class_of_the_user_counts_as_what_it_derives_from():
    class Mine(httpx2.ConnectTimeout):
        pass

    class ConnectError(Exception):
        """Of the same name, and of no library."""

    assert was_never_sent(Mine("x"))
    assert not was_never_sent(ConnectError("x"))


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_only_the_general_timeout_explains_a_request_that_was_not_announced(library):
    text = "No response can be found for GET request"
    assert isinstance(failure_of_test(library.TimeoutException(text)), AssertionError)
    assert failure_of_test(library.ReadTimeout(text)) is None


def test_a_certificate_that_was_refused_while_something_else_was_handled_is_found():
    exc = httpx.ConnectError("x")
    exc.__context__ = not_trusted()
    assert translated(exc, "not_sent", sent=False).permanent


def test_the_way_of_a_connection_is_reported_only_where_it_failed():
    assert (
        translated(httpx.ConnectError("x"), "not_sent", sent=False, way="; by mule")
        .args[0]
        .endswith("; by mule")
    )
    assert "mule" not in translated(httpx.ReadError("x"), "unknown", sent=True, way="; by mule").args[0]


@pytest.mark.parametrize(
    ("module", "is_proof"),
    [
        ("httpcore", True),
        ("httpcore._exceptions", True),
        ("httpcore2", True),
        ("builtins", True),
        ("aiohttp.client_exceptions", False),
    ],
)
def test_only_causes_of_httpcore_and_python_prove_that_nothing_was_sent(module, is_proof):
    cause = type("Cause", (Exception,), {"__module__": module})()
    assert was_never_sent(caused(httpx.ConnectError("failed"), cause)) is is_proof
