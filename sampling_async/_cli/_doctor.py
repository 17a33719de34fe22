"""The command `doctor`: is everything in order between this machine and the service?"""

from __future__ import annotations

import textwrap
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio
import typer
from attrs import frozen
from rich.text import Text

from sampling_async import InvalidRequestError, Timeouts, __version__
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import ServiceOptions, asked_key, ended_by_failure
from sampling_async._cli._doctor_findings import Finding, Verdict, without_guids
from sampling_async._cli._doctor_run import CHECKS, READ_SECONDS, CheckOptions, DoctorRun, not_made
from sampling_async._cli._tally import DONE, INCOMPLETE
from sampling_async._profiles import setting
from sampling_async._wire.address import base_url_of, guid_of, proxy_of, require_https_through

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sampling_async._profiles import Profile

_LABELS: Final = {"ok": "ok", "warn": "warn", "fail": "FAIL", "skipped": "skip"}
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
_BESIDE: Final = 6 + max(map(len, CHECKS)) + 2  # the column of the text, on a terminal that is not narrow
_NARROW: Final = 60


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
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show only what is not in order.", metavar="")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, on a terminal too.", metavar="")
    ] = False

    def expected_urls(self) -> Mapping[str, str] | None:
        """Return the URLs of the user's receiver by setting, if they are known.

        Raises:
            InvalidRequestError: --store and --public-url belong together, or there is no such store.
        """
        if (self.store is None) != (self.public_url is None):
            raise InvalidRequestError("give --store and --public-url together: they make the URLs")
        if self.store is None or self.public_url is None:
            return None
        from sampling_async._cli._notifications import existing_store  # noqa: PLC0415  takes time to load
        from sampling_async.notifications import Inbox, kept_secrets  # noqa: PLC0415

        store = existing_store(self.store)
        urls = Inbox(store, secrets=kept_secrets(store)).urls(self.public_url)
        return {kind.setting: url for kind, url in urls.items() if kind.setting}


def doctor(service: ServiceOptions, options: DoctorOptions) -> None:
    """Check all between this machine and the service: address, TLS, proxy, key, panel, settings, speed.

    Each check says what was found and what to do. The command sends Get
    Settings only, six times at most, and requests no invite. Nothing is
    repeated, so --max-concurrency, --attempts and --patience have no effect.
    The output holds no key, no PanelGUID and no member code. The exit code is
    1 if a check failed, and 0 if there are only warnings.
    """
    profile = ended_by_failure(service.panel_of_profile)
    key = ended_by_failure(lambda: service.known_key(profile)) or asked_key(profile)
    expected = ended_by_failure(options.expected_urls)
    is_silent, screen = show.as_lines(options.as_json), show.screen()
    # Not the console's width, which is 80 on every dumb terminal, also on one of 40 columns.
    width = get_terminal_size().columns

    def report(finding: Finding) -> None:
        is_hidden = finding.is_blocked or (options.quiet and finding.verdict in {"ok", "skipped"})
        if not (is_silent or is_hidden):
            for line in lines(finding, width):
                screen.print(line, soft_wrap=True)

    found = ended_by_failure(lambda: _check_options(service, profile, key, expected))
    if isinstance(found, Finding):
        findings = sorted([found, *not_made([found])], key=lambda each: CHECKS.index(each.check))
        report(found)
    else:
        findings = ended_by_failure(lambda: anyio.run(DoctorRun(found, report).run))
    verdict = worst(findings)
    if is_silent and (options.as_json or not options.quiet or verdict != "ok"):
        ended_by_failure(lambda: show.emit_json(document(findings, service.profile)))
    elif not (is_silent or options.quiet):
        screen.print(closing(findings, width), soft_wrap=True)
    raise typer.Exit(INCOMPLETE if verdict == "fail" else DONE)


def _check_options(
    service: ServiceOptions, profile: Profile | None, key: str, expected: Mapping[str, str] | None
) -> CheckOptions | Finding:
    """Return what is checked, or a finding about a setting that the client would refuse."""
    Timeouts(read=service.timeout)  # refuses what the client would refuse
    base_url, panel_guid = service.whereto()
    allow_http = service.may_be_http(profile)
    check = "Address"
    try:
        url = base_url_of(base_url, allow_http=allow_http)
        check = "Panel"
        panel = guid_of(panel_guid, "the PanelGUID").reveal()
        check = "Proxy"
        address = service.proxy_address(profile)
        proxy = proxy_of(address) if address else None
        if proxy is not None:
            require_https_through(proxy, url, allow_http=allow_http)
        check = "TLS"
        tls = service.tls_context(profile)
        check = "Key"
        secret = guid_of(key, "the key") if key else None
    except InvalidRequestError as exc:
        return Finding(check, "fail", str(exc).replace("allow_http=True", "--allow-http"))
    return CheckOptions(
        base_url=url,
        panel_guid=panel,
        key=secret,
        proxy=proxy,
        tls=tls,
        client_cert=service.client_cert or setting(profile, "client_cert"),
        read_seconds=service.timeout or READ_SECONDS,
        expected=expected,
    )


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict of all findings together."""
    verdicts = {each.verdict for each in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


# --- What is shown ------------------------------------------------------------------------------------------


def lines(finding: Finding, width: int) -> Iterator[Text]:
    """Yield the lines of a finding for a terminal. None is wider than the terminal."""
    label = f"{_LABELS[finding.verdict]:<6}", _STYLES[finding.verdict]
    style = "dim" if finding.verdict == "skipped" else ""
    is_narrow = width < _NARROW
    indent = 2 if is_narrow else _BESIDE
    text = _wrapped(finding.found, width - indent)
    beside = "" if is_narrow else text.pop(0)
    check = f"{finding.check:<{_BESIDE - 6}}" if beside else finding.check
    yield Text.assemble(label, (check, style or "bold"), show.plain(beside, style))
    for line in text:
        yield show.plain(" " * indent + line, style)
    for number, line in enumerate(_wrapped(finding.remedy, width - indent - 3)):
        yield show.plain(f"{' ' * indent}{'   ' if number else '-> '}{line}")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False)


def closing(findings: Sequence[Finding], width: int) -> Text:
    """Return the last words: how many checks failed, and how many warn."""
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in _LABELS}
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
