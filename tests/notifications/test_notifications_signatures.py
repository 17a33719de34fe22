"""Signatures: EncryptedValue of notifications, and redirects to end pages."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from store_kit import CLOSED, COMPLETION

from sampling_async import InvalidRequestError
from sampling_async.notifications import Kind, verify_redirect
from sampling_async.notifications._access import ForgedError, Signatures
from sampling_async.notifications._understanding import FieldReader, parse

# A vector that an operator has published.
URL = "https://partnerA.com?status=qualified&mc=mymember&"
HMAC = "f0c397932b98251aca505db3bb2c364711f18237f5202017d24b97ec522a373e"
SECRET = "supersecret"
HASHES = ["sha256", "sha1", "md5"]


def signature_of(message: str, secret: str = SECRET, algorithm: str = "sha256") -> str:
    return hmac.new(secret.encode(), message.encode(), algorithm).hexdigest()


def test_the_published_redirect_is_verified():
    assert verify_redirect(f"{URL}hash={HMAC}", SECRET)
    assert verify_redirect(f"{URL}hash={HMAC}", ["another secret", SECRET])
    assert verify_redirect(f"{URL}HASH={HMAC.upper()}", SECRET, parameter="hash")


@pytest.mark.parametrize("algorithm", HASHES)
def test_all_three_hashes_are_known(algorithm):
    assert verify_redirect(f"{URL}hash={signature_of(URL, algorithm=algorithm)}", SECRET)


@pytest.mark.parametrize(
    "url",
    [
        f"{URL}hash={HMAC[:-1]}0",
        f"{URL}hash=",
        f"{URL}hash",
        f"{URL}{HMAC}",
        URL,
        "",
        "https://partnerA.com",
        f"https://partnerA.com?hash={HMAC}",
        f"https://partnerA.com?status=terminated&mc=mymember&hash={HMAC}",
        f"https://partnerA.com?mc=mymember&status=qualified&hash={HMAC}",
        f"https://partnera.com?status=qualified&mc=mymember&hash={HMAC}",
        f"{URL}hash={HMAC}&extra=1",
        f"{URL}hash={HMAC}0",
        f"{URL}hash=\u0661{HMAC[1:]}",
        "\ud800&a=b",
    ],
)
def test_any_other_redirect_is_not(url):
    assert not verify_redirect(url, SECRET)


def test_the_name_of_the_parameter_counts_if_it_is_given():
    assert not verify_redirect(f"{URL}hash={HMAC}", SECRET, parameter="enc")


def test_a_fragment_is_not_signed():
    assert verify_redirect(f"{URL}hash={HMAC}#top", SECRET)


@pytest.mark.parametrize("secrets", [[], "", ["a", ""], [" "], [None]])
def test_an_empty_secret_is_refused(secrets):
    with pytest.raises(InvalidRequestError, match="not empty"):
        verify_redirect(URL, secrets)


PAGES = "https://partnerA.com?status=[status]&mc=[pid]"


@pytest.mark.parametrize(
    "url",
    [
        URL,
        "https://partnera.com/?status=qualified&mc=mymember&",
        "https://PARTNERA.com?status=qualified&mc=mymember&",
        "https://partnera.com:443/?status=qualified&mc=mymember&",
        "http://partnera.com/?status=qualified&mc=mymember&",  # behind a proxy with TLS
    ],
)
def test_a_redirect_as_a_browser_requests_it_is_verified_with_its_end_page(url):
    assert verify_redirect(f"{url}hash={HMAC}", SECRET, end_page=PAGES)
    assert verify_redirect(f"{url}hash={HMAC}", SECRET, end_page=["https://partnerA.com/no", PAGES])


@pytest.mark.parametrize(
    "url",
    [
        "https://partnera.com/?status=qualified&mc=another&",
        "https://partnera.com/qualified?status=qualified&mc=mymember&",
        "https://another.example/?status=qualified&mc=mymember&",
        "https://partnera.com:444/?status=qualified&mc=mymember&",
        "https://partnera.com:x/?status=qualified&mc=mymember&",
        "ftp://partnera.com/?status=qualified&mc=mymember&",
        "https://partnera.com/?mc=mymember&status=qualified&",
    ],
)
def test_a_forged_one_is_not(url):
    assert not verify_redirect(f"{url}hash={HMAC}", SECRET, end_page=PAGES)
    assert not verify_redirect(f"{URL}hash={HMAC[:-1]}0", SECRET, end_page=PAGES)


def test_an_added_slash_is_overlooked_without_the_end_page():
    assert verify_redirect(f"{URL.replace('?', '/?')}hash={HMAC}", SECRET)
    assert not verify_redirect(f"{URL.replace('?', '/a/?')}hash={HMAC}", SECRET)


def verified(signature, *, secrets=(SECRET,), is_required=False, fields=COMPLETION, kind="completion"):
    return Signatures(secrets, is_required=is_required).verified(
        parse(Kind(kind), FieldReader(fields)), signature
    )


@pytest.mark.parametrize("algorithm", HASHES)
def test_encrypted_value_is_over_survey_wave_and_member(algorithm):
    signature = signature_of("240177m-1", algorithm=algorithm)
    assert verified(signature)
    assert verified(signature.upper(), secrets=("another", SECRET))
    assert hashlib.new(algorithm).digest_size * 2 == len(signature)


@pytest.mark.parametrize("signature", ["", "0" * 64, signature_of("240177m-2"), "x" * 64, "0"])
def test_a_wrong_one_is_forged(signature):
    with pytest.raises(ForgedError, match="wrong signature"):
        verified(signature)


@pytest.mark.parametrize("value", [["x"], {"a": 1}, 5, 1.5, True, False])
def test_a_signature_of_another_type_is_wrong(value):
    with pytest.raises(ForgedError, match="wrong signature"):
        verified(FieldReader({**COMPLETION, "EncryptedValue": value}).signature)
    for absent in (None, "", " "):
        assert FieldReader({**COMPLETION, "EncryptedValue": absent}).signature is None


@pytest.mark.parametrize("message", ["24010m-1", "2401m-1"])
def test_without_a_wave_the_signature_is_over_wave_0_or_none(message):
    fields = {name: value for name, value in COMPLETION.items() if name != "WaveId"}
    record = parse(Kind.COMPLETION, FieldReader(fields))
    checks = Signatures(SECRET, is_required=True)
    assert checks.verified(record, signature_of(message), has_wave=False)
    with pytest.raises(ForgedError, match="wrong signature"):
        checks.verified(record, signature_of("2401m-2"), has_wave=False)


def test_without_one_nothing_is_verified():
    assert not verified(None)
    with pytest.raises(ForgedError, match="no signature"):
        verified(None, is_required=True)


def test_without_secrets_nothing_is_checked():
    assert not verified("0" * 64, secrets=())
    with pytest.raises(InvalidRequestError, match="require_signature"):
        verified("0" * 64, secrets=(), is_required=True)


def test_statuses_of_surveys_are_never_signed():
    assert not verified("0" * 64, fields=CLOSED, kind="survey_closed", is_required=True)
