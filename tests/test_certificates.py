"""The dates of certificates, compared with what the library `cryptography` reads."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import trustme
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from sampling_async._cli._connection import first_in_pem, validity_of

EXPIRES = datetime(2031, 5, 17, 12, 30, 59, tzinfo=UTC)


@pytest.fixture(scope="module")
def pem():
    authority = trustme.CA()
    return authority.issue_cert("localhost", not_after=EXPIRES).cert_chain_pems[0].bytes().decode()


def test_the_dates_are_those_that_the_library_reads(pem):
    known = x509.load_pem_x509_certificate(pem.encode())
    found = validity_of(first_in_pem(f"some text before\n{pem}"))
    assert (found.begins, found.ends) == (known.not_valid_before_utc, known.not_valid_after_utc)
    assert found.ends == EXPIRES


def test_dates_from_2050_on_have_four_digits_of_the_year():
    far = datetime(2061, 1, 2, 3, 4, 5, tzinfo=UTC)
    old = datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC)
    issued = trustme.CA().issue_cert("localhost", not_before=old, not_after=far)
    found = validity_of(first_in_pem(issued.cert_chain_pems[0].bytes().decode()))
    assert (found.begins, found.ends) == (old, far)


def test_text_without_a_certificate_is_refused():
    with pytest.raises(ValueError, match="no certificate in PEM"):
        first_in_pem("-----BEGIN PRIVATE KEY-----")


@given(st.data())
def test_damaged_bytes_are_refused_or_read_and_never_end_in_another_error(pem, data):
    der = bytearray(first_in_pem(pem))
    for _ in range(data.draw(st.integers(1, 4))):
        der[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(der)))
    for damaged in (bytes(der), bytes(der[:cut])):
        try:
            assert validity_of(damaged).ends.tzinfo is UTC
        except ValueError as exc:
            assert str(exc) == "these bytes are no certificate in DER"  # noqa: PT017  either is right
