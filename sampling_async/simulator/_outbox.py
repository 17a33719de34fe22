"""The simulator's notifications: caused by events in it, posted in the service's spellings and formats.

They may come late, twice, forged, or badly spelled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import contextmanager
from datetime import UTC, timedelta
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args
from urllib.parse import urlencode
from xml.sax.saxutils import escape

import anyio
import attrs
import httpx
from attrs import field, frozen

from sampling_async._contract.records import hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from datetime import datetime

    from sampling_async.notifications import Inbox
    from sampling_async.simulator._live import LiveQuota, LiveSurvey
    from sampling_async.simulator._transport import Sleep

NotificationKind: TypeAlias = Literal[
    "invite", "completion", "terminate", "survey_closed", "quota_status", "reconciliation"
]
"""The kinds of notifications, named as in `sampling_async.notifications.Kind`."""

KINDS: Final = tuple(kind for kind in get_args(NotificationKind) if kind != "reconciliation")
"""The kinds that have a URL. Reconciliations go to the URL of completions."""


@frozen
class Posting:
    """One notification that the simulator sends, or has sent.

    Attributes:
        number: The place in the order of events, from 0.
        fields: The fields, in the service's usual spelling.
        at: When it is due, in seconds of the simulator's clock.
        is_forged: Whether it is not from the service: it goes to a wrong URL, or has a wrong signature.
    """

    number: int
    kind: NotificationKind
    fields: Mapping[str, Any] = field(repr=hidden)
    at: float
    is_forged: bool = False


def signed(fields: Mapping[str, Any], secret: str) -> dict[str, Any]:
    """Return fields of a member's status with EncryptedValue: an HMAC over survey, wave and member."""
    message = f"{fields['SurveyId']}{fields['WaveId']}{fields['UniqueCode']}"
    value = hmac.new(secret.encode(), message.encode(), hashlib.sha256).hexdigest()
    return {**fields, "EncryptedValue": value}


def drifted_body(fields: Mapping[str, Any], random: Random) -> tuple[bytes, str]:
    """Return fields in another spelling and format than usual; the content type need not fit."""
    respell = random.choice(_SPELLINGS)
    respelled = {respell(name): value for name, value in fields.items()}
    content_type = random.choice(("application/json", "text/plain", "application/octet-stream"))
    match random.randrange(7):
        case 0:
            return json.dumps(_texts(respelled), indent=2).encode(), content_type
        case 1:
            return json.dumps({"Notification": respelled}).encode("utf-16"), content_type
        case 2:
            parts = "".join(f"<{key}>{escape(text)}</{key}>" for key, text in _texts(respelled).items())
            return f'<?xml version="1.0"?>\n<Notification>{parts}</Notification>'.encode(), "application/xml"
        case 3:
            padding = b"\0" * random.randrange(1, 9)
            return json.dumps(respelled).encode() + padding, f"{content_type}; charset=utf-16"
        case 4:
            return json.dumps(json.dumps(respelled)).encode(), content_type
        case 5:
            return f"{urlencode(_texts(respelled))}&".encode(), content_type
        case _:
            return urlencode(_texts(respelled)).encode(), "application/x-www-form-urlencoded"


def _texts(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in fields.items()}


_SPELLINGS: Final[tuple[Callable[[str], str], ...]] = (
    str.lower,
    str.upper,
    lambda name: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(),  # quota_id
    lambda name: name[0].lower() + name[1:],
    lambda name: name.replace("ID", "Id"),
)


_IDLE_SECONDS: Final = 0.05
_RETRY_SECONDS: Final = 1.0
_REASONS: Final = ("SCREENED_OUT", "QUOTA_FULL", "QUALITY", "ABANDONED")
_INBOX_URL: Final = "http://inbox.example"


_SHARE: Final[Any] = [attrs.validators.ge(0), attrs.validators.le(1)]
_SECONDS: Final[Any] = attrs.validators.ge(0)


def _shares(owner: object, attribute: attrs.Attribute[Any], value: float | Mapping[int, float]) -> None:
    for each in value.values() if isinstance(value, Mapping) else (value,):
        for check in _SHARE:
            check(owner, attribute, each)


