"""Notifications as the field sends them: which are understood, what is lost, and handlers that hang or fail.

The naive receiver reads JSON, XML and forms with the standard library.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import tempfile
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlencode
from xml.etree import ElementTree as ET  # only bodies that this file makes
from xml.sax.saxutils import escape

from sampling_async.notifications import (
    Completion,
    Fact,
    HandlerPolicy,
    Inbox,
    QuotaStatus,
    SurveyClosed,
    UnknownNotification,
)
from scoreboard.board import Row, Run, exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET: Final = "a-secret-of-the-scoreboard"
PEER: Final = "198.51.100.7"
AT_ONCE: Final = 8
BEGIN: Final = datetime(2026, 11, 26, 19, 58, 42, tzinfo=UTC)


def _times(moment: datetime) -> Iterator[str]:
    """Yield one moment in the forms that services write it in."""
    for between in "T ":
        for fraction in ("", ".00", ".000", ".0000000"):
            for zone in ("", "Z", "+00:00", " +00:00"):
                yield f"{moment:%Y-%m-%d}{between}{moment:%H:%M:%S}{fraction}{zone}"
    yield f"/Date({int(moment.timestamp()) * 1000})/"
    yield f"/Date({int(moment.timestamp()) * 1000}+0200)/"


def _xml(fields: dict[str, Any], encoding: str, close: Callable[[str], str] = str) -> str:
    parts = "".join(f"<{name}>{escape(str(value))}</{close(name)}>" for name, value in fields.items())
    return f'<?xml version="1.0" encoding="{encoding}"?><Notification>{parts}</Notification>'


def _multipart(fields: dict[str, Any]) -> bytes:
    head = "--x\r\nContent-Disposition: form-data; name="
    return (
        "".join(f'{head}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()).encode() + b"--x--\r\n"
    )


def _bodies(fields: dict[str, Any]) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield one notification in the forms that services send it in, each with its headers."""
    text = json.dumps(fields, ensure_ascii=False)
    plain, form = {"Content-Type": "application/json; charset=utf-8"}, urlencode(fields).encode()
    yield text.encode(), plain
    yield text.encode(), {"Content-Type": "application/json; charset=iso-8859-1"}
    yield text.encode("windows-1252"), plain
    yield text.encode("utf-16"), plain
    yield text.encode() + b"\0" * 100, plain
    yield json.dumps(text).encode(), plain
    yield gzip.compress(text.encode()), {**plain, "Content-Encoding": "gzip"}
    yield _xml(fields, "utf-8").encode(), {"Content-Type": "text/xml"}
    yield _xml(fields, "utf-16").encode(), {"Content-Type": "text/xml"}
    yield _xml(fields, "utf8").encode("windows-1252"), {"Content-Type": "text/xml"}
    yield _xml(fields, "utf-8", str.upper).encode(), {"Content-Type": "text/xml"}
    yield form, {"Content-Type": "application/x-www-form-urlencoded"}
    yield form + b"&&", {"Content-Type": "application/x-www-form-urlencoded"}
    yield form.replace(b"%C3%A9", b"%E9") + b"&bare", {}
    yield _multipart(fields), {"Content-Type": "multipart/form-data; boundary=x"}


def _hits() -> Iterator[tuple[str, dict[str, Any], bytes, dict[str, str]]]:
    """Yield completions and closings in all forms: kind, fields, body and headers; no two are of one thing."""
    number = 0
    for place in range(len(list(_times(BEGIN)))):
        for form in range(len(list(_bodies({})))):
            number += 1
            moment = BEGIN + timedelta(hours=number)
            time = list(_times(moment))[place]
            member = {"UniqueCode": f"Ren\u00e9-{number}", "SurveyId": 7, "Revenue": 150, "DateTime": time}
            closed = {"SurveyID": number, "Status": "Closed", "SurveyRef": "\u00e9", "DateTime": time}
            for kind, fields in (("completion", member), ("survey_closed", closed)):
                body, headers = list(_bodies(fields))[form]
                yield kind, fields, body, headers


