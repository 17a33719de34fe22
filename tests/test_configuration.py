"""What a client may be configured with."""

from __future__ import annotations

import copy
import pickle
from uuid import UUID

import doubles
import pytest

from sampling_async import InvalidRequestError
from sampling_async._configuration import Secret, base_url_of, guid_of


@pytest.mark.parametrize(
    "value", ["", "x", f"{doubles.KEY}\n", f" {doubles.KEY}", f"{{{doubles.KEY}}}", None, 7]
)
@pytest.mark.parametrize("name", ["api_key", "panel_guid"])
def test_key_and_panel_must_be_guids_and_are_not_repeated(name, value):
    with pytest.raises(InvalidRequestError, match=f"{name} is not a Guid") as caught:
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


def test_http_elsewhere_has_to_be_allowed():
    with pytest.raises(InvalidRequestError, match="must be https"):
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
        "https://service.example/hunter2/../x",
        "https://service.example:hunter2",
        "https://xn--zzzz--",
        None,
    ],
)
def test_an_address_that_is_none_is_refused_and_not_repeated(url):
    with pytest.raises(InvalidRequestError, match="base_url") as caught:
        base_url_of(url, allow_http=True)
    assert "hunter2" not in str(caught.value)


def test_a_secret_shows_nowhere():
    secret = Secret("s3cret")
    assert "s3cret" not in f"{secret!r} {secret} {dir(secret)}"
    assert not hasattr(secret, "__dict__")
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            copies(secret)