@frozen(kw_only=True)
class Notifying:
    """What the simulator sends notifications about, and how badly. Shares are from 0 to 1.

    Attributes:
        completes: The share of invites that end in a complete; the others end in a terminate. Where quotas
            differ, the shares by quota ID; those of a quota that is missing all end in a terminate.
        survey_seconds: How long a member's survey takes.
        late: The share that is sent `late_seconds` later than it happened, and so out of order.
        late_seconds: The delay of late notifications.
        repeated: The share that is sent twice.
        forged: How many forged notifications there are for each true one.
        drifted: The share in another spelling, format or encoding.
        corrected: The share of completions that are followed by a correction of their revenue.
        terminated_late: The share of completions that are followed by a terminate.
        reconciled: The share of completions whose revenue is taken back. A reconciliation goes to the URL of
            completions.
        shared_secret: Signs notifications about members (EncryptedValue); empty: they are not signed.
    """

    completes: float | Mapping[int, float] = field(default=0.5, validator=_shares)
    survey_seconds: float = field(default=0.0, validator=_SECONDS)
    late: float = field(default=0.0, validator=_SHARE)
    late_seconds: float = field(default=1.0, validator=_SECONDS)
    repeated: float = field(default=0.0, validator=_SHARE)
    forged: float = field(default=0.0, validator=_SHARE)
    drifted: float = field(default=0.0, validator=_SHARE)
    corrected: float = field(default=0.0, validator=_SHARE)
    terminated_late: float = field(default=0.0, validator=_SHARE)
    reconciled: float = field(default=0.0, validator=_SHARE)
    shared_secret: str = field(default="", repr=False)


