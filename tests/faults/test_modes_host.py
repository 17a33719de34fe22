"""Failure modes of the host: its threads, forks and signal handlers, and clients that it drops."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import doubles
import pytest
import wire as wires
from fault_server import PROCESSED, RIGHT, FaultServer, answer, read, silence, surplus, tls_server, wait
from kit import ONCE, call, client_of

from sampling_async import InvalidRequestError, TransportError, TransportTimeoutError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what was acknowledged")
FORKS = pytest.mark.skipif(sys.platform == "win32", reason="it knows no forks")
TIMED = 5


# --- 40: a response to another request


class Deaf:
    """Steps that let the kernel drop what a connection receives, and accept it again; sending still works."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def begin(self, exchange) -> None:
        drop_all = ctypes.create_string_buffer(b"\x06\0\0\0\0\0\0\0")  # BPF: accept 0 bytes of each packet
        program = (1).to_bytes(8, sys.byteorder) + ctypes.addressof(drop_all).to_bytes(8, sys.byteorder)
        sock = exchange.connection.sock
        sock.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
        sock.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )  # otherwise its data would wait for our acknowledgement

    def until_told(self, _exchange) -> None:
        self.go_on.wait(TIMED)

    def end(self, exchange) -> None:
        exchange.connection.sock.setsockopt(socket.SOL_SOCKET, 27, 0)  # SO_DETACH_FILTER


@LINUX
@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
async def test_mode_40_bytes_that_came_before_the_request_arrived_are_no_response(tls, monkeypatch):
    """A second response to the previous request, so late that the next request is already on its way."""
    deaf = Deaf()
    late = [read(), deaf.begin, answer(), deaf.until_told, surplus(), deaf.end]
    with tls_server("none" if tls else "plain_text", late) as (server, https, authorities):
        monkeypatch.setenv("SSL_CERT_FILE", authorities)
        async with client_of(https if tls else server.url, retry=ONCE) as client:
            await client.bulk_invite("m1", [2])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_tell_after, deaf.go_on, 0.05)
                result = await client.bulk_invite("m2", [2])
    assert result[0].status == "unknown"
    assert isinstance(result[0].error, TransportError)


async def _tell_after(event: threading.Event, seconds: float) -> None:
    await anyio.sleep(seconds)
    event.set()


@LINUX
async def test_mode_40_the_response_to_a_retransmitted_request_is_accepted():
    """The first packets are lost; the retransmitted ones are acknowledged together with the response."""
    deaf = Deaf()
    lossy = [read(), deaf.begin, answer(), deaf.until_told, deaf.end]
    with FaultServer(lossy) as server:
        async with client_of(server.url, retry=ONCE) as client:
            await client.bulk_invite("m1", [2])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_tell_after, deaf.go_on, 0.02)
                result = await client.bulk_invite("m2", [2])
        assert result[0].status == "invited"
        assert server.opened == 1


@pytest.mark.parametrize("said", ["an answer", "the end"])
async def test_mode_40_bytes_that_came_before_it_is_asked_are_no_response(said, monkeypatch):
    def script(connection) -> None:
        if said == "an answer":
            connection.send(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"Invites":[]}')
            sent.set()
            received.append(connection.read_request())
        else:
            connection.sock.shutdown(socket.SHUT_WR)
            sent.set()

    sent = threading.Event()
    doubles.connections_opened(monkeypatch, pause=partial(doubles.until, sent.is_set))
    received: list[bytes | None] = []
    with wires.serve(script) as url:
        async with client_of(url, retry=ONCE) as client:
            result = await client.bulk_invite("m1", [2])
    assert result[0].status == "not_sent"
    assert [request for request in received if request] == []


async def test_mode_40_tls_session_tickets_are_no_response(monkeypatch):
    # The tickets follow the handshake.
    doubles.connections_opened(monkeypatch, pause=partial(anyio.sleep, 0.02))
    with tls_server("none") as (_, https, authorities):
        monkeypatch.setenv("SSL_CERT_FILE", authorities)
        async with client_of(https, retry=ONCE) as client:
            assert len(await client.get_settings()) == 2


# --- 41: an end that TLS does not confirm


