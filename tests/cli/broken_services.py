"""Services with one thing wrong each, for `sampling-async doctor`: blocks that yield an environment."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import real_proxies
import trustme
import uvicorn

from sampling_async.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

WRONG_KEY = "cafecafe-0000-4000-8000-00000000cafe"
EXPIRED = timedelta(days=3)
AHEAD = timedelta(minutes=7)


def environment(simulator: Simulator, base_url: str, **more: str) -> dict[str, str]:
    """Return the variables that lead to a service."""
    return {
        "SAMPLING_BASE_URL": base_url,
        "SAMPLING_PANEL_GUID": simulator.panel_guid,
        "SAMPLING_API_KEY": simulator.api_key,
        **more,
    }


def connect_within(monkeypatch: Any, seconds: float) -> None:
    """Let `doctor` wait no longer than this for a connection."""
    monkeypatch.setattr("sampling_async._cli._doctor.CONNECT_SECONDS", seconds)


@contextmanager
def in_order() -> Iterator[dict[str, str]]:
    """Yield a service with nothing wrong."""
    simulator = Simulator(seed=3)
    with simulator.serve() as base_url:
        yield environment(simulator, base_url)


@contextmanager
def dropped_header() -> Iterator[dict[str, str]]:
    """Yield a service behind an nginx that drops names with underscores, as it does by default."""
    simulator = Simulator(seed=3)
    with simulator.serve() as backend, real_proxies.nginx(backend, underscores="off") as base_url:
        yield environment(simulator, base_url)


@contextmanager
def expired_certificate() -> Iterator[dict[str, str]]:
    """Yield a service whose certificate has expired."""
    authority, simulator, now = trustme.CA(), Simulator(seed=3), datetime.now(UTC)
    issued = authority.issue_cert("localhost", not_before=now - 9 * EXPIRED, not_after=now - EXPIRED)
    with TemporaryDirectory() as folder:
        authority.cert_pem.write_to_path(f"{folder}/authority.pem")
        issued.private_key_and_cert_chain_pem.write_to_path(f"{folder}/server.pem")
        options = {"ssl_certfile": f"{folder}/server.pem", "ssl_keyfile": f"{folder}/server.pem"}
        with served(simulator.app, **options) as port:
            trusted = {"SAMPLING_CA_FILE": f"{folder}/authority.pem"}
            yield environment(simulator, f"https://localhost:{port}", **trusted)


@contextmanager
def wrong_clock() -> Iterator[dict[str, str]]:
    """Yield a service whose clock is ahead."""
    simulator = Simulator(seed=3)

    async def ahead(scope: Any, receive: Any, send: Any) -> None:
        async def dated(message: Any) -> None:
            if message["type"] == "http.response.start":
                date = format_datetime(datetime.now(UTC) + AHEAD, usegmt=True)
                message = {**message, "headers": [*message["headers"], (b"date", date.encode())]}
            await send(message)

        await simulator.app(scope, receive, dated)

    with served(ahead, date_header=False) as port:
        yield environment(simulator, f"http://127.0.0.1:{port}")


@contextmanager
def wrong_key() -> Iterator[dict[str, str]]:
    """Yield a service that does not know our key."""
    with in_order() as right:
        yield {**right, "SAMPLING_API_KEY": WRONG_KEY}


@contextmanager
def dead_proxy() -> Iterator[dict[str, str]]:
    """Yield a service behind a proxy that nobody runs."""
    with in_order() as right, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and never listened on, so nobody else gets the port
        yield {**right, "SAMPLING_PROXY": f"http://127.0.0.1:{taken.getsockname()[1]}"}


BROKEN: dict[str, Callable[[], AbstractContextManager[dict[str, str]]]] = {
    "nginx drops the header": dropped_header,
    "the certificate has expired": expired_certificate,
    "a clock is wrong": wrong_clock,
    "the key is wrong": wrong_key,
    "the proxy is dead": dead_proxy,
}


@contextmanager
def served(app: Any, **options: Any) -> Iterator[int]:
    """Serve an application in a thread, with options of uvicorn; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, lifespan="off", log_config=None, log_level="critical", **options)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]  # it listens by now: the first connection waits in its queue
        finally:
            server.should_exit = True
            thread.join()
