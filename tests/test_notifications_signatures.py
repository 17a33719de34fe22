"""Signatures: EncryptedValue of notifications, and redirects to end pages."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from notifications_kit import CLOSED, COMPLETION

from sampling_async import InvalidRequestError
from sampling_async.notifications import Kind, verify_redirect
from sampling_async.notifications._signatures import ForgedError, Signatures
from sampling_async.notifications._understanding import Named, understand

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


def verified(signature, *, secrets=(SECRET,), is_required=False, fields=COMPLETION, kind="completion"):
    return Signatures(secrets, is_required=is_required).verified(
        understand(Kind(kind), Named(fields)), signature
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