def _meaning(kind: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Return who or what a notification is about, and when it was."""
    moment = BEGIN + timedelta(
        hours=int(str(fields.get("SurveyID") or fields["UniqueCode"].rpartition("-")[2]))
    )
    return str(fields["UniqueCode"] if kind == "completion" else fields["SurveyID"]), moment.isoformat()


def _naive(body: bytes) -> tuple[str, str]:
    """Read a body as a receiver without this package does; a failure is a notification that is lost."""
    text = body.decode()
    if text.startswith("{"):
        fields = json.loads(text)
    elif text.startswith("<"):
        fields = {each.tag: each.text for each in ET.fromstring(text)}
    else:
        fields = {name: values[0] for name, values in parse_qs(text, strict_parsing=True).items()}
    moment = datetime.fromisoformat(fields["DateTime"])
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return str(fields.get("UniqueCode") or fields["SurveyID"]), moment.isoformat()


async def _read(folder: Path) -> tuple[int, int, int]:
    """Return how many notifications were posted, how many were not understood rightly, and naively so."""
    expected, naive_lost = [], 0
    async with Inbox(folder / "read.db", secrets=SECRET) as inbox:
        for kind, fields, body, headers in _hits():
            await inbox.receive(kind, body, headers, PEER, secret=SECRET)
            expected.append(_meaning(kind, fields))
            try:
                naive_lost += _naive(body) != expected[-1]
            except (ValueError, KeyError, TypeError, ET.ParseError):
                naive_lost += 1
        found = [_told(fact) async for fact in inbox.facts()]
    return len(expected), len(set(expected) - set(found)), naive_lost


def _told(fact: Fact[Any]) -> tuple[str, str]:
    told = fact.notification
    if not isinstance(told, Completion | SurveyClosed) or told.at is None:
        return "", ""
    about = told.member_code if isinstance(told, Completion) else told.survey_id
    return str(about), told.at.isoformat()


async def _while_others_hang(folder: Path, facts: int) -> int:
    """Return how many closings of quotas are not handled while the handler of completions hangs."""
    inbox = Inbox(
        folder / "hang.db", secrets=SECRET, handling=HandlerPolicy(at_once=AT_ONCE, poll=0.01, grace=0.01)
    )
    handled, done = 0, asyncio.Event()

    @inbox.on(Completion)
    async def hangs(_fact: Fact[Completion]) -> None:
        await asyncio.Event().wait()

    @inbox.on(QuotaStatus)
    async def closes(_fact: Fact[QuotaStatus]) -> None:
        nonlocal handled
        handled += 1
        if handled == facts:
            done.set()

    inbox.on(UnknownNotification)(lambda _fact: None)
    members = [{"UniqueCode": str(each), "SurveyId": 1, "WaveId": 1, "Revenue": 1} for each in range(50)]
    closings = [
        {"QuotaID": each, "IsLive": False, "UpdateDateTimeUTC": "2026-11-26T10:00:00"} for each in range(facts)
    ]
    async with inbox:
        await inbox.receive("completion", json.dumps(members).encode(), {}, PEER, secret=SECRET)
        await inbox.receive("quota_status", json.dumps(closings).encode(), {}, PEER, secret=SECRET)
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 60)
    return facts - handled


async def _logged(folder: Path, facts: int) -> tuple[int, int]:
    """Return how many failures were logged without a traceback, and how many member codes the log shows."""
    log = io.StringIO()
    logger, handler = logging.getLogger("sampling_async.notifications"), logging.StreamHandler(log)
    inbox = Inbox(folder / "log.db", secrets=SECRET, handling=HandlerPolicy(attempts=1))
    done = asyncio.Event()

    @inbox.on(Completion)
    async def fails(fact: Fact[Completion]) -> None:
        if fact.id == facts:
            done.set()
        raise LookupError(f"no account of {fact.notification.member_code} at {SECRET}")

    inbox.on(UnknownNotification)(lambda _fact: None)
    members = [{"UniqueCode": f"panelist-{each}", "SurveyId": 1, "Revenue": 1} for each in range(facts)]
    logger.addHandler(handler)
    try:
        async with inbox:
            await inbox.receive("completion", json.dumps(members).encode(), {}, PEER, secret=SECRET)
            await done.wait()
    finally:
        logger.removeHandler(handler)
    text = log.getvalue()
    return facts - text.count("in fails\n"), text.count("panelist-") + text.count(SECRET)


def rows(run: Run) -> list[Row]:
    """Post notifications in all forms of the field, and let handlers hang and fail."""
    facts = run.of(100, 2_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        posted, lost, naive_lost = asyncio.run(_read(folder))
        starved = asyncio.run(_while_others_hang(folder, facts))
        silent, shown = asyncio.run(_logged(folder, facts))
    note = (
        f"of {posted:,}: times in all forms of the inventory, in all encodings, formats and slips of the field"
    )
    waits = f"of {facts:,} closings, behind 50 completions whose handler never ends"
    return [
        exactly("notifications that are not read as they were meant", 0, lost, naive_lost, note=note),
        exactly("facts that wait behind the handler of another kind", 0, starved, note=waits),
        exactly("failures of handlers without a traceback in the log", 0, silent, note=f"of {facts:,}"),
        exactly("member codes and secrets in that log", 0, shown, note=f"of {facts:,} failures"),
    ]
