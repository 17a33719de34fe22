"""HTTP responses, fed byte by byte: where one ends, and whether another may follow."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import h11
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling_async._wire import http1
from sampling_async._wire.http1 import ResponseParser

OK = b"HTTP/1.1 200 OK\r\n"
TWO = b"Content-Length: 2\r\n\r\nhi"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HI = b"2\r\nhi\r\n0\r\n\r\n"

ENDED = "^the connection ended before the end of the response$"


def fed(*parts: bytes) -> ResponseParser:
    answer = ResponseParser()
    for part in parts:
        answer.feed(part)
    return answer


def told(parts: list[bytes]) -> Any:
    """Return what is known of a response after its parts, or that it was refused."""
    try:
        answer = fed(*parts)
    except httpx.RemoteProtocolError:
        return "refused"
    return answer.status, answer.headers, answer.take(), answer.is_whole, answer.leaves_reusable


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@pytest.mark.parametrize(
    ("data", "status", "body", "reusable"),
    [
        (OK + TWO, 200, b"hi", True),
        (OK + b"Content-Length: 0\r\n\r\n", 200, b"", True),
        (OK + CHUNKED + HI, 200, b"hi", True),
        (OK + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", True),
        (OK + b"X: y\r\nContent-Length: 2\r\nY: z\r\ncontent-length:2\r\n\r\nhi", 200, b"hi", True),
        (OK + b"Content-Length: 2, 2\r\n\r\nhi", 200, b"hi", True),
        (OK + b"Content-Length: 2,\r\n 2\r\nX: y\r\n\r\nhi", 200, b"hi", True),
        (OK + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n2;a=b\r\nhi\r\n0\r\n\r\n", 200, b"hi", True),
        (OK + CHUNKED + b"0\r\n\r\n", 200, b"", True),
        (OK + b"Connection: close\r\n" + TWO, 200, b"hi", False),
        (OK + b"Connection: x, close\r\n" + TWO, 200, b"hi", False),
        (OK + b"Connection: close\r\n" + CHUNKED + HI, 200, b"hi", False),
        (b"HTTP/1.0 200 OK\r\n" + TWO, 200, b"hi", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" + TWO, 200, b"hi", True),
        (b"HTTP/1.1 200\r\n" + TWO, 200, b"hi", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, b"", True),
        (b"HTTP/1.1 503 \r\nRetry-After: 1\r\n" + TWO, 503, b"hi", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + TWO, 200, b"hi", True),
        (b"HTTP/1.1 103 Early\r\nLink: </a>\r\n\r\nHTTP/1.1 100 C\r\n\r\n" + OK + TWO, 200, b"hi", True),
        (OK + b"Connection: upgrade\r\nUpgrade: h2c\r\n" + TWO, 200, b"hi", True),
        # what a recipient must accept by RFC 9112
        (OK + b"X: a\r\n  b\r\n" + TWO, 200, b"hi", True),
        (OK + b"X: a\r\n \r\n\tb\r\n" + TWO, 200, b"hi", True),
        (OK + b"Content-Length:\r\n 2\r\n\r\nhi", 200, b"hi", True),
        (OK + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + HI, 200, b"hi", True),
        (OK + b"X: y\r\nTransfer-Encoding: Chunked \t \r\nY: z\r\n\r\n" + HI, 200, b"hi", True),
        *(
            (
                OK + CHUNKED + HI.replace(b"2\r", b"2%b\r" % blanks).replace(b"0\r", b"0%b\r" % blanks),
                200,
                b"hi",
                True,
            )
            for blanks in (b" ", b"     ", b"\t", b" \t ", b" ;a=b", b";a=b")
        ),
        (OK + CHUNKED + b"0002  \r\nhi\r\n00\r\nX: y\r\n\r\n", 200, b"hi", True),
        (b"HTTP/1.2 200 OK\r\n" + TWO, 200, b"hi", True),
        (b"HTTP/1.9 200 OK\r\nConnection: close\r\n" + TWO, 200, b"hi", False),
        (b"HTTP/1.2 103 Early\r\nLink: </a>,\r\n </b>\r\n\r\nHTTP/1.3 200 OK\r\n" + TWO, 200, b"hi", True),
        (OK + b"X: a\r\n b\r\n" + TWO + OK + TWO, 200, b"hi", False),
        (OK + TWO + OK + TWO, 200, b"hi", False),
        (OK + TWO + b"H", 200, b"hi", False),
        (OK + TWO + b"x", 200, b"hi", False),
        (OK + TWO + b"\x00", 200, b"hi", False),
        (OK + CHUNKED + HI + b"2\r\nhi\r\n", 200, b"hi", False),
        (OK + b"Connection: close\r\n" + TWO + b"x", 200, b"hi", False),
        (b"HTTP/1.1 204 No Content\r\n\r\nhi", 204, b"", False),
    ],
)
def test_a_response_ends_where_its_head_says(data, status, body, reusable):
    seen = [told([data]), told(bytewise(data)), *(told([data[:at], data[at:]]) for at in range(1, len(data)))]
    assert all(each == seen[0] for each in seen)
    assert (seen[0][0], *seen[0][2:]) == (status, body, True, reusable)


@pytest.mark.parametrize(
    "data", [OK + b"\r\nhi", b"HTTP/1.0 200 OK\r\n\r\nhi", OK + b"Connection: close\r\n\r\nhi"]
)
def test_a_response_without_a_length_ends_with_the_connection(data):
    assert told([data]) == told(bytewise(data))
    assert not fed(data).is_whole
    for parts in ([data, b""], [*bytewise(data), b""], [data[:-1], b"i", b""]):
        assert told(parts)[2:] == (b"hi", True, False)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", OK, OK + TWO[:-5], OK + TWO[:-1], b"HTTP/1.1 100 Continue\r\n\r\n"),
        *(OK + CHUNKED, OK + CHUNKED + b"2\r\nhi\r\n", OK + CHUNKED + HI[:-2], OK + CHUNKED + HI[:-1]),
    ],
)
def test_a_cut_response_is_refused_at_the_end_of_the_connection(data):
    assert not fed(data).is_whole if data else True
    for parts in ([data, b""], [*bytewise(data), b""]):
        with pytest.raises(httpx.RemoteProtocolError, match=ENDED):
            fed(*parts)


def test_the_end_of_the_connection_after_a_complete_response_changes_nothing():
    answer = fed(OK + TWO)
    answer.feed(b"")
    assert (answer.is_whole, answer.take(), answer.take()) == (True, b"hi", b"")


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"SSH-2.0-OpenSSH\r\n",
            b"\x16\x03\x01\x02",
            b"<html>",
            b"GET / HTTP/1.1\r\n\r\n",
            b"HTTP/1.1 99 X\r\n\r\n",
        ),
        *(b"HTTP/2.0 200 OK\r\n" + TWO, b"HTTP/0.9 200 OK\r\n" + TWO, b"HTTP/1.1 1000 X\r\n" + TWO),
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        # the end of the body is unclear
        OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
        OK + b"Content-Length: 2\r\nX: y\r\nContent-Length: 3\r\n\r\nhi",
        OK + b"Content-Length: 2\r\nContent-Length: 2\r\ncontent-length: 3\r\n\r\nhi",
        OK + b"Content-Length: 2\r\nContent-Length: 2\r\n" + CHUNKED + HI,
        OK + b"Content-Length: 2\r\n" + CHUNKED + HI,
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n" + HI,
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + HI,
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n" + HI,
        OK + b"Transfer-Encoding: xchunked\r\n\r\n" + HI,
        OK + b"Transfer-Encoding: identity\r\n\r\nhi",
        OK + b"Transfer-Encoding:\r\n\r\nhi",
        *(
            OK + b"Content-Length: %b\r\n\r\nhi" % length
            for length in (b"+2", b"-2", b"0x2", b"2, 3", b"2 2", b"2,", b",2", b"2, x", b"")
        ),
        OK + b"Content-Length: 99999999999999999999999\r\n\r\nhi",
        OK + b"Content-Length : 2\r\n\r\nhi",
        # lines that other parsers read differently
        OK.replace(b"\r\n", b"\n") + TWO.replace(b"\r\n", b"\n"),
        OK + b"Content-Length: 2\n\r\nhi",
        OK + b" X: folded into the first line\r\n" + TWO,
        OK + b"Transfer-Encoding: gzip,\r\n chunked\r\n\r\n" + HI,
        OK + b"X: a\r\n b\r\nX : y\r\n" + TWO,
        OK + b"Transfer-Encoding: chunked x\r\n\r\n" + HI,
        b"HTTP/1.25 200 OK\r\n" + TWO,
        b"HTTP/1.2 200 OK\r\nContent-Length : 2\r\n\r\nhi",
        OK + b"X: a\x00b\r\n" + TWO,
        OK + CHUNKED + b"2\nhi\n0\n\n",
        OK + CHUNKED + b"2\r\nhiX\r\n0\r\n\r\n",
        OK + CHUNKED + b"x\r\n",
        OK + CHUNKED + b"-2\r\n",
        *(
            OK + CHUNKED + size + b"\r\nhi\r\n0\r\n\r\n"
            for size in (b" 2", b"2 2", b"2 x", b"2\x0b", b"2\x00", b"0x2")
        ),
        OK + CHUNKED + b"2 \nhi\r\n0\r\n\r\n",
        OK + CHUNKED + b"fffffffffffffffff\r\nhi",
    ],
)
def test_an_invalid_response_or_one_with_an_unclear_end_is_refused(data):
    assert told([data]) == told(bytewise(data)) == "refused"
    with pytest.raises(httpx.RemoteProtocolError) as caught:
        fed(data)
    assert str(caught.value) == "expected HTTP/1.1"
    assert caught.value.__cause__ is None


def test_folded_lines_are_joined_with_blanks():
    answer = fed(OK + b"X: a\r\n\tb\r\nY: c\r\n" + TWO)
    assert answer.headers == [(b"X", b"a  \tb"), (b"Y", b"c"), (b"Content-Length", b"2")]


def test_a_folded_head_that_is_cut_is_refused():
    with pytest.raises(httpx.RemoteProtocolError, match=ENDED):
        fed(OK + b"X: a\r\n b\r\n", b"")


def test_an_unsupported_coding_on_its_own_line_is_refused():
    assert told([OK + b"Transfer-Encoding: gzip\r\n" + CHUNKED + HI]) == "refused"


def test_bytes_after_the_response_prevent_reuse_of_the_connection():
    for late in (b"H", b"x", OK + TWO, OK, b"\x00"):
        answer = fed(OK + TWO)
        assert answer.leaves_reusable
        answer.feed(late)
        assert not answer.leaves_reusable
        answer.feed(late)
        assert not answer.leaves_reusable
        assert (answer.status, answer.headers, answer.take()) == (200, [(b"Content-Length", b"2")], b"hi")


def test_headers_of_interim_responses_are_not_headers_of_the_response():
    answer = fed(b"HTTP/1.1 103 Early\r\nContent-Encoding: gzip\r\n\r\n" + OK + TWO)
    assert answer.headers == [(b"Content-Length", b"2")]


def test_trailers_are_no_headers():
    data = OK + CHUNKED + HI[:-2] + b"Content-Encoding: gzip\r\n\r\n"
    assert fed(data).headers == [(b"Transfer-Encoding", b"chunked")]


@pytest.mark.parametrize("size", [1, 1000, 70_000])
def test_a_body_ends_after_its_trailers(size):
    answer = fed(OK + CHUNKED + HI[:-2] + b"X: " + b"y" * size + b"\r\n\r\n")
    assert (answer.take(), answer.is_whole, answer.leaves_reusable) == (b"hi", True, True)


def test_endless_trailers_are_not_kept_in_memory():
    answer = fed(OK + CHUNKED + HI[:-2])
    for _ in range(50):
        answer.feed(b"X: %b\r\n" % (b"y" * 60_000))
    assert sum(len(value) for _, value in answer.headers) < 2**20


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (b"", b"X: y\r\n"),
        (b"", b"X: " + b"y" * 5000 + b"\r\n"),
        (b"X: y", b"\r\n " + b"y" * 1000),  # folded
    ],
)
def test_an_endless_head_is_refused(first, line):
    answer, taken = fed(OK + first), 0
    with pytest.raises(httpx.RemoteProtocolError):
        while taken < 2**20:
            answer.feed(line)
            taken += len(line)
    assert 90 * 1024 < taken < 110 * 1024


def test_endless_interim_responses_are_refused():
    answer = ResponseParser()
    with pytest.raises(httpx.RemoteProtocolError):
        for _ in range(10_000):
            answer.feed(b"HTTP/1.1 100 Continue\r\n\r\n")


def test_a_large_body_is_no_large_head():
    answer = fed(OK + b"Content-Length: 1000000\r\n\r\n")
    size = 0
    for _ in range(10):
        answer.feed(b"x" * 100_000)
        size += len(answer.take())
    assert (answer.is_whole, size) == (True, 1_000_000)


def test_the_body_is_taken_part_by_part():
    answer = fed(OK + CHUNKED + b"2\r\nh")
    assert answer.take() == b"h"
    assert answer.take() == b""
    answer.feed(b"i\r\n3\r\nyou\r\n")
    assert answer.take() == b"iyou"
    assert not answer.leaves_reusable
    answer.feed(b"0\r\n\r\n")
    assert answer.leaves_reusable


def test_bytes_after_a_whole_response_are_surplus():
    answer = fed(OK + TWO)
    assert answer.leaves_reusable
    answer.feed(OK + TWO)
    assert (answer.is_whole, answer.leaves_reusable) == (True, False)
    assert answer.take() == b"hi"


def test_empty_lines_after_a_whole_response_are_ignored_however_the_bytes_are_split():
    for parts in ([OK + TWO + b"\r\n\r\n"], [OK + TWO, b"\r\n", b"\r\n"]):
        assert fed(*parts).leaves_reusable


# --- Any response in any parts, compared with another parser


_bodies = st.binary(max_size=40)
_plain = st.sampled_from(
    [b"X: y", b"Date: x", b"Server:", b"Retry-After: 3", b"Keep-Alive: timeout=5", b"Connection: close"]
)


@st.composite
def answers(draw) -> bytes:
    interim = b"".join(draw(st.lists(st.sampled_from([b"HTTP/1.1 100 Continue\r\n\r\n"]), max_size=2)))
    version, status = (
        draw(st.sampled_from([b"1.1", b"1.1", b"1.0"])),
        draw(st.sampled_from([200, 204, 304, 400, 503])),
    )
    headers, body = draw(st.lists(_plain, max_size=3)), draw(_bodies)
    if status in {204, 304}:
        body = b""
    elif version == b"1.1" and draw(st.booleans()):
        headers.append(b"Transfer-Encoding: chunked")
        size = draw(st.integers(1, 9))
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    elif draw(st.booleans()):
        headers.append(b"Content-Length: %d" % len(body))
    headers = draw(st.permutations(headers))
    head = b"\r\n".join([b"HTTP/%b %d Some thing" % (version, status), *headers])
    return interim + head + b"\r\n\r\n" + body + draw(st.sampled_from([b"", b"", b"x"]))


def by_h11(parts: list[bytes]) -> Any:
    """Return the response that h11 reads from the parts, or None if it refuses them."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    status, headers, body, is_whole = 0, [], b"", False
    try:
        for part in parts:
            connection.receive_data(part)
            while not is_whole:
                match connection.next_event():
                    case h11.NEED_DATA:
                        break
                    case h11.Response() as response:
                        status, headers = response.status_code, response.headers.raw_items()
                    case h11.Data() as data:
                        body += bytes(data.data)
                    case h11.EndOfMessage():
                        is_whole = True
    except h11.RemoteProtocolError:
        return None
    reusable = connection.our_state is h11.DONE and connection.their_state is h11.DONE
    return status, headers, body, is_whole, reusable and not connection.trailing_data[0]