class Outbox:
    """The notifications of a simulator: what has happened, and what is still to be sent.

        sim = Simulator(notifying=Notifying(completes=0.3, repeated=0.1))
        ...
        await sim.notifications.deliver(inbox)          # in process: all that is due
        with sim.notifications.sending_to(urls):        # over HTTP, from a thread
            ...

    Causes: an invite (invite notification), the end of a member's survey (completion or terminate), a quota
    that closes, fills or opens (quota status), a survey without open quotas (survey closed). A posting that
    gets another response than 2xx is sent again later. A simulator without `notifying` keeps nothing here.

    Attributes:
        sent: How many postings were acknowledged, repetitions included.
        refusals: How many true postings in a row were refused since the last one that was acknowledged. A
            receiver that is slow refuses nothing.
    """

    def __init__(
        self,
        notifying: Notifying | None,
        *,
        seed: int | str,
        began: datetime,
        clock: Callable[[], float],
        sleep: Sleep,
    ) -> None:
        self._notifying = notifying or Notifying()
        self._is_on = notifying is not None
        self._random = Random(f"{seed}/notifications")  # noqa: S311  no secret
        # A separate generator, so that events do not depend on when notifications are delivered.
        self._spelling = Random(f"{seed}/spelling")  # noqa: S311
        self._began_at = (began if began.tzinfo else began.replace(tzinfo=UTC)).astimezone(UTC)
        self._clock = clock
        self._began = clock()
        self._sleep = sleep
        self._lock = threading.Lock()
        self._postings: list[Posting] = []
        self._number = 0
        # Due time, place, posting.
        self._queue: list[tuple[float, int, Posting]] = []
        self._in_flight = 0
        self._unheard: dict[int, Posting] = {}
        self._open: dict[int, bool] = {}
        self.sent = 0
        self.refusals = 0

    def __repr__(self) -> str:
        return f"<Outbox told={len(self._postings)} waiting={len(self._queue)} sent={self.sent}>"

    @property
    def told(self) -> Sequence[Posting]:
        """All true notifications so far, including those that are not due yet."""
        with self._lock:
            return tuple(self._postings)

    @property
    def waiting(self) -> int:
        """How many are waiting or being sent, including repeated and forged ones."""
        with self._lock:
            return len(self._queue) + self._in_flight

    @property
    def unheard(self) -> Sequence[Posting]:
        """The true notifications that no receiver has acknowledged yet."""
        with self._lock:
            return tuple(self._unheard.values())

    # --- Causes; called under the lock of the service

    def begin(self, survey: LiveSurvey) -> None:
        """Record which quotas of a survey are open at the beginning."""
        self._open.update({quota.quota.quota_id: _is_open(quota) for quota in survey.quotas})

    def invited(self, quota: LiveQuota, member_code: str, url: str) -> None:
        """Notify of an invite, and decide how the member's survey will end."""
        if not self._is_on:
            return
        now, notifying = self._now(), self._notifying
        survey, quota_id = quota.survey.survey, quota.quota.quota_id
        member: dict[str, Any] = {
            "UniqueCode": member_code,
            "SurveyId": survey.survey_id,
            "SurveyRef": f"S-{survey.survey_id}",
            "WaveId": survey.wave_id,
            "QuotaID": quota_id,
        }
        self._notify("invite", {**member, "DateTime": self._seconds_text(now)}, now)
        end = now + notifying.survey_seconds
        ended = {**member, "DateTime": self._seconds_text(end), "AdditionalData": url.partition("?")[2]}
        share = notifying.completes
        if self._random.random() >= (share.get(quota_id, 0.0) if isinstance(share, Mapping) else share):
            self._notify("terminate", {**ended, "Reason": self._random.choice(_REASONS)}, end)
            return
        revenue = round(survey.price.amount * 100)
        self._notify("completion", {**ended, "Revenue": revenue}, end)
        if self._random.random() < notifying.corrected:
            self._notify("completion", {**ended, "Revenue": revenue // 2}, end)
        if self._random.random() < notifying.terminated_late:
            self._notify("terminate", {**ended, "Reason": "QUALITY"}, end)
        if notifying.reconciled and self._random.random() < notifying.reconciled:
            taken_back = {
                **ended,
                "ReconciliationID": len(self._postings) + 1,
                "ReconciliationDateTime": self._seconds_text(end),
            }
            self._notify("reconciliation", taken_back, end)

    def moved(self, survey: LiveSurvey) -> None:
        """Notify of the quotas of a survey that have closed or opened, and of the survey if none is open."""
        if not self._is_on:
            return
        now, was_open = self._now(), any(self._open[quota.quota.quota_id] for quota in survey.quotas)
        for quota in survey.quotas:
            quota_id, is_open = quota.quota.quota_id, _is_open(quota)
            if self._open[quota_id] is is_open:
                continue
            self._open[quota_id] = is_open
            status = {
                "QuotaID": quota_id,
                "SurveyID": survey.survey.survey_id,
                "WaveID": survey.survey.wave_id,
                "IsLive": is_open,
                # A microsecond for each posting separates two changes in one tick of the clock.
                "UpdateDateTimeUTC": self._moment(now + self._number / 1e6).isoformat(timespec="microseconds"),
            }
            self._notify("quota_status", status, now)
        if was_open and not any(self._open[quota.quota.quota_id] for quota in survey.quotas):
            closed = {
                "SurveyID": survey.survey.survey_id,
                "SurveyRef": f"S-{survey.survey.survey_id}",
                "Status": "Closed",
                "DateTime": self._seconds_text(now),
                "WaveId": survey.survey.wave_id,
            }
            self._notify("survey_closed", closed, now)

    def _notify(self, kind: NotificationKind, fields: dict[str, Any], at: float) -> None:
        notifying, random = self._notifying, self._random
        if notifying.shared_secret and kind in ("completion", "terminate", "reconciliation"):
            fields = signed(fields, notifying.shared_secret)
        posting = Posting(len(self._postings), kind, fields, at)
        with self._lock:
            self._postings.append(posting)
            self._unheard[posting.number] = posting
            self._put(posting, at + (notifying.late_seconds if random.random() < notifying.late else 0))
            if random.random() < notifying.repeated:
                self._put(posting, at + random.random() * notifying.late_seconds)
            if random.random() < notifying.forged:
                forged = {**fields, "Revenue": 99_999_00} if kind == "completion" else dict(fields)
                if "EncryptedValue" in forged:
                    forged["EncryptedValue"] = "0" * 64
                self._put(Posting(posting.number, kind, forged, at, is_forged=True), at)

    def _put(self, posting: Posting, due: float) -> None:
        heappush(self._queue, (due, self._number, posting))
        self._number += 1

    def _now(self) -> float:
        return self._clock() - self._began

    def _moment(self, seconds: float) -> datetime:
        return self._began_at + timedelta(seconds=seconds)

    def _seconds_text(self, seconds: float) -> str:
        return f"{self._moment(seconds):%Y-%m-%d %H:%M:%S}"

    # --- Sending

    async def deliver(self, inbox: Inbox, *, everything: bool = True) -> int:
        """Post to an open inbox in process, and return how many were posted.

        With `everything`, those that are not due yet are sent too, in the order of their times.
        """
        transport = httpx.ASGITransport(inbox.app, client=("127.0.0.1", 0))
        urls = {str(kind): url for kind, url in inbox.urls(_INBOX_URL).items()}
        count = 0
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            # Taken all at once, so that refused notifications wait for the next call and are not sent again
            # forever.
            due = deque(self._due(everything=everything))
            try:
                while due:
                    await self._post(client, urls, due.popleft())
                    count += 1
            finally:
                # What a call that was cancelled has taken and not posted.
                with self._lock:
                    for posting in due:
                        self._in_flight -= 1
                        self._put(posting, posting.at)
        return count

    async def send(self, urls: Mapping[str, str]) -> None:
        """Post over HTTP what is due, until this is cancelled; kinds without a URL are not sent."""
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            while True:
                for posting in self._due():
                    await self._post(client, urls, posting)
                await self._sleep(_IDLE_SECONDS)

    @contextmanager
    def sending_to(self, urls: Mapping[str, str]) -> Generator[None]:
        """Post over HTTP from a thread while the `with` block runs; see `send`."""
        unknown = [kind for kind in urls if kind not in KINDS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no kind of notification: {', '.join(KINDS)}")
        ended = threading.Event()

        async def run() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.send, urls)
                while not ended.is_set():  # noqa: ASYNC110  it is set by another thread
                    await anyio.sleep(_IDLE_SECONDS)
                tasks.cancel_scope.cancel()

        thread = threading.Thread(target=anyio.run, args=(run,), name="simulator", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _due(self, *, everything: bool = False) -> Iterator[Posting]:
        if not self._is_on:
            raise RuntimeError("this simulator sends no notifications: use Simulator(notifying=Notifying())")
        while True:
            with self._lock:
                if not self._queue or not (everything or self._queue[0][0] <= self._now()):
                    return
                posting = heappop(self._queue)[2]
                self._in_flight += 1
            yield posting

    async def _post(self, client: httpx.AsyncClient, urls: Mapping[str, str], posting: Posting) -> None:
        url = urls.get("completion" if posting.kind == "reconciliation" else posting.kind)
        is_stored = is_refused = False
        try:
            is_stored = url is not None and await self._stored(client, url, posting)
            is_refused = not is_stored
        except httpx.TimeoutException:  # sent again later; a slow receiver has not refused it
            pass
        except (httpx.HTTPError, httpx.InvalidURL):
            is_refused = True
        finally:
            with self._lock:
                self._in_flight -= 1
                self.sent += is_stored
                if url is None or posting.is_forged:
                    pass
                elif is_stored:
                    self.refusals = 0
                    self._unheard.pop(posting.number, None)
                else:
                    self.refusals += is_refused
                    self._put(posting, self._now() + _RETRY_SECONDS)

    async def _stored(self, client: httpx.AsyncClient, url: str, posting: Posting) -> bool:
        if posting.is_forged and "EncryptedValue" not in posting.fields:
            url += "x"
        is_drifted = self._spelling.random() < self._notifying.drifted
        body, content_type = json.dumps(posting.fields).encode(), "application/json; charset=utf-8"
        if is_drifted:
            body, content_type = drifted_body(posting.fields, self._spelling)
        response = await client.post(url, content=body, headers={"Content-Type": content_type})
        return response.is_success


def _is_open(quota: LiveQuota) -> bool:
    return quota.is_live and not quota.is_full
