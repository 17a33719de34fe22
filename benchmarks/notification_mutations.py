"""200,000 mutated notifications: bodies, queries, headers and encodings that no service sends.

    python benchmarks/notification_mutations.py
    python benchmarks/notification_mutations.py --count 20000

They are posted to an inbox in process. Each one must be stored, understood or not, or be refused with a status
that says why. Nothing may raise, and what was stored must be there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from sampling_async.notifications import Inbox, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "a-secret-of-the-mutations"
AT_ONCE = 64
MEMBER = {"UniqueCode": "m1", "SurveyId": 1, "WaveId": 2, "QuotaID": 3, "DateTime": "2026-11-22 10:00:00"}
BODIES = [
    json.dumps({**MEMBER, "Revenue": 150, "AdditionalData": "a=b&c=d"}).encode(),
    json.dumps({**MEMBER, "Reason": "SCREENED_OUT"}).encode(),
    json.dumps({"QuotaID": 3, "IsLive": True, "UpdateDateTimeUTC": "2026-11-22T10:00:00Z"}).encode(),
    json.dumps({"SurveyID": 3, "Status": "Closed", "WaveId": 2}).encode("utf-16"),
    b'<?xml version="1.0"?><N><UniqueCode>m1</UniqueCode><SurveyId>1</SurveyId><WaveId>2</WaveId></N>',
    b'<N UniqueCode="m1" SurveyId="1"><!-- x --><WaveId><![CDATA[2]]></WaveId><Revenue>5</Revenue></N>',
    b"UniqueCode=m1&SurveyId=1&WaveId=2&Revenue=150&AdditionalData=a%3Db",
    json.dumps([MEMBER, MEMBER, {"x": [1, {"y": None}]}]).encode(),
]
SPLICES = [
    *(b"\x00", b"\xff", b"\xed\xa0\x80", b"\\ud800", b'"', b"{", b"]", b"<", b"&", b"%", b"=", b"\r\n"),
    *(b"\xef\xbb\xbf", b"null", b"true", b"1e999", b"-0", b"NaN", b"9" * 400, b"[" * 500, b"{" * 50),
    *(b"<a>" * 50, b"<!DOCTYPE x>", b"&a;", b'encoding="utf-7"', b"\xff\xfe", b"xmlns:a=''"),
    *(b"/Date(9e9)/", b"0000-00-00"),
]


def mutated(body: bytes, rng: random.Random) -> bytes:
    """Return a body with some bytes changed, cut, doubled, spliced in, or in another encoding."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(body) + 1)
        changes: list[Callable[[], bytes]] = [
            lambda at=at, body=body: body[:at],
            lambda at=at, body=body: body[:at] + rng.randbytes(rng.randrange(1, 9)) + body[at:],
            lambda at=at, body=body: body[:at] + rng.choice(SPLICES) + body[at:],
            lambda at=at, body=body: body[:at] + body[at + rng.randrange(20) :],
            lambda at=at, body=body: body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :],
            lambda body=body: body.replace(b"m1", rng.choice(SPLICES)),
            lambda body=body: body.replace(b"1", rng.choice(SPLICES)),
            lambda body=body: body.decode("latin-1").encode(
                rng.choice(("utf-16", "utf-32", "utf-8", "utf-16-le"))
            ),
            lambda body=body: body + rng.choice(BODIES),
            lambda body=body: body * rng.randrange(3),
        ]
        body = rng.choice(changes)()
    return body


def odd_text(rng: random.Random) -> str:
    """Return a text that no header or query should be."""
    odd = ("", "x" * 5000, "\x00", "\ud800", "a=b=c&&&", "%%%", "\r\nX: y", "é")
    return rng.choice((*odd, rng.randbytes(9).decode("latin-1")))


async def run(count: int, folder: Path) -> tuple[Counter[int], Counter[str], int]:
    """Post everything; return statuses, exceptions and the number of receipts."""
    rng = random.Random(200_000)
    statuses: Counter[int] = Counter()
    crashes: Counter[str] = Counter()
    left = count

    async def sender() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            body = mutated(rng.choice(BODIES), rng) if rng.random() < 0.98 else b""
            kind = rng.choice(tuple(Kind)) if rng.random() < 0.97 else odd_text(rng)
            secret = SECRET if rng.random() < 0.97 else odd_text(rng)
            headers = [(odd_text(rng), odd_text(rng)), ("X-Forwarded-For", odd_text(rng))]
            peer = rng.choice(("127.0.0.1", "::1", odd_text(rng)))
            try:
                reply = await inbox.receive(kind, body, headers, peer, secret=secret, query=odd_text(rng))
            except Exception as exc:  # noqa: BLE001  what this looks for
                crashes[f"{type(exc).__name__}: {exc}"[:80]] += 1
            else:
                statuses[reply.status] += 1

    store = folder / "notifications.db"
    async with Inbox(store, secrets=SECRET, trusted_proxies=["127.0.0.0/8"]) as inbox:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(sender())
        facts = [fact async for fact in inbox.facts()]
    receipts = sum(fact.receipts for fact in facts)
    return statuses, crashes, receipts


def main() -> None:
    """Run, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    count = parser.parse_args().count
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        statuses, crashes, receipts = asyncio.run(run(count, Path(folder)))
    refused = {status: number for status, number in statuses.items() if status != 200}
    print(f"posted                     {count:,} in {time.perf_counter() - began:,.0f} s")
    print(f"raised                     {crashes.total():,} {dict(crashes) or ''}")
    print(f"stored (200)               {statuses[200]:,}")
    print(f"refused                    {dict(sorted(refused.items()))}")
    print(f"receipts that facts count  {receipts:,} (a list gives several)")
    if crashes or statuses.total() != count or receipts < statuses[200] or statuses[503]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