@settings(max_examples=300)
@given(data=answers(), cuts=st.lists(st.floats(0, 1), max_size=5), ends=st.booleans())
def test_the_parser_agrees_with_h11_however_the_bytes_are_split(data, cuts, ends):
    places = sorted({0, *(int(cut * len(data)) for cut in cuts), len(data)})
    parts = [data[start:end] for start, end in pairwise(places)]
    ended = [b""] if ends else []
    ours, theirs = told([*parts, *ended]), by_h11([*parts, *ended])
    assert ours == told([data, *ended])
    if theirs is None:
        assert ours == "refused"
    else:  # after the end of the connection, reuse does not matter
        assert ours[: 4 if ends else 5] == theirs[: 4 if ends else 5]


@settings(max_examples=300)
@given(data=st.binary(max_size=60) | st.binary(max_size=20).map(lambda data: OK + data), ends=st.booleans())
def test_any_bytes_are_a_response_or_refused(data, ends):
    parts = [data] if data else []
    seen = told([*parts, *([b""] if ends else [])])
    assert seen == told([*bytewise(data), *([b""] if ends else [])])
    assert seen == "refused" or not seen[3] or seen[0] >= 200


@pytest.mark.parametrize("struck", [SystemExit, KeyboardInterrupt, LookupError])
def test_an_exception_of_a_signal_handler_during_parsing_propagates(struck, monkeypatch):
    def strike(*_: object) -> None:
        raise struck("told to end")

    for callback in ("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete"):
        with monkeypatch.context() as patch:
            patch.setattr(ResponseParser, callback, strike)
            with pytest.raises(struck, match="told to end"):
                ResponseParser().feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")


def test_several_values_of_a_name_are_joined():
    answer = fed(OK + b"A: 1\r\na: 2\r\nA: 3\r\nB: 4\r\n" + TWO)
    assert answer.fields == {b"a": b"1, 2, 3", b"b": b"4", b"content-length": b"2"}


@pytest.mark.parametrize("surplus", [b" ", b"\t\r\n", b"X"])
def test_only_ends_of_lines_may_come_after_a_response(surplus):
    assert fed(OK + TWO, b"\r\n").leaves_reusable
    assert not fed(OK + TWO, surplus).leaves_reusable


@pytest.mark.parametrize("more", [0, 1])
def test_a_head_has_a_largest_size(more):
    start = OK + b"A: "
    parts = [start, b"x" * (http1._HEAD_BYTES - len(start) + more)]
    if more:
        with pytest.raises(httpx.RemoteProtocolError):
            fed(*parts)
    else:
        assert fed(*parts, b"\r\n" + TWO).status == 200
