"""Helpers for the tests of this folder: clients, the five calls, checks that nothing leaks or is shown."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import doubles
import httpx

from sampling_async import OutagePolicy, RetryPolicy, SamplingClient, Timeouts

ONCE = RetryPolicy(max_attempts=1)
_TESTS = Path(__file__).parent
QUICK = Timeouts(connect=0.5, read=0.03, wall=0.5)
"""For faults that are silent: tests wait for real as long as this."""


def engine() -> httpx.AsyncBaseTransport | None:
    """Return the transport to test: FAULT_KIT_ENGINE names one; None is that of the client."""
    match os.environ.get("FAULT_KIT_ENGINE"):
        case None | "http_client":
            return None
        case "httpx":
            return httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))
        case "httpx-aiohttp":
            return importlib.import_module("httpx_aiohttp").AiohttpTransport()
        case "pyreqwest":
            builder = importlib.import_module("pyreqwest.client").ClientBuilder()
            client = builder.error_for_status(enable=False).build()
            return importlib.import_module("pyreqwest.compatibility.httpx").HttpxTransport(client)
        case name:
            raise ValueError(f"FAULT_KIT_ENGINE is http_client, httpx, httpx-aiohttp or pyreqwest, not {name}")


class OverHttpClient(SamplingClient):
    """A client over an `httpx.AsyncClient`, which it closes as an owner would."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.http_client.aclose()


def client_of(url: str, **options: Any) -> SamplingClient:
    """Return a client of a server on a socket whose backoffs and holds take no time.

    It does not wait for outages, and no number of faults counts as one.
    """
    time = doubles.FakeTime()
    given = {
        "panel_guid": doubles.PANEL,
        "api_key": doubles.KEY,
        "clock": time.clock,
        "sleep": time.sleep,
        "random": lambda: 1.0,
        "outage": OutagePolicy(patience=0, failures=1_000_000),
        "transport": engine(),
    }
    if os.environ.get("FAULT_KIT_ENGINE") == "http_client" and not {"transport", "proxy", "ssl_context"} & {
        *options
    }:
        given["http_client"] = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False)
        client = OverHttpClient(url, **given | options)
        client.http_client = given["http_client"]
        return client
    return SamplingClient(url, **given | options)


async def call(client: SamplingClient, endpoint: str, member_code: str = "m1", **options: Any) -> Any:
    """Make one call of an endpoint: one request, if all goes well."""
    match endpoint:
        case "get_settings":
            return await client.get_settings(**options)
        case "get_quotas":
            return await client.get_quotas(**options)
        case "generate_invite":
            return await client.generate_invite(member_code, 2, **options)
        case "bulk_invite":
            return await client.bulk_invite(member_code, [2, 3], **options)
    async with contextlib.aclosing(client.recontact_pages(5, **options)) as pages:
        return await anext(pages)


def descriptors() -> int:
    """Return how many files and sockets this process has open; 0 if the system does not say."""
    folder = Path("/proc/self/fd")
    gc.collect()
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def assert_idle(client: SamplingClient, where: object = "") -> None:
    """Check that no permit is held, nothing waits and no attempt is under way."""
    held = client._gate.running, client._gate.waiting, len(client._session._blocks)
    assert held == (0, 0, 0), (held, where)


def everything_shown(error: BaseException, *others: Any) -> str:
    """Return everything a log, a crash reporter or a debugger could print about an error and objects near it.

    The frames of the tests are left out, because they hold the key.
    """
    trace = traceback.TracebackException.from_exception(error, capture_locals=True)
    frames = [str(frame.locals) for frame in trace.stack if not Path(frame.filename).is_relative_to(_TESTS)]
    parts = ["".join(trace.format_exception_only()), *frames, str(error), repr(error), str(vars(error))]
    for other in others:
        parts += [repr(other), str(vars(other))]
    chain: BaseException | None = error
    while chain is not None:
        parts += [repr(chain), repr(getattr(chain, "request", None)), *getattr(chain, "__notes__", ())]
        chain = chain.__cause__ or chain.__context__
    with contextlib.suppress(Exception):
        parts.append(str(pickle.dumps(error)))
    return "\n".join(parts)
