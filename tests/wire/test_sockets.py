"""Connections as sockets: opening in a race, sending in parts, reporting when bytes leave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import threading

import anyio
import pytest

from sampling_async._wire import sockets as _sockets
from sampling_async._wire.sockets import Lookups, Wire, connect


@contextlib.contextmanager
def pair():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


async def test_a_large_message_is_sent_completely_and_reported():
    told = []
    with pair() as (ours, theirs):
        received = bytearray()

        def read() -> None:
            while len(received) < 2_000_000:
                received.extend(theirs.recv(65536))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, read)
            await Wire(ours).send(b"x" * 2_000_000, told.append)
    assert len(received) == 2_000_000
    assert set(told) == {True}


async def test_no_byte_is_reported_as_sent_while_the_peer_reads_nothing():
    told = []
    with pair() as (ours, _):
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(b"x" * 65536)
        with anyio.move_on_after(0.005):
            await Wire(ours).send(b"x", told.append)
    assert told == [True, False]


async def test_unread_bytes_or_the_end_are_detected_without_reading():
    with pair() as (ours, theirs):
        line = Wire(ours)
        assert line.is_quiet()
        await line.send(b"a", lambda _: None)
        theirs.send(b"x")
        assert not line.is_quiet()
        assert await line.receive() == b"x"
        theirs.close()
        assert not line.is_quiet()
        assert await line.receive() == b""
        line.close()
        assert not line.is_quiet()


class Scripted:
    """A TLS socket with scripted calls: an exception is raised, anything else is returned."""

    def __init__(self, *steps) -> None:
        self.steps = list(steps)

    def _step(self, *_: object):
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    send = do_handshake = _step

    def recv(self, most: int):
        assert most > 0
        return self._step()

    family = socket.AF_UNIX

    def close(self) -> None:
        pass

    def fileno(self) -> int:
        return -1


@pytest.fixture
def waits(monkeypatch) -> list[str]:
    """Record waits for a socket instead of waiting."""
    seen: list[str] = []

    async def readable(*_: object, again: bool = True) -> None:
        seen.append("read")

    async def writable(*_: object) -> None:
        seen.append("write")

    monkeypatch.setattr(Wire, "_readable", readable)
    monkeypatch.setattr(Wire, "_writable", writable)
    monkeypatch.setattr(anyio, "wait_readable", readable)
    monkeypatch.setattr(anyio, "wait_writable", writable)
    return seen


WANTS = (ssl.SSLWantReadError(), ssl.SSLWantWriteError())


async def test_tls_may_need_to_read_in_order_to_write_and_vice_versa(waits):
    sending = Scripted(*WANTS, 1)
    await Wire(sending).send(b"x", lambda _: None)
    receiving = Scripted(*WANTS, b"x")
    assert await Wire(receiving).receive() == b"x"
    await _sockets._handshake(Scripted(*WANTS, None))
    assert waits == ["read", "write", "read", "read", "write", "read", "write"]


class Refused(ssl.SSLError):
    reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"


async def test_an_alert_of_tls_is_raised_and_other_bytes_are_not(monkeypatch):
    monkeypatch.setattr(Wire, "is_quiet", lambda _: False)
    refused = Wire(Scripted(Refused(1, "refused")))
    refused._tls = refused._sock
    with pytest.raises(Refused):
        refused.is_silent()
    for said in (ConnectionResetError(104, "reset"), ssl.SSLWantReadError(2, "more"), b"x"):
        other = Wire(Scripted(said))
        other._tls = other._sock
        assert other.is_silent() is isinstance(said, ssl.SSLWantReadError)
    assert not Wire(Scripted()).is_silent()


async def test_a_bare_socket_is_written_and_read_completely():
    with pair() as (ours, theirs):
        data = b"x" * 2_000_000  # more than the system accepts at once
        received = bytearray()

        def read() -> None:
            while len(received) < len(data):
                received.extend(theirs.recv(65536))
            theirs.send(b"yes")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, read)
            await _sockets.send_whole(ours, data)
            assert await _sockets.received(ours) == b"yes"


async def test_a_socket_that_only_seems_readable_is_waited_for_again(waits):
    assert await _sockets.received(Scripted(BlockingIOError(), b"x")) == b"x"
    assert waits == ["read", "read"]


async def test_a_refused_connection_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    with pytest.raises(ConnectionRefusedError):
        await connect([(socket.AF_INET, address)], "127.0.0.1", None)


@pytest.fixture
def addresses(monkeypatch):
    """Script the result of connecting to each of these addresses."""

    def use(ways: dict[str, object]) -> list[socket.socket]:
        opened: list[socket.socket] = []
        use.found = [(socket.AF_INET6 if ":" in name else socket.AF_INET, (name, 1)) for name in ways]

        async def connected(_family: int, address: tuple[str, int]) -> socket.socket:
            tried.append(address[0])
            way = ways[address[0]]
            if isinstance(way, Exception):
                raise way
            if way == "never":
                # The next address has all the time it needs, however slow the machine is.
                monkeypatch.setattr(_sockets, "_HEAD_START", 60)
                await anyio.sleep_forever()
            opened.append(socket.socket())
            return opened[-1]

        monkeypatch.setattr(_sockets, "_connected", connected)
        monkeypatch.setattr(_sockets, "_HEAD_START", 0.002)
        return opened

    tried: list[str] = []
    use.tried = tried
    return use


async def test_a_dead_address_costs_a_head_start_and_families_take_turns(addresses):
    opened = addresses({"a::1": "never", "a::2": "never", "1.1.1.1": "works", "1.1.1.2": "works"})
    (await connect(addresses.found, "host", None)).close()
    assert addresses.tried == ["a::1", "1.1.1.1"]
    assert len(opened) == 1


async def test_a_refusal_starts_the_next_address_at_once_and_the_last_is_reported(addresses, monkeypatch):
    addresses({"a::1": OSError(1, "first"), "1.1.1.1": OSError(1, "last")})
    monkeypatch.setattr(_sockets, "_HEAD_START", 60)
    with anyio.fail_after(60), pytest.raises(OSError, match="last"):
        await connect(addresses.found, "host", None)


async def test_a_loser_of_the_race_is_closed(addresses, monkeypatch):
    """Two addresses can connect in the same turn of the event loop."""
    opened = addresses({"a::1": "works", "1.1.1.1": "works"})
    gate = anyio.Event()
    connected = _sockets._connected

    async def together(family: int, address: tuple[str, int]) -> socket.socket:
        if len(addresses.tried) == 1:
            gate.set()
        sock = await connected(family, address)
        with anyio.CancelScope(shield=True):
            await gate.wait()
        return sock

    monkeypatch.setattr(_sockets, "_connected", together)
    winner = await connect(addresses.found, "host", None)
    assert len(opened) == 2
    assert sorted(sock.fileno() >= 0 for sock in opened) == [False, True]
    winner.close()


async def test_a_winner_is_closed_when_the_race_is_cancelled(addresses, monkeypatch):
    opened = addresses({"a::1": "works", "1.1.1.1": "never"})
    connected = _sockets._connected
    with anyio.CancelScope() as scope:

        async def late(family: int, address: tuple[str, int]) -> socket.socket:
            sock = await connected(family, address)
            scope.cancel()
            return sock

        monkeypatch.setattr(_sockets, "_connected", late)
        await connect(addresses.found, "host", None)
        pytest.fail("was not cancelled")
    assert [sock.fileno() for sock in opened] == [-1]


async def test_a_failed_handshake_closes_the_socket(addresses):
    opened = addresses({"1.1.1.1": "works"})

    class Refusing:
        def wrap_socket(self, *_: object, **__: object) -> None:
            raise ssl.SSLError("no")

    with pytest.raises(ssl.SSLError):
        await connect(addresses.found, "host", Refusing())
    assert opened[0].fileno() == -1


# --- Signal handlers that raise, forks and garbage collection


class Struck(Scripted):
    """A socket whose calls are interrupted by a signal handler that raises."""

    def recv(self, *_: object) -> bytes:
        raise TimeoutError("alarm")


async def test_an_exception_of_a_signal_handler_is_not_taken_for_a_close(monkeypatch):
    wire = Wire(Struck())
    with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="alarm"):
        patch.setattr(socket.socket, "recv", Struck.recv)
        wire.is_quiet()
    monkeypatch.setattr(Wire, "is_quiet", lambda _: False)
    wire._tls = wire._sock
    with pytest.raises(TimeoutError, match="alarm"):
        wire.is_silent()


async def test_an_exception_of_a_signal_handler_during_the_race_propagates(addresses):
    opened = addresses({"a::1": TimeoutError("alarm"), "1.1.1.1": "works"})
    with pytest.raises(TimeoutError, match="alarm"):
        await connect(addresses.found, "host", None)
    assert [sock.fileno() for sock in opened] in ([], [-1])


async def test_a_closed_socket_is_not_quiet():
    with pair() as (ours, theirs):
        wire = Wire(ours)
        ours.close()
        assert not wire.is_quiet()
        theirs.close()
        with pytest.raises(OSError, match="descriptor"):
            await wire.send(b"x", lambda _: None)


async def test_a_name_that_no_certificate_can_have_is_an_error_of_the_system(addresses):
    addresses({"1.1.1.1": "works"})
    context = ssl.create_default_context()
    with pytest.raises(OSError, match=r"the host name cannot be in a certificate$") as caught:
        await connect(addresses.found, ".example", context)
    assert caught.value.errno == errno.EINVAL


async def test_a_socket_opened_before_a_fork_is_not_used_after_it(monkeypatch):
    with pair() as (ours, theirs):
        wire = Wire(ours)
        theirs.send(b"x")
        assert await wire.receive() == b"x"
        theirs.send(b"y")
        assert await wire.receive() == b"y"
        assert wire.is_quiet()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert not wire.is_quiet()
        wire.close()
        assert ours.fileno() == -1


@pytest.mark.asyncio
async def test_a_socket_closed_in_another_thread_is_closed_by_its_loop_or_there_if_the_loop_ended(monkeypatch):
    loop = asyncio.get_running_loop()
    for ended in (False, True):
        with pair() as (ours, theirs):
            wire = Wire(ours)
            theirs.send(b"x")
            await wire.receive()
            if ended:

                def refuse(_: object) -> None:
                    raise RuntimeError("Event loop is closed")

                monkeypatch.setattr(loop, "call_soon_threadsafe", refuse)
            thread = threading.Thread(target=wire.close)
            thread.start()
            thread.join()
            assert (ours.fileno() == -1) is ended
            monkeypatch.undo()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert ours.fileno() == -1
            loop.remove_reader(wire._waits._fd)


def caught(raise_it) -> OSError:
    """Return an error as one who calls `raise_it` catches it: its traceback begins here."""
    try:
        raise_it()
    except OSError as exc:
        return exc.with_traceback(exc.__traceback__.tb_next)  # without this frame
    raise AssertionError


@pytest.mark.parametrize(
    ("number", "frames", "is_tls", "proves_it"),
    [
        (32, 1, False, True),
        (None, 1, False, False),
        (32, 2, False, False),
        (32, 1, True, False),
        (32, 0, False, False),
    ],
)
async def test_an_error_of_the_system_in_a_bare_send_proves_that_nothing_left(
    number, frames, is_tls, proves_it
):
    def fail(depth: int = frames) -> None:
        if depth > 1:
            fail(depth - 1)
        raise OSError(number, "broken") if number else TimeoutError("alarm")

    exc = caught(fail) if frames else OSError(number, "never raised")
    with pair() as (ours, _):
        line = Wire(ours)
        line._tls = ours if is_tls else None
        assert line._sent_no_byte(exc) is proves_it


async def test_a_peer_that_accepts_nothing_is_too_slow_after_the_limit():
    with pair() as (ours, _), anyio.fail_after(60):
        with pytest.raises(_sockets.TooSlow):
            await Wire(ours).send(b"x" * 5_000_000, lambda _: None, 0.02)


def test_of_several_failures_the_last_of_a_signal_handler_counts_or_the_last_of_all():
    refused, reset = ConnectionRefusedError(111, "refused"), ConnectionResetError(104, "reset")
    alarm = TimeoutError("alarm")
    _sockets._raise_one_of([refused], none_won=False)
    _sockets._raise_one_of([], none_won=False)
    for failures, none_won, raised in (
        ([refused, reset], True, reset),
        ([refused, alarm, reset], True, alarm),
        ([alarm], False, alarm),
    ):
        with pytest.raises(OSError) as told:  # noqa: PT011  any of them
            _sockets._raise_one_of(failures, none_won=none_won)
        assert told.value is raised


async def test_a_peer_that_sends_nothing_is_too_slow_after_the_limit():
    with pair() as (ours, _), anyio.fail_after(60):
        with pytest.raises(_sockets.TooSlow):
            await Wire(ours).receive(0.02)


# --- Addresses of hosts


async def test_lookups_of_one_host_are_shared_and_outlive_the_first_caller(monkeypatch):
    go_on, asked = threading.Event(), []
    real = socket.getaddrinfo

    def getaddrinfo(host, port, **options):
        if options["flags"]:
            return real(host, port, **options)
        asked.append(host)
        go_on.wait(5)
        if host == b"nowhere.example":
            raise socket.gaierror(-2, "Name or service not known")
        return real("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    lookups, found = Lookups(), []

    async def look_up(host: str) -> None:
        try:
            found.append(await lookups.addresses(host, 80))
        except OSError as exc:
            found.append(exc.errno)

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as first:
            first.start_soon(look_up, "service.example")
            await anyio.wait_all_tasks_blocked()
            for host in ("service.example", "service.example", "nowhere.example", "nowhere.example"):
                tasks.start_soon(look_up, host)
            await anyio.wait_all_tasks_blocked()
            first.cancel_scope.cancel()
        go_on.set()
    assert found.count([(socket.AF_INET, ("127.0.0.1", 80))]) == found.count(-2) == 2
    assert sorted(asked) == [b"nowhere.example", b"service.example"]
    await look_up("service.example")
    assert len(asked) == 3


@pytest.mark.parametrize("number", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_an_ip_address_is_not_looked_up(number, monkeypatch):
    monkeypatch.setattr("sampling_async._wire.sockets.start", None)
    ((_, address),) = await Lookups().addresses(number, 80)
    assert address[0] == number
