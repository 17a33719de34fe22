"""Addresses are parsed as httpx parses them: a journal belongs to the text of its address."""

from __future__ import annotations

import httpx
import pytest

from sampling_async._wire.urls import parsed

VALID = [
    "https://service.example",
    "https://service.example:8443/prefix/",
    "https://service.example:443/x",
    "HTTPS://SERVICE.Example:80/A b/\u00fc%20%zz/{a}|b^`",
    "http://[::1]:1",
    "http://[fe80::1%25eth0]/",
    "http://127.0.0.1:00080/",
    "https://b\u00fccher.example/x",
    "https://xn--bcher-kva.example/",
    "https://service.example./x",
    "http://under_score:8080",
    "http://a b/",
    "http://h:",
    "http://user:pa%40ss@proxy:3128",
    "http://user@name@proxy:3128/",
    "http://@proxy",
]
INVALID = [
    "https://xn--zzzz--",
    "https://service.example:port",
    "http://1.2.3.400",
    "http://[::zz]",
    "https://service\n.example",
    "http://[v1.x]/",
    "https://service.example/" + 70_000 * "x",
]


@pytest.mark.parametrize("text", VALID)
def test_an_address_has_the_parts_that_httpx_finds(text):
    theirs, ours = httpx.URL(text), parsed(text)
    assert (ours.scheme, ours.host, ours.ascii_host, ours.port) == (
        theirs.scheme,
        theirs.host,
        theirs.raw_host.decode(),
        theirs.port,
    )
    assert ours.netloc == theirs.netloc.decode()
    assert ours.path in {theirs.raw_path.decode(), ""}
    assert (ours.username, ours.password) == (theirs.username, theirs.password or "")
    assert ours.has_credentials is bool(theirs.userinfo)
    if not theirs.userinfo:
        assert str(ours) == str(theirs)


@pytest.mark.parametrize("text", INVALID)
def test_an_invalid_address_is_refused_as_by_httpx(text):
    with pytest.raises((httpx.InvalidURL, ValueError)):
        _ = httpx.URL(text).host
    with pytest.raises(ValueError):  # noqa: PT011  nobody shows its text
        parsed(text)


@pytest.mark.parametrize("rest", ["?", "#", "?a=b", "#a"])
def test_a_query_or_fragment_is_noticed(rest):
    assert parsed(f"https://service.example/x{rest}").has_rest
    assert not parsed("https://service.example/x").has_rest


def test_no_repr_shows_credentials():
    assert "hunter2" not in repr(parsed("http://agent:hunter2@proxy:3128"))
