"""Addresses, keys and proxies that a client accepts."""

from __future__ import annotations

import copy
import pickle
import re
import ssl
import traceback
from base64 import b64decode
from math import inf
from uuid import UUID

import doubles
import httpx
import pytest

from sampling_async import InvalidRequestError, SamplingClient
from sampling_async._wire.address import Secret, base_url_of, comparable, guid_of, idle_seconds_of, proxy_of


@pytest.mark.parametrize(
    "value",
    ["", "x", f"{doubles.KEY}\n", f" {doubles.KEY}", f"{{{doubles.KEY}}}", f"{doubles.KEY}\uff43", None, 7],
)
@pytest.mark.parametrize("name", ["api_key", "panel_guid"])
def test_key_and_panel_must_be_guids_and_are_not_repeated(name, value):
    with pytest.raises(InvalidRequestError, match=f"{name} must be a Guid") as caught:
        doubles.client(doubles.Service([]), **{name: value})
    assert doubles.KEY not in str(caught.value)


def test_a_uuid_is_a_guid():
    assert guid_of(UUID(doubles.KEY), "api_key").reveal() == doubles.KEY


@pytest.mark.parametrize(
    "url",
    [
        "https://service.example",
        "https://service.example:8443/prefix/",
        "http://localhost:8080",
        "http://127.0.0.9",
        "http://[::1]:1",
    ],
)
def test_https_is_for_all_and_http_for_loopback(url):
    assert base_url_of(url, allow_http=False).host


def test_an_address_ends_without_a_slash():
    """A journal belongs to an address, however it was written."""
    assert str(base_url_of("https://service.example/x/", allow_http=False)) == "https://service.example/x"


@pytest.mark.parametrize(
    ("one", "another", "are_same"),
    [
        ("HTTPS://Sampling.Example:443/Path", "https://sampling.example/Path", True),
        ("http://sampling.example:080", "http://sampling.example", True),
        ("https://sampling.example:", "https://sampling.example", True),
        ("https://sampling.example:80", "https://sampling.example", False),
        ("http://sampling.example:443", "https://sampling.example", False),
        ("https://sampling.example/Path", "https://sampling.example/path", False),
        ("https://sampling.example/?at=a://b:443", "https://sampling.example/?at=a://b", False),
        ("https://[::1]:443/", "https://[::1]/", True),
    ],
)
def test_addresses_are_compared_as_addresses(one, another, are_same):
    assert (comparable(one) == comparable(another)) is are_same
    if "?" not in one:
        bases = [str(base_url_of(url, allow_http=True)) for url in (one, another)]
        assert (bases[0] == bases[1]) is are_same


def test_http_to_other_hosts_must_be_allowed():
    with pytest.raises(InvalidRequestError, match=r"must be https, .*; give allow_http=True to accept that$"):
        base_url_of("http://service.example", allow_http=False)
    assert base_url_of("http://10.0.0.1", allow_http=True)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "service.example",
        "ftp://service.example",
        "https://",
        "https://user:hunter2@service.example",
        "https://service.example/?a=hunter2",
        "https://service.example/#hunter2",
        "https://service.example/?",
        "https://service.example/#",
        "https://service.example/hunter2/../x",
        "https://service.example/hunter2/./x",
        "https://service.example:hunter2",
        "https://xn--zzzz--",
        "https://service.example:0",
        "https://service.example:65536",
        "https://service.example:110983/hunter2",
        None,
    ],
)
def test_an_invalid_address_is_refused_and_not_shown(url):
    with pytest.raises(InvalidRequestError, match="base_url") as caught:
        base_url_of(url, allow_http=True)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("service.example", "base_url must be an address like https://host or https://host/path"),
        ("https://agent@service.example", "base_url takes no user, password, query or fragment"),
        ("https://service.example/a/../b", "base_url takes no '.' or '..' segments"),
        ("https://service.example:65536", "base_url has a port that does not exist: ports are 1 to 65535"),
    ],
)
def test_a_refused_address_is_named_with_its_rule(url, text):
    with pytest.raises(InvalidRequestError, match=rf"^{re.escape(text)}$"):
        base_url_of(url, allow_http=False)


def test_the_last_port_exists():
    assert base_url_of("https://service.example:65535", allow_http=False).port == 65535
    assert proxy_of("http://proxy:65535").port == 65535


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (inf, "idle_seconds must be a finite number of seconds, not inf"),
        ("7", "idle_seconds must be a number of seconds, at least 0, not '7'"),
    ],
)
def test_refused_idle_seconds_are_named_with_their_rule(value, text):
    with pytest.raises(InvalidRequestError, match=rf"^{re.escape(text)}$"):
        idle_seconds_of(value)


