"""The command `doctor`: is everything in order between this machine and the service?"""

from __future__ import annotations

import textwrap
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import anyio
import typer
from attrs import frozen
from rich.text import Text

from sampling_async import InvalidRequestError, Timeouts, __version__
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import ServiceOptions, asked_key, ended_by_failure
from sampling_async._cli._doctor_findings import Finding, hiding, without_guids
from sampling_async._cli._doctor_probes import READ_SECONDS, Target
from sampling_async._cli._doctor_rounds import CHECKS, Rounds, Wishes, skipped_beside, worst
from sampling_async._cli._tally import DONE, INCOMPLETE
from sampling_async._profiles import setting
from sampling_async._wire.address import Secret, base_url_of, guid_of, proxy_of, require_https_through

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sampling_async._profiles import Profile
    from sampling_async._wire.address import Proxy

T = TypeVar("T")

_WORDS: Final = {"ok": "ok", "warn": "warn", "fail": "FAIL", "skipped": "skip"}
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
_BESIDE: Final = 6 + max(map(len, CHECKS)) + 2
_NARROW: Final = 60
_MOST_AT_ONCE: Final = 32
_IDLE_LIMIT, _IDLE_LIMIT_THOROUGH = 6.0, 90.0


@frozen(kw_only=True)
class DoctorOptions:
    """The options of the command."""

    store: Annotated[
        Path | None,
        typer.Option(
            help="The store of `notifications serve`, to compare its URLs with the operator's.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    public_url: Annotated[
        str | None,
        typer.Option(
            help="The address of your receiver, as for `notifications serve`; with --store.",
            metavar="URL",
            show_default=False,
        ),
    ] = None
    reach_receiver: Annotated[
        bool,
        typer.Option(
            "--reach-receiver",
            help="With --store: send HEAD to your receiver's URLs, which stores nothing, and see what answers.",
            metavar="",
        ),
    ] = False
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough", help="Watch an idle connection for up to 90 seconds; without this, for 6.", metavar=""
        ),
    ] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show only what is not in order.", metavar="")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, on a terminal too.", metavar="")
    ] = False

    def wishes(self, service: ServiceOptions, profile: Profile | None) -> Wishes:
        """Return what is examined.

        Raises:
            InvalidRequestError: --store and --public-url belong together, there is no such store, or
                --timeout is no number.
        """
        Timeouts(read=service.timeout)  # refuses what the client would refuse
        if (self.store is None) != (self.public_url is None) or (self.reach_receiver and self.store is None):
            raise InvalidRequestError(
                "give --store and --public-url together, and both for --reach-receiver: they make the URLs"
            )
        return Wishes(
            most=min(service.width(profile), _MOST_AT_ONCE),
            idle_limit=_IDLE_LIMIT_THOROUGH if self.thorough else _IDLE_LIMIT,
            expected=self._urls(),
            is_reaching=self.reach_receiver,
            client_cert=service.client_cert or setting(profile, "client_cert"),
        )

    def _urls(self) -> dict[str, str] | None:
        if self.store is None or self.public_url is None:
            return None
        from sampling_async._cli._notifications import existing_store  # noqa: PLC0415  takes time to load
        from sampling_async.notifications import Inbox, kept_secrets  # noqa: PLC0415
        from sampling_async.notifications._records import SETTINGS  # noqa: PLC0415

        store = existing_store(self.store)
        urls = Inbox(store, secrets=kept_secrets(store)).urls(self.public_url)
        return {SETTINGS[kind]: url for kind, url in urls.items()}


def doctor(service: ServiceOptions, options: DoctorOptions) -> None:
    """Check all between this machine and the service: address, TLS, proxy, key, panel, settings, speed.

    Each check says what was found and what to do. The command sends Get
    Settings only, some twenty times, and asks for no invite. Nothing is
    repeated, so --attempts and --patience have no effect. The output holds
    no key, no PanelGUID and no member code. The exit code is 1 if a check
    failed, and 0 if there are only warnings.
    """
    profile = ended_by_failure(service.panel_of_profile)
    key = ended_by_failure(lambda: service.known_key(profile)) or asked_key(profile)
    wishes = ended_by_failure(lambda: options.wishes(service, profile))
    is_silent, screen = show.as_lines(options.as_json), show.screen()
    # Not the console's width, which is 80 on every dumb terminal, also on one of 40 columns.
    width = get_terminal_size().columns

    def tell(finding: Finding) -> None:
        is_hidden = finding.is_blocked or (options.quiet and finding.verdict in {"ok", "skipped"})
        if not (is_silent or is_hidden):
            for line in lines(finding, width):
                screen.print(line, soft_wrap=True)

    secret = Secret.of(key) if key else None
    findings = ended_by_failure(lambda: examined(service, profile, secret, wishes, tell))
    is_told = options.as_json or not options.quiet or worst(findings) != "ok"
    if is_silent and is_told:
        ended_by_failure(lambda: show.emit_json(document(findings, service.profile)))
    elif not (is_silent or options.quiet):
        screen.print(closing(findings, width), soft_wrap=True)
    raise typer.Exit(INCOMPLETE if worst(findings) == "fail" else DONE)


