"""The checks of `doctor` in their order. Each one is told as soon as it is known."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import anyio
from attrs import field, frozen

from sampling_async import DecodeError, PartnerSettings, from_json
from sampling_async._cli import _doctor_findings as way
from sampling_async._cli import _doctor_probes as probes
from sampling_async._cli import _doctor_service as answers
from sampling_async._cli._connection import first_in_pem, validity_of
from sampling_async._cli._doctor_findings import Finding, skipped
from sampling_async._cli._doctor_probes import Unreachable
from sampling_async._wire.address import Secret
from sampling_async._wire.trust import Unusable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async._cli._connection import Validity
    from sampling_async._cli._doctor_probes import Asker, Target
    from sampling_async._cli._doctor_service import Seen

CHECKS: Final = (
    *("Address", "Proxy", "DNS", "TLS", "Client cert", "Service", "Clock", "Key header", "Key", "Panel"),
    *("End pages", "Notifications", "Receiver", "Latency", "Width", "Keep-alive"),
)
"""The names of all checks. Each run has one finding for each of them."""

_BLOCKING: Final = frozenset({"Address", "Proxy", "DNS", "TLS", "Service", "Key header", "Key"})
_OF_LATENCY: Final = 5
_NO_KEY: Final = "not-a-key"
_OK: Final = 200


@frozen(kw_only=True)
class Wishes:
    """What is examined beyond the usual.

    Attributes:
        most: The most requests at the same time.
        idle_limit: The longest time to watch an idle connection, in seconds.
        expected: Our own notification URLs by setting; None if they are not known.
        is_reaching: Whether to send HEAD to these URLs.
        client_cert: The file of our certificate, if any.
    """

    most: int = 8
    idle_limit: float = 6.0
    expected: Mapping[str, str] | None = None
    is_reaching: bool = False
    client_cert: str | None = None


class Rounds:
    """One examination.

    Args:
        target: Where requests go.
        key: The key; None if there is none.
        wishes: What is examined.
        tell: Called with each finding, in the order of `CHECKS`.
        wall_clock: Returns seconds since 1970.

    Attributes:
        findings: What was found so far.
    """

    def __init__(
        self,
        target: Target,
        key: Secret | None,
        wishes: Wishes,
        tell: Callable[[Finding], object],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._target = target
        self._key = key
        self._wishes = wishes
        self._tell = tell
        self._wall_clock = wall_clock
        self.findings: list[Finding] = []
        self._blocked = ""

    async def run(self) -> list[Finding]:
        """Make all checks, and return what was found. After a failure, what needs the same way is skipped."""
        url = self._target.base_url
        is_loopback = url.host == "localhost" or url.host.startswith("127.") or url.host == "::1"
        self._add(way.address(str(url), is_http=not self._target.is_https, is_loopback=is_loopback))
        for check in (self._proxy, self._names, self._tls):
            if not self._blocked:
                self._add(await check())
        if not self._blocked:
            self._add(self._client_certificate())
            await self._of_the_service()
        for finding in skipped_beside(self.findings, self._blocked):
            self._add(finding)
        return self.findings

    def _add(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            self._tell(finding)
            if finding.verdict == "fail" and finding.check in _BLOCKING and not self._blocked:
                self._blocked = finding.check

    @property
    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall_clock(), UTC)

    # --- The way to the service

    async def _proxy(self) -> Finding:
        proxy = self._target.proxy
        if proxy is None:
            scheme = self._target.base_url.scheme
            usual = (f"{scheme}_proxy".upper(), f"{scheme}_proxy", "ALL_PROXY", "all_proxy")
            return way.no_proxy(next((name for name in usual if os.environ.get(name)), ""))
        where = f"{proxy.host}:{proxy.port}"
        try:
            seconds = await probes.reach_proxy(self._target)
        except Unreachable as exc:
            return way.proxy(where, str(exc), host=self._target.host)
        return way.proxy(where, "", seconds=seconds, is_tunnel=self._target.is_https)

    async def _names(self) -> Finding:
        if self._target.proxy is not None:
            return skipped("DNS", "the proxy looks the host up")
        host = self._target.host
        try:
            return way.names(host, await probes.looked_up(host, self._target.port))
        except Unreachable as exc:
            return way.names(host, (), str(exc))

    async def _tls(self) -> Finding:
        if not self._target.is_https:
            return skipped("TLS", "the address is http")
        try:
            der = await probes.server_certificate(self._target, probes.client_context(self._target))
        except Unreachable as exc:
            if not exc.refused_certificate:
                return Finding("TLS", "fail", str(exc), "Check the port, and that the host speaks https there.")
            validity = await self._looked_at()
            return way.certificate("TLS", validity, self._now, refusal=exc.refused_certificate)
        return way.certificate("TLS", _dates(der), self._now)

    async def _looked_at(self) -> Validity | None:
        """Return the dates of a certificate that was refused, without sending anything over that connection."""
        with suppress(Unreachable):
            return _dates(await probes.server_certificate(self._target, probes.looking_context()))
        return None

    def _client_certificate(self) -> Finding:
        file = self._wishes.client_cert
        if not file:
            return skipped("Client cert", "none is used")
        # The file was used for the TLS settings by now. OpenSSL reads more forms of PEM than `first_in_pem`.
        validity = None
        with suppress(OSError, ValueError):
            validity = _dates(first_in_pem(Path(file).read_text("ascii", "replace")))
        return way.certificate("Client cert", validity, self._now, whose="you")

    # --- The service

    async def _of_the_service(self) -> None:
        with probes.Asker(self._target, self._wishes.most, self._wall_clock) as asker:
            # Nothing was sent with the key up to here: the certificate is verified by now.
            own = await asker.ask(self._key)
            self._add(answers.service(own))
            if self._blocked:
                return
            date, age = own.headers.get("date"), own.headers.get("age")
            self._add(way.clock(date, age, own.began, own.ended))
            settings = _settings_in(own)
            self._add(*await self._of_the_key(asker, own, has_settings=bool(settings)))
            if self._blocked or self._key is None:
                return
            if settings is None:
                self._add(answers.unknown_panel(own))
                self._blocked = "Panel"
                return
            await self._of_the_panel(settings)
            await self._of_the_speed(asker, self._key)

    async def _of_the_key(self, asker: Asker, own: Seen, *, has_settings: bool) -> Sequence[Finding]:
        if self._key is None:
            remedy = "Set SAMPLING_API_KEY, or what the profile names."
            return [
                skipped("Key header", "there is no key to send"),
                Finding("Key", "fail", "it is missing", remedy),
            ]
        if own.status not in answers.REFUSING:
            return answers.accepted(own, has_settings=has_settings)
        # Wrong keys are sent only after ours was refused, so that no operator sees them as an attack.
        none = [await asker.ask(None), await asker.ask(None)]
        others = [await asker.ask(Secret(str(uuid4()))), await asker.ask(Secret(_NO_KEY))]
        is_proxied = self._target.proxy is not None and not self._target.is_https
        found = answers.refused(own, none, others, is_proxied=is_proxied)
        if found[0].verdict == "ok":
            return found
        crowds = [await asker.ask(None, probes.crowd(separator)) for separator in "-_"]
        return answers.dropped(found, none[0], *crowds)

    async def _of_the_panel(self, settings: PartnerSettings) -> None:
        expected = self._wishes.expected
        self._add(answers.panel(self._target.panel_guid, settings), answers.end_pages(settings))
        self._add(answers.notifications(settings, expected))
        if expected is None or not self._wishes.is_reaching:
            self._add(skipped("Receiver", "only with --store and --reach-receiver, which send it a HEAD"))
            return
        try:
            self._add(answers.reached(await probes.heads(expected)))
        except Unusable as exc:
            self._add(skipped("Receiver", str(exc)))

    async def _of_the_speed(self, asker: Asker, key: Secret) -> None:
        kept = _Kept()
        # One idle connection is watched while the others work.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, key, kept)
            seen = [await asker.ask(key) for _ in range(_OF_LATENCY)]
            refusals = [each.status for each in seen if each.status != _OK]
            self._add(way.latency([each.seconds for each in seen if each.status == _OK], refusals))
            self._add(way.width(await asker.waves(key, self._wishes.most)))
        self._add(kept.found[0])

    async def _watch(self, key: Secret, kept: _Kept) -> None:
        if self._target.proxy is not None and not self._target.is_https:
            kept.found.append(skipped("Keep-alive", "the proxy keeps the connections, and not the service"))
            return
        limit, idle_seconds = self._wishes.idle_limit, self._target.idle_seconds
        try:
            closed_after = await probes.kept_open(self._target, key, limit)
        except Unreachable as exc:
            kept.found.append(Finding("Keep-alive", "warn", str(exc), "Run this again."))
        else:
            kept.found.append(way.keep_alive(closed_after, limit, idle_seconds))


@frozen
class _Kept:
    found: list[Finding] = field(factory=list[Finding])


def _dates(der: bytes) -> Validity | None:
    try:
        return validity_of(der)
    except ValueError:
        return None


def _settings_in(seen: Seen) -> PartnerSettings | None:
    if seen.status != _OK:
        return None
    try:
        return from_json(PartnerSettings, seen.body)
    except DecodeError:
        return None


def skipped_beside(findings: Sequence[Finding], failed: str) -> list[Finding]:
    """Return a finding for each check that was not made, because another one has failed."""
    known, why = {each.check for each in findings}, f"not before {failed} is mended"
    return [Finding(check, "skipped", why, is_blocked=True) for check in CHECKS if check not in known]


def worst(findings: Sequence[Finding]) -> way.Verdict:
    """Return the verdict of all findings together."""
    verdicts = {each.verdict for each in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"