@pytest.mark.parametrize(
    ("value", "shown", "credentials"),
    [
        ("http://proxy.example:3128", "proxy.example:3128", None),
        ("http://proxy.example/", "proxy.example:80", None),
        ("HTTP://10.0.0.1:8080", "10.0.0.1:8080", None),
        ("http://[::1]:3128", "::1:3128", None),
        ("http://agent:hunter2@proxy:3128", "proxy:3128", "agent:hunter2"),
        ("http://agent:hunter@2@proxy:3128", "proxy:3128", "agent:hunter@2"),
        ("http://agent@proxy:3128", "proxy:3128", "agent:"),
        ("http://do%40main%5Cagent:h%C3%BCnter%3A2@proxy:3128", "proxy:3128", "do@main\\agent:hünter:2"),
    ],
)
def test_a_proxy_is_an_http_address(value, shown, credentials):
    proxy = proxy_of(value)
    assert repr(proxy) == f"<Proxy {shown}>"
    told = proxy.authorization and b64decode(proxy.authorization.reveal().removeprefix("Basic ")).decode()
    assert told == credentials


ADDRESS_LIKE = (
    "address like http://host:3128 or http://user:password@host:3128, with special characters of user and "
    "password percent-encoded"
)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("", rf"must be an {ADDRESS_LIKE}$"),
        (None, "address like"),
        (7, "address like"),
        ("proxy:3128", "address like"),
        ("agent:hunter2@proxy:3128", "address like"),
        ("http://", "address like"),
        ("http://agent:hunter2@pro xy:3128", "percent-encoded"),
        ("http://agent:hunter2@proxy:port", "address like"),
        ("http://agent:hunter2@xn--zzzz--", "address like"),
        ("http://agent:hunter2@proxy:65536", "has a port that does not exist: ports are 1 to 65535$"),
        ("http://agent:hunter2@proxy:0", "has a port that does not exist"),
        ("ftp://agent:hunter2@proxy", "address like"),
        ("socks4://proxy:1080", "socks4 proxies are not supported"),
        ("https://agent:hunter2@proxy:3128", "https proxies are not supported"),
        ("socks5://agent:hunter2@proxy:1080", "socks5 proxies are not supported"),
        ("socks5h://agent:hunter2@proxy:1080", "socks5h proxies are not supported"),
        (
            "http://proxy:3128/hunter2",
            "takes no path, query or fragment; percent-encode the characters / . # in a password$",
        ),
        ("http://proxy:3128?hunter2", "no path"),
        ("http://proxy:3128#hunter2", "no path"),
        ("http://agent:12/hunter2@proxy:3128", "no path"),
        ("http://a%3Agent:hunter2@proxy:3128", "takes no user name with a colon$"),
    ],
)
def test_an_invalid_proxy_is_refused_and_not_shown(value, rule, monkeypatch):
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY}
    with pytest.raises(InvalidRequestError, match=rf"^proxy \(SAMPLING_PROXY\) .*{rule}") as caught:
        if value is None:
            proxy_of(value)
        SamplingClient("https://service.example", proxy=value, **given)
    errors = [caught.value]
    if value and isinstance(value, str):
        monkeypatch.setenv("SAMPLING_PROXY", value)
        with pytest.raises(InvalidRequestError, match=rule) as caught:
            SamplingClient.from_env(base_url="https://service.example", **given)
        errors.append(caught.value)
        with pytest.raises(InvalidRequestError, match=rule) as caught:
            SamplingClient.from_env(base_url="https://service.example", proxy=value, **given)
        errors.append(caught.value)
    for error in errors:
        trace = traceback.TracebackException.from_exception(error, capture_locals=True)
        ours = [str(frame.locals) for frame in trace.stack if "tests" not in frame.filename]
        assert "hunter2" not in f"{ours} {error} {error.__context__!r} {pickle.dumps(error)}"


@pytest.mark.parametrize(
    "option", [{"proxy": "http://proxy:3128"}, {"ssl_context": ssl.create_default_context()}]
)
def test_network_options_are_refused_if_a_transport_is_given(option):
    with pytest.raises(InvalidRequestError, match="cannot be combined with your own transport"):
        doubles.client(doubles.Service([]), **option)


def test_network_variables_are_ignored_if_a_transport_is_given(monkeypatch):
    for name in ("PROXY", "CA_FILE", "CLIENT_CERT"):
        monkeypatch.setenv(f"SAMPLING_{name}", "nonsense")
    transport = httpx.MockTransport(doubles.Service([]))
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "transport": transport}
    assert SamplingClient.from_env(base_url="https://service.example", **given)


def test_arguments_take_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("SAMPLING_PROXY", "nonsense")
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "proxy": "http://agent:hunter2@proxy:3128"}
    client = SamplingClient.from_env(base_url="https://service.example", **given)
    session = client._session
    assert "hunter2" not in f"{vars(client)} {vars(session)} {vars(session._over)} {vars(session.engine)}"


def test_a_secret_is_never_shown():
    secret = Secret("s3cret")
    assert "s3cret" not in f"{secret} {dir(secret)}"
    assert repr(secret) == "<secret>"
    assert not hasattr(secret, "__dict__")
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^a secret cannot be pickled or copied$"):
            copies(secret)
