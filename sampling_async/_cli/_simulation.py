"""The commands that need no service: a simulated service to develop against, and a demo of everything."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import anyio
import typer
from attrs import asdict, frozen
from rich.text import Text

from sampling_async import DecodeError, InvalidRequestError
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import fail
from sampling_async._cli._files import bands_file, check_place
from sampling_async._cli._options import flag, given, option, takes
from sampling_async._cli._tally import DONE, INCOMPLETE, USAGE
from sampling_async._contract.checks import count_of
from sampling_async._contract.extras import install
from sampling_async._private_files import written_whole
from sampling_async._profiles.file import toml_of
from sampling_async._profiles.record import PanelProfile
from sampling_async._wire.address import is_loopback
from sampling_async.simulator._transport import listening

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sampling_async.simulator import SimulatedMember

_of_latency: Final = partial(option, panel="Latency of the simulated service")
_of_notify: Final = partial(given, panel="Notifications of the simulated service")
_BADLY: Final[dict[str, Any]] = {
    "late": 0.1,
    "late_seconds": 5.0,
    "repeated": 0.1,
    "forged": 0.02,
    "drifted": 0.2,
    "corrected": 0.02,
    "terminated_late": 0.02,
    "reconciled": 0.02,
}
_WRITTEN_BY: Final = "# Written by `sampling-async simulate`, which replaces it.\n"
_SUFFIXES: Final = (".parquet", ".jsonl")
_MOST_MEMBERS = 10_000_000
_DIGITS = 8


@frozen(kw_only=True)
class Notify:
    """Where the simulated service sends notifications."""

    notify: str | None = _of_notify(
        "URL|FILE",
        "Send notifications: to the URLs in a file, as `notifications serve` prints them, or to a URL:"
        " {kind} in it is replaced, or the kind is appended.",
    )
    notify_badly: bool = _of_notify(
        "", "Send some of them late, twice, forged or in other spellings.", "--notify-badly", default=False
    )
    survey_seconds: float = _of_notify("SECONDS", "How long a member's survey takes.", default=1.0, min=0)

    def urls(self) -> dict[str, str] | None:
        """Return the URL of each kind; None if nothing is sent."""
        from sampling_async.notifications import Kind  # noqa: PLC0415  slow to load

        if self.notify is None:
            return None
        kinds = [str(kind) for kind in Kind if kind.setting]
        if _is_web_address(self.notify):
            url = self.notify if "{kind}" in self.notify else f"{self.notify.rstrip('/')}/{{kind}}"
            return {kind: url.replace("{kind}", kind) for kind in kinds}
        try:
            found: Any = json.loads(Path(self.notify).read_bytes())
        except OSError as exc:
            raise InvalidRequestError(
                f"--notify {self.notify}: no http URL, and no file: {exc.strerror}"
            ) from None
        except (ValueError, RecursionError):
            found = None
        is_right = isinstance(found, dict) and found.keys() <= set(kinds)
        if not is_right or not all(isinstance(url, str) and _is_web_address(url) for url in found.values()):
            raise InvalidRequestError(
                f"{self.notify}: expected one JSON object of URLs by kind, as `notifications serve` prints it"
            )
        urls: dict[str, str] = found
        return urls


def _is_web_address(text: str) -> bool:
    try:
        return urlsplit(text).scheme in {"http", "https"}
    except ValueError:  # a bracket that is not closed
        return False


@takes(notify=Notify, json="Print the address, panel and key as one JSON object.")
def simulate(
    notify: Notify,
    *,
    port: int = option("N", "The port; 0 for any free one.", min=0, max=65535, default=8080),
    host: str = option("ADDRESS", "The address to listen on.", default="127.0.0.1"),
    seed: int = option("N", "Seed of the random data. The same seed gives the same data.", default=0),
    surveys: int = option("N", "The number of surveys.", min=1, max=100_000, default=20),
    members: list[str] | None = option(
        "N|FILE",
        "The number of members (default 200), or a .parquet or .jsonl file to write them to, for "
        "`match`. Give it twice for both.",
    ),
    panels: int = option(
        "N", "The number of panels of one partner, each with a Guid and members.", min=1, max=1000, default=1
    ),
    profiles: Path | None = option("FILE", "Write a file of profiles p1, p2 ..., one for each panel."),
    faults: Path | None = option(
        "FILE", 'Faults to make: a JSON file, [{"Fault": "status", "Status": 503, "On": {"Every": 10}}].'
    ),
    latency_base: float = _of_latency("SECONDS", "Seconds that a call takes.", min=0, default=0.0),
    latency_per_id: float = _of_latency("SECONDS", "Seconds that each quota ID adds.", min=0, default=0.0),
    workers: int | None = _of_latency(
        "N", "The maximum of calls at the same time; others wait. Default: no limit.", min=1
    ),
) -> None:
    """Run a simulated service for development, until Ctrl-C.

    The command prints the address, panel and key, to copy into another shell. In
    a file or a pipe, it prints what a shell can source.
    """
    need_simulator()
    from sampling_async.simulator import Latency, Notifying, Simulator  # noqa: PLC0415  an extra, slow to load

    size, files = _size_and_files(members or [])
    planned = _faults_of(faults)
    urls = notify.urls()
    if profiles is not None:
        _check_profiles_file(profiles)
    badly = _BADLY if notify.notify_badly else {}
    try:
        simulator = Simulator(
            seed,
            surveys=surveys,
            members=size,
            latency=Latency(a=latency_base, b=latency_per_id, workers=workers),
            faults=planned,
            notifying=None if urls is None else Notifying(survey_seconds=notify.survey_seconds, **badly),
        )
    except ValueError as exc:
        raise InvalidRequestError(str(exc)) from None
    for _ in range(1, panels):
        simulator.add_panel(members=size, api_key=simulator.api_key)  # as the panels of one partner
    # It listens before files are written and the address is shown: who reads the address can connect to it.
    with listening(host, port) as listener:
        base_url = f"http://{_in_url(host)}:{listener.getsockname()[1]}"
        written = [
            # `panel.parquet`, then `panel-p2.parquet` and so on.
            (number, write_panel(panel.members.values(), file.with_stem(_of_panel(file.stem, number))))
            for number, panel in enumerate(simulator.panels, 1)
            for file in files
        ]
        if profiles is not None:
            _write_profiles(simulator, base_url, profiles)
        if show.wanted.json:
            show.emit_json(_service_json(simulator, base_url))
        else:
            _show_service(simulator, base_url, written, profiles)
        simulator.notification_urls = urls
        sending = simulator.notifications.sending_to(urls) if urls is not None else nullcontext()
        with suppress(KeyboardInterrupt), sending:  # the usual end
            simulator.run(listener=listener)


def _size_and_files(given: list[str]) -> tuple[int, tuple[Path, ...]]:
    """Return what --members says: the number of members, and the files to write them to."""
    numbers = [each for each in given if re.fullmatch(r"[+-]?\d+", each)]
    files = tuple(Path(each) for each in given if each not in numbers)
    if len(numbers) > 1 or any(len(each) > _DIGITS or not 0 < int(each) <= _MOST_MEMBERS for each in numbers):
        raise InvalidRequestError(
            f"--members must be one number from 1 to {_MOST_MEMBERS:,}, or files, or both, not "
            f"{' '.join(numbers)[:40]}"
        )
    for file in files:
        suffix = file.suffix.lower()
        if suffix not in _SUFFIXES:
            raise InvalidRequestError(
                f"--members must be a number, or a file that ends in {' or '.join(_SUFFIXES)}, not {file}"
            )
        check_place("--members", file)
        if suffix == ".parquet" and find_spec("pyarrow") is None:
            raise InvalidRequestError(f"{file} needs pyarrow: {install('panel')}; .jsonl needs nothing")
    return int(numbers[0]) if numbers else 200, files


def write_panel(members: Iterable[SimulatedMember], output: Path) -> Path:
    """Write simulated members, one row each, and beside them a file with the age bands; return the file."""
    from sampling_async.simulator import AGE_BANDS  # noqa: PLC0415  an extra, and slow to load
    from sampling_async.simulator._members import question_ids  # noqa: PLC0415

    rows = (_row(member, question_ids()) for member in members)
    if output.suffix.lower() == ".parquet":
        from sampling_async._cli._match_run import write_rows  # noqa: PLC0415  numpy, pyarrow: an extra

        write_rows(list(rows), output)
    else:
        with written_whole(output) as unfinished, unfinished.open("wb") as file:
            file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    with written_whole(bands_file(output)) as unfinished:
        unfinished.write_text(json.dumps(dict(AGE_BANDS)) + "\n", encoding="utf-8")
    return output


def _row(member: SimulatedMember, questions: tuple[int, ...]) -> dict[str, Any]:
    answers = {str(question_id): member.profile.get(question_id) for question_id in questions}
    return {
        "member_code": member.member_code,
        "device_type": member.device_type_id,
        "participations": [asdict(each) for each in member.participations],
        # Sets are sorted, so that the same seed writes the same file.
        **{name: sorted(each) if isinstance(each, frozenset) else each for name, each in answers.items()},
    }


def _faults_of(file: Path | None) -> tuple[Any, ...]:
    from sampling_async.simulator import read_faults  # noqa: PLC0415  an extra, and slow to load

    if file is None:
        return ()
    try:
        return read_faults(file.read_bytes())
    except OSError as exc:
        raise InvalidRequestError(f"{file}: {exc.strerror}") from None
    except DecodeError as exc:
        raise InvalidRequestError(f"{file}: {exc}") from None


def _service_json(simulator: Any, base_url: str) -> dict[str, Any]:
    return {
        "BaseURL": base_url,
        "PanelGUID": simulator.panel_guid,
        "APIKey": simulator.api_key,
        "Members": len(simulator.members),
        "Surveys": len(simulator.inventory.surveys),
        "RecontactQuotaIDs": list(simulator.recontact_quota_ids),
        "Panels": [
            {"PanelGUID": panel.panel_guid, "APIKey": panel.api_key, "Members": len(panel.members)}
            for panel in simulator.panels
        ],
    }


def _check_profiles_file(file: Path) -> None:
    """Refuse a file that somebody else has written: it may hold the only copy of other profiles."""
    check_place("--profiles", file)
    if file.exists() and not file.read_text("utf-8", "replace").startswith(_WRITTEN_BY):
        raise InvalidRequestError(f"--profiles {file} holds other profiles; name another file")


def _write_profiles(simulator: Any, base_url: str, file: Path) -> None:
    tables = [
        toml_of(
            PanelProfile(
                name=f"p{number}",
                base_url=base_url,
                panel=panel.panel_guid,
                key_variable="SAMPLING_API_KEY",
                allow_http=not is_loopback(urlsplit(base_url).hostname or ""),
            )
        )
        for number, panel in enumerate(simulator.panels, 1)
    ]
    with written_whole(file) as unfinished:
        unfinished.write_text("\n".join([_WRITTEN_BY, *tables]), encoding="utf-8")


def _exports(simulator: Any, base_url: str, profiles: Path | None) -> list[str]:
    """Return lines for a shell: the panels by profiles, or the first panel, and the others beside it."""
    key = f"export SAMPLING_API_KEY={simulator.api_key}"
    if profiles is not None:
        # What is left of another panel would be refused together with a profile.
        file = shlex.quote(str(profiles.absolute()))
        return ["unset SAMPLING_BASE_URL SAMPLING_PANEL_GUID", f"export SAMPLING_PROFILES={file}", key]
    first = [f"export SAMPLING_BASE_URL={base_url}", f"export SAMPLING_PANEL_GUID={simulator.panel_guid}", key]
    if len(simulator.panels) == 1:
        return first
    panels = enumerate(simulator.panels, 1)
    return [*first, *(f"export SAMPLING_PANEL_GUID_P{number}={panel.panel_guid}" for number, panel in panels)]


def _in_url(host: str) -> str:
    # One that listens everywhere is reached from here.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  what the user has named
    return f"[{host}]" if ":" in host else host


def _of_panel(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-p{number}"


def _show_service(
    simulator: Any, base_url: str, files: Sequence[tuple[int, Path]], profiles: Path | None
) -> None:
    member_code = next(iter(simulator.members))
    quota_ids = [quota.quota_id for survey in simulator.inventory.surveys for quota in survey.quotas]
    number = len(simulator.panels)
    its_panels = "" if number == 1 else f" and {number} panels"
    quotas = count_of(len(quota_ids), "quota")
    title = f"Simulated service at {base_url} with {quotas}{its_panels}. In another shell:"

    def command(text: str, number: int = 1) -> str:
        if profiles is not None:
            return f"sampling-async {text} --profile p{number}"
        guid = f"SAMPLING_PANEL_GUID=$SAMPLING_PANEL_GUID_P{number} " if number > 1 else ""
        return f"{guid}sampling-async {text}"

    named = [(number, shlex.quote(str(file))) for number, file in files]
    tries = (
        command("quotas"),
        command(" ".join(["bulk-invite", member_code, *map(str, quota_ids[:3])])),
        *(command(f"recontact {each}") for each in simulator.recontact_quota_ids[:1]),
        *(command(f"match {file}", number) for number, file in named),
        *(
            command(f"campaign {file} --out {_of_panel('night', number)} --dry-run", number)
            for number, file in named
        ),
    )
    screen = show.screen()
    # In a file or a pipe, all but the settings are comments, so that a shell can source it.
    hidden = "" if screen.is_terminal else "# "

    def show_line(text: str, style: str = "") -> None:
        screen.print(Text(text, style), soft_wrap=True)

    show_line(f"{hidden}{title}", "bold")
    for line in _exports(simulator, base_url, profiles):
        show_line(f"  {line}")
    show_line(f"{hidden}Then try:", "bold")
    for line in tries:
        show_line(f"{hidden}  {line}")
    show_line(f"{hidden}Press Ctrl-C to end it.", "dim")
    # The server runs until a signal; without a flush, a pipe would get these lines only then.
    screen.file.flush()


@takes(json="Print one JSON object, on a terminal too.", quiet=True)
def demo(
    *,
    members: int = option("N", "The number of members.", min=1, max=_MOST_MEMBERS, default=600),
    surveys: int = option("N", "The number of surveys.", min=1, max=100_000, default=120),
    seed: int = option("N", "Seed of the simulated service.", default=7),
    faults: bool = flag("Let the service sometimes answer 503 or drop a connection.", "--faults"),
    out: Path | None = option("DIR", "The folder for the report and the ledgers. Default: a new one."),
) -> None:
    """Show a partner's day: a panel in, invites out, and how each survey ended.

    The simulated service has a port of its own. Quotas are watched, the panel
    is matched, a campaign requests invites, notifications come in. At the end,
    everything is compared with the service's own ledger, and a report of the
    campaign is written.
    """
    need_simulator("numpy", "pyarrow", "jinja2")
    from sampling_async._cli._demo import Demo  # noqa: PLC0415  needs the extras
    from sampling_async._cli._demo_view import findings_json, print_findings, run_shown  # noqa: PLC0415

    folder = _demo_folder(out)
    settings = Demo(folder=folder, seed=seed, members=members, surveys=surveys, faults=faults)
    findings = anyio.run(run_shown, settings)
    if show.as_lines():
        show.emit_json(findings_json(settings, findings))
    else:
        print_findings(show.screen(), findings, settings)
    raise typer.Exit(DONE if findings.agrees else INCOMPLETE)


def _demo_folder(out: Path | None) -> Path:
    if out is None:
        return Path(tempfile.mkdtemp(prefix="sampling-async-demo-"))
    out.mkdir(parents=True, exist_ok=True)
    if (out / "campaign.ledger").exists():
        raise InvalidRequestError(f"--out {out} holds an earlier demo; name another folder")
    return out


def need_simulator(*others: str) -> None:
    """End the program, with a line that says what to install, if something is missing."""
    missing = [name for name in ("starlette", "uvicorn", *others) if find_spec(name) is None]
    if missing:
        extras = "simulator,panel" if others else "simulator"
        named = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        fail(f"this command needs {named}: {install(extras)}", USAGE)