@pytest.mark.parametrize("vouched", [False, True], ids=["cut", "ended"])
async def test_mode_41_an_end_that_tls_does_not_vouch_for_does_not_end_the_response(vouched, monkeypatch):
    def end(exchange) -> None:
        exchange.send(exchange.right("close"))
        if vouched:
            with suppress(OSError):  # the client may have closed already
                exchange.connection.sock.unwrap()
        exchange.connection.sock.close()
        exchange.over = True

    with tls_server("none", [*PROCESSED, end]) as (_, https, authorities):
        monkeypatch.setenv("SSL_CERT_FILE", authorities)
        async with client_of(https, retry=ONCE) as client:
            result = await client.bulk_invite("m1", [2])
    assert result[0].status == ("invited" if vouched else "unknown")


# --- 42: busy threads of the host


class NoThreads(ThreadPoolExecutor):
    """An executor without a free thread, as the host application's may be."""

    def submit(self, *_: object) -> None:
        raise RuntimeError("this thread is the host's")


@pytest.mark.asyncio
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_mode_42_connections_open_while_the_threads_of_the_host_are_busy(host, monkeypatch):
    asyncio.get_running_loop().set_default_executor(executor := NoThreads(1))
    monkeypatch.setattr(anyio.to_thread, "run_sync", executor.submit)
    with FaultServer() as server:
        async with client_of(server.url.replace("127.0.0.1", host), retry=ONCE) as client:
            assert (await client.bulk_invite("m1", [2]))[0].status == "invited"


async def test_mode_42_nothing_is_sent_if_no_thread_can_be_started(monkeypatch):
    def refuse(_thread) -> None:
        raise RuntimeError("can't start new thread")

    with FaultServer() as server:
        async with client_of(server.url.replace("127.0.0.1", "localhost"), retry=ONCE) as client:
            monkeypatch.setattr(threading.Thread, "start", refuse)
            monkeypatch.setattr("sampling_async._pacing.threads._idle", [])  # none waits for work
            result = await client.bulk_invite("m1", [2])
            monkeypatch.undo()
    assert result[0].status == "not_sent"


# --- 43: clients that are dropped


@pytest.mark.asyncio
@pytest.mark.parametrize("collected_in", ["this thread", "another"])
async def test_mode_43_a_client_that_is_dropped_leaves_nothing_in_the_event_loop(collected_in):
    """A new socket with the same descriptor number can be watched as usual."""
    loop = asyncio.get_running_loop()
    with FaultServer() as server:
        client = client_of(server.url)
        # An accept() that waits holds a number already: lower ones are kept free for that of the server.
        lower = [socket.socketpair() for _ in range(5)]
        await client.get_settings()
        (connection,) = client._session.engine._idle
        descriptor = connection._wire._sock.fileno()
        _close(lower)
        collect = asyncio.to_thread if collected_in == "another" else _here
        with pytest.warns(ResourceWarning, match=r"unclosed SamplingClient of 127.0.0.1: use"):  # noqa: PT031
            del client, connection  # in here: the garbage collector may come at any time
            await collect(gc.collect)
        await anyio.sleep(0.005)
        heard = asyncio.Event()
        # The system gives the lowest free number.
        pairs = [socket.socketpair()]
        while descriptor not in [sock.fileno() for sock in pairs[-1]]:
            assert len(pairs) < 100, "the descriptor was not closed"
            pairs.append(socket.socketpair())
        ours, theirs = pairs[-1]
        if theirs.fileno() == descriptor:
            ours, theirs = theirs, ours
        loop.add_reader(ours, heard.set)
        theirs.send(b"x")
        await asyncio.wait_for(heard.wait(), 60)
        loop.remove_reader(ours)
        _close(pairs)