def examined(
    service: ServiceOptions,
    profile: Profile | None,
    key: Secret | None,
    wishes: Wishes,
    tell: Callable[[Finding], object],
) -> list[Finding]:
    """Make all checks. What the client would refuse to be made with is a finding, and nothing is sent then.

    Raises:
        InvalidRequestError: The address or the panel is missing, or not that of the profile.
    """
    base_url, panel_guid = service.whereto()
    hidden = hiding(key, Secret(panel_guid))
    try:
        target = _target(service, profile, base_url, panel_guid)
        _made("Key", lambda: key and guid_of(key, "the key"))
    except _NotMade as exc:
        findings = [exc.finding, *skipped_beside([exc.finding], exc.finding.check)]
        findings.sort(key=lambda each: CHECKS.index(each.check))
        for each in findings:
            tell(hidden(each))
    else:
        findings = anyio.run(Rounds(target, key, wishes, lambda each: tell(hidden(each))).run)
    return [hidden(each) for each in findings]


class _NotMade(Exception):  # noqa: N818  caught in this module
    """A setting with which the client would refuse to be made."""

    def __init__(self, finding: Finding) -> None:
        super().__init__()
        self.finding = finding


def _made(check: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except InvalidRequestError as exc:
        text = str(exc).replace("allow_http=True", "--allow-http")
    raise _NotMade(Finding(check, "fail", text))


def _target(service: ServiceOptions, profile: Profile | None, base_url: str, panel_guid: str) -> Target:
    """Return where requests go.

    Raises:
        _NotMade: A setting is invalid.
    """
    allow_http = service.may_be_http(profile)
    url = _made("Address", lambda: base_url_of(base_url, allow_http=allow_http))

    def proxy() -> Proxy | None:
        given = service.proxy_address(profile)
        found = None if given is None else proxy_of(given)
        if found is not None:
            require_https_through(found, url, allow_http=allow_http)
        return found

    return Target(
        base_url=url,
        panel_guid=_made("Panel", lambda: guid_of(panel_guid, "the PanelGUID").reveal()),
        proxy=_made("Proxy", proxy),
        tls=_made("TLS", lambda: service.tls_context(profile)),
        idle_seconds=service.idle_seconds(profile),
        read_seconds=service.timeout or READ_SECONDS,
    )


# --- What is shown ------------------------------------------------------------------------------------------


def lines(finding: Finding, width: int) -> Iterator[Text]:
    """Yield the lines of a finding for a terminal. None is wider than the terminal."""
    word = f"{_WORDS[finding.verdict]:<6}", _STYLES[finding.verdict]
    style = "dim" if finding.verdict == "skipped" else ""
    is_narrow = width < _NARROW
    indent = 2 if is_narrow else _BESIDE
    told = _wrapped(finding.found, width - indent)
    beside = "" if is_narrow else told.pop(0)
    label = f"{finding.check:<{_BESIDE - 6}}" if beside else finding.check
    yield Text.assemble(word, (label, style or "bold"), show.plain(beside, style))
    for line in told:
        yield show.plain(" " * indent + line, style)
    for number, line in enumerate(_wrapped(finding.remedy, width - indent - 3)):
        yield show.plain(f"{' ' * indent}{'   ' if number else '-> '}{line}")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False)


def closing(findings: Sequence[Finding], width: int) -> Text:
    """Return the last words: how many checks failed, and how many warn."""
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in _WORDS}
    if not counts["fail"] + counts["warn"]:
        return Text(f"\nAll is in order: {counts['ok']} checks.", style="bold green")
    text = f"{counts['fail']} failed, {counts['warn']} to look at, {counts['ok']} in order"
    blocked = sum(each.is_blocked for each in findings)
    text += f"; {blocked} must wait until that is mended." if blocked else "."
    style = "bold red" if counts["fail"] else "bold yellow"
    return Text("\n".join(["", *_wrapped(text, width)]), style=style)


def document(findings: Sequence[Finding], profile: str | None) -> dict[str, Any]:
    """Return the findings for JSON."""
    return {
        "Verdict": worst(findings),
        "Profile": without_guids(profile or "") or None,
        "Version": __version__,
        "Checks": [
            {
                "Check": each.check,
                "Verdict": each.verdict,
                "Found": each.found,
                "Remedy": each.remedy or None,
                "Figures": dict(each.figures),
            }
            for each in findings
        ],
    }