def _close(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    for sock in (sock for pair in pairs for sock in pair):
        sock.close()


async def _here(function) -> None:
    function()


async def test_mode_43_a_client_that_never_called_may_be_dropped():
    client_of("http://127.0.0.1:1")
    gc.collect()


@pytest.mark.asyncio
async def test_mode_43_a_cancelled_aclose_has_closed_the_idle_connections():
    stubborn = asyncio.Event()
    with FaultServer(RIGHT, then=[*PROCESSED, silence()]) as server:
        client = client_of(server.url, retry=ONCE)
        await client.get_settings()
        engine = client._session.engine
        (idle,) = engine._idle

        async def hold() -> None:
            with client._session.until_closed():
                await stubborn.wait()

        holding = asyncio.create_task(_shielded(hold))
        await asyncio.sleep(0)
        closing = asyncio.create_task(client.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert idle._wire._sock.fileno() == -1
        stubborn.set()
        await holding
        await client.aclose()


async def _shielded(run) -> None:
    with anyio.CancelScope(shield=True):
        await run()


@pytest.mark.parametrize("runs", ["asyncio", "uvloop"])
def test_mode_45_a_reset_close_behind_some_bytes_is_noticed_at_once_on_any_loop(runs):
    """Uvloop tells of both at once, and of nothing afterwards."""
    run = asyncio.run if runs == "asyncio" else pytest.importorskip("uvloop").run
    begun = "HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n["
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        accepted, _ = server.accept()
        accepted.recv(65536)
        accepted.send(begun.encode())
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()

    async def main() -> None:
        async with client_of(f"http://127.0.0.1:{server.getsockname()[1]}", retry=ONCE) as client:
            with pytest.raises(TransportError) as caught:
                await client.get_settings(deadline=20)
            assert not isinstance(caught.value, TransportTimeoutError)

    thread = threading.Thread(target=serve)
    thread.start()
    with server:
        run(main())
        thread.join()


@pytest.mark.asyncio
async def test_mode_46_connections_and_timers_keep_no_context_of_a_finished_request():
    """In the context of a task, hosts have requests of their own, sessions of databases and the like."""

    class Session:
        pass

    held, made = ContextVar("held"), []

    async def request() -> None:
        session = Session()
        held.set(session)
        made.append(weakref.ref(session))
        await client.get_settings()

    with FaultServer() as server:
        async with client_of(server.url) as client:
            await asyncio.gather(*(asyncio.create_task(request()) for _ in range(4)))
            await asyncio.sleep(0)
            gc.collect()
            assert client.snapshot().connections.idle
            assert [each() for each in made] == [None] * 4


# --- 44: forks and second event loops


@FORKS
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mode_44_a_child_and_its_parent_do_not_share_connections():
    code = """
import asyncio, os, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[2:]
from kit import client_of

loop = asyncio.new_event_loop()
client = client_of(sys.argv[1])
ask = lambda member: loop.run_until_complete(client.bulk_invite(member, [2, 4]))
ask("before")
child = os.fork()
name = "parent" if child else "child"
for n in range(3):
    for outcome in ask(f"{name}{n}"):
        if outcome.status != "invited" or f"/{name}{n}/" not in outcome.invite.url:
            os._exit(3)
if not child:
    os._exit(0)
_, status = os.waitpid(child, 0)
loop.run_until_complete(client.aclose())
sys.exit(os.waitstatus_to_exitcode(status))
"""
    folder = Path(__file__).parent
    with FaultServer(then=[*PROCESSED, wait(0.05), answer()]) as server:  # long enough for both requests
        paths = [str(folder), str(folder.parent)]
        done = subprocess.run(
            [sys.executable, "-c", code, server.url, *paths], timeout=30, check=False, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
        assert server.opened == 2
        assert set(server.ledger.invites.values()) == {1}


@pytest.mark.asyncio
async def test_mode_44_a_busy_client_refuses_a_second_event_loop_at_once():
    with FaultServer(then=[*PROCESSED, silence()]) as server:
        client = client_of(server.url, max_concurrency=1, retry=ONCE)

        def elsewhere() -> float:
            began = time.monotonic()
            with pytest.raises(InvalidRequestError, match="another event loop"):
                asyncio.run(asyncio.wait_for(client.get_settings(), 60))
            with pytest.raises(InvalidRequestError, match="another event loop"):
                asyncio.run(asyncio.wait_for(client.bulk_invite("m1", [1]), 60))
            return time.monotonic() - began

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_closed, client)
            await server.has_received(1)
            assert await anyio.to_thread.run_sync(elsewhere) < 30
            await client.aclose()


async def _until_closed(client) -> None:
    with pytest.raises(Exception, match="closed during the call"):
        await call(client, "get_settings")
