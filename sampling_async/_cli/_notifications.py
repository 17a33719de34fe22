"""The commands about notifications: receive them, look at them, handle dead ones again."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import typer
from attrs import frozen
from rich.text import Text

from sampling_async._cli import _rendering as show
from sampling_async._cli._commands import CommandGroup
from sampling_async._cli._connection import ServiceOptions, fail
from sampling_async._cli._options import argument, flag, given, option
from sampling_async._cli._stores import STORE, existing_store, is_new, store_at
from sampling_async._cli._tally import DONE, INCOMPLETE, USAGE
from sampling_async._contract.checks import count_of
from sampling_async._contract.extras import install
from sampling_async._wire.address import comparable
from sampling_async.notifications import (
    Completion,
    Inbox,
    Kind,
    Reconciliation,
    SqlStore,
    State,
    UnknownNotification,
    Validity,
    kept_secrets,
    rotate_secrets,
)
from sampling_async.notifications._facts import DamagedStoreError
from sampling_async.notifications._stores import run_once
from sampling_async.simulator._transport import listening

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator

    from sampling_async import PartnerSettings
    from sampling_async.notifications import Fact

SHARED_SECRETS: Final = "SAMPLING_SHARED_SECRETS"
_option: Final = partial(given, panel="Who may post")
_MOST_ROWS: Final = 50
_WIDE: Final = 100
_POLL_SECONDS: Final = 0.5
_PORT: Final = 8090
_SERVED_AT: Final = f"http://127.0.0.1:{_PORT}"

app: Final = CommandGroup("Receive the service's notifications, and look at what was received.")

PUBLIC_URL: Final = option("URL", "The address at which the operator reaches this, if it is another one.")
KINDS: Final = option("KIND", "This kind only; may be given again.", "--kind")
JSON: Final = "JSON lines, on a terminal too."


@frozen(kw_only=True)
class Guard:
    """The options of `serve` that say who may post."""

    networks: list[str] | None = _option(
        "NETWORK", "Addresses they may come from, 198.51.100.0/24; may be given again. Default: all.", "--from"
    )
    trusted_proxies: list[str] | None = _option(
        "NETWORK",
        "Addresses of your own proxies: their X-Forwarded-For is believed. `unix` for a Unix socket.",
        "--trusted-proxy",
    )
    require_signature: bool = _option(
        "",
        f"Refuse completions and terminates without EncryptedValue. It is checked with the secrets in"
        f" {SHARED_SECRETS}, separated by commas.",
        "--require-signature",
        default=False,
    )

    def inbox(self, store: SqlStore) -> Inbox:
        """Return an inbox with these options, and with the secrets that are kept in its store."""
        shared = [each for each in os.environ.get(SHARED_SECRETS, "").split(",") if each.strip()]
        return Inbox(
            store,
            secrets=kept_secrets(store),
            networks=self.networks or (),
            trusted_proxies=self.trusted_proxies or (),
            shared_secrets=shared,
            require_signature=self.require_signature,
        )


@app.takes(guard=Guard, json=JSON)
def serve(
    guard: Guard,
    *,
    store: str = STORE,
    port: int = option("N", "0 for a free one.", min=0, max=65535, default=_PORT),
    host: str = option("ADDRESS", "Where to listen.", default="127.0.0.1"),
    public_url: str | None = PUBLIC_URL,
) -> None:
    """Receive notifications until Ctrl-C, and store each one before it is acknowledged.

    It prints the URL of each kind, to be entered at the operator. They hold
    secrets, which are kept in the store: they stay the same when it is
    started again. Put a proxy with TLS in front, and give its address with
    --public-url.
    """
    if find_spec("uvicorn") is None:
        fail(f"uvicorn is missing: {install('notifications')}", USAGE)
    opened = store_at(store)
    inbox = guard.inbox(opened)
    _until_ctrl_c(_serve(inbox, opened, host, port, public_url))


def _until_ctrl_c(work: Coroutine[Any, Any, None]) -> None:
    with suppress(KeyboardInterrupt):  # the usual end
        asyncio.run(work)


async def _serve(inbox: Inbox, store: SqlStore, host: str, port: int, public_url: str | None) -> None:
    import uvicorn  # noqa: PLC0415  an extra, and slow to load

    with listening(host, port) as listener:
        address = f"[{host}]" if ":" in host else host
        base = public_url or f"http://{address}:{listener.getsockname()[1]}"
        urls = inbox.urls(base)
        run_once(store.copy(), lambda opened: opened.keep_url(base))  # for `settings`
        config = uvicorn.Config(
            inbox.app,
            lifespan="off",
            ws="none",
            access_log=False,  # it would hold the secrets of the paths
            proxy_headers=False,  # the inbox reads X-Forwarded-For itself, of trusted proxies only
            log_level="warning",
            timeout_graceful_shutdown=5,
        )
        async with inbox:
            # The socket listens already, so the URLs work as soon as they are shown.
            if show.as_lines():
                show.emit_json({str(kind): url for kind, url in urls.items()})
            else:
                show.print_pairs((str(kind.setting), Text(url, style="cyan")) for kind, url in urls.items())
                show.screen().print(Text("\nThe URLs hold secrets. Ctrl-C ends it.", style="dim"))
            await uvicorn.Server(config).serve(sockets=[listener])


@app.takes("show", json=JSON, csv=True)
def show_facts(
    *,
    store: str = STORE,
    kind: list[Kind] | None = KINDS,
    everything: bool = flag("Quota statuses that a newer one has replaced, too.", "--all"),
) -> None:
    """Show what was received: each fact once, however often it came."""
    _show(store, leave_out=None if everything else Validity.STALE, kinds=kind or None)


@app.takes(json=JSON, csv=True)
def dead(*, store: str = STORE) -> None:
    """Show the dead facts: their handler has given up. `replay` makes them pending again."""
    _show(store, state=State.DEAD)


@app.takes()
def tail(*, store: str = STORE, kind: list[Kind] | None = KINDS) -> None:
    """Print facts as they come, a line of JSON each, until Ctrl-C."""

    async def follow() -> None:
        last, damaged = existing_store(store).last_id(), list[int]()
        while True:
            for fact in _readable(store, damaged, after=max([last, *damaged[-1:]]), kinds=kind or None):
                last = fact.id
                show.emit_json(_fact_json(fact))
            await asyncio.sleep(_POLL_SECONDS)

    _until_ctrl_c(follow())


@app.takes(quiet=True)
def replay(
    fact_ids: list[int] | None = argument(
        "IDS", "Facts to handle again, handled ones too.", min=1, default=None
    ),
    *,
    store: str = STORE,
) -> None:
    """Make facts pending again: those named, or all dead ones."""
    count = run_once(existing_store(store), lambda opened: opened.replay(fact_ids))
    show.note(f"Due to their handlers again: {count:,}")
    raise typer.Exit(DONE if count or not fact_ids else INCOMPLETE)


@app.takes(quiet=True)
def prune(
    *,
    store: str = STORE,
    days: float = option(
        "DAYS", "Days for which receipts are kept.", "--older-than", min=0, max=36_500, default=30
    ),
) -> None:
    """Delete the receipts of hits that are older than some days.

    Facts stay, because a repetition may come late, and so does whatever was
    not understood. A file keeps its size and has free room.
    """
    before = datetime.now(UTC) - timedelta(days=days)
    count = existing_store(store).prune(before)
    show.note(f"Receipts deleted: {count:,}")


@app.takes(service=ServiceOptions, json=JSON)
def settings(
    service: ServiceOptions,
    *,
    store: str = STORE,
    public_url: str | None = PUBLIC_URL,
    rotate: bool = flag(
        "Make new secrets first. The last ones stay valid; restart `serve` to have both.", "--rotate"
    ),
) -> None:
    """Show the five URLs to enter at the operator, and whether its settings have them.

    Without --public-url it is the address of the last `serve` with this store.
    The settings are read if the service's address is given; exit code 1 says
    that one differs. The URLs hold secrets. In JSON they are what `simulate
    --notify` takes.
    """
    if is_new(store):
        typer.echo(f"{store} is a new store, with new secrets; `serve` must get the same file", err=True)
    opened = store_at(store)
    secrets = rotate_secrets(opened) if rotate else kept_secrets(opened)
    base = public_url or run_once(opened, SqlStore.url) or _SERVED_AT
    urls = Inbox(opened, secrets=secrets).urls(base)
    is_given = service.base_url or service.profile
    found = service.call(lambda client: client.get_settings()) if is_given else None
    verdicts = {kind: _verdict(found, kind, url) for kind, url in urls.items()}
    if show.as_lines():
        show.emit_json(urls)
        for kind, verdict in verdicts.items():
            if verdict is not None:
                typer.echo(f"{kind.setting}: {verdict}", err=True)
    else:
        show.print_pairs(
            (f"{kind.setting} ({verdicts[kind] or 'not compared'})", Text(url)) for kind, url in urls.items()
        )
    raise typer.Exit(INCOMPLETE if set(verdicts.values()) - {None, "same"} else DONE)


def _verdict(found: PartnerSettings | None, kind: Kind, url: str) -> str | None:
    """Return what the operator has for a kind: the same, another one, or nothing; None if that is not known."""
    if found is None:
        return None
    value = found.value(str(kind.setting))
    if value is None:
        return "not set"
    if kind is Kind.QUOTA_STATUS and found.quota_notifications_enabled is False:
        return "Quota Notifications Enabled is False"
    return "same" if comparable(value) == comparable(url) else "another URL"


def _readable(store: str, damaged: list[int], *, after: int = 0, **only: Any) -> Iterator[Fact[Any]]:
    """Yield facts of a store. A line on stderr names one that is damaged, and `damaged` gets its ID."""
    while True:
        try:
            for fact in existing_store(store).facts(after=after, **only):
                after = fact.id
                yield fact
        except DamagedStoreError as exc:
            if exc.fact_id is None:
                raise
            damaged.append(after := exc.fact_id)
            typer.echo(f"fact {after} is damaged and left out; use a backup of {store}", err=True)
        else:
            return


def _show(store: str, *, leave_out: Validity | None = None, **only: Any) -> None:
    damaged: list[int] = []
    facts = (fact for fact in _readable(store, damaged, **only) if fact.validity is not leave_out)
    if show.as_lines():
        for fact in facts:
            show.emit_json(_fact_json(fact))
    else:
        _show_table(facts)
    raise typer.Exit(INCOMPLETE if damaged else DONE)


def _show_table(facts: Iterable[Fact[Any]]) -> None:
    screen = show.screen()
    count, shown = 0, deque[Any](maxlen=_MOST_ROWS)  # a store may have millions
    for fact in facts:
        count += 1
        shown.append(fact)
    # On a narrow terminal the fields need the room.
    is_wide = screen.width >= _WIDE
    names = ("Fact", "Kind", *(["Received"] if is_wide else []), "Times", "State", "Fields")
    table = show.new_table(*names, right=["Fact", "Times"])
    for fact in shown:
        table.add_row(
            str(fact.id),
            str(fact.kind or "unknown"),
            *([f"{fact.received_at:%m-%d %H:%M:%S}"] if is_wide else []),
            str(fact.receipts),
            fact.state if fact.validity is Validity.STANDS else fact.validity,
            show.plain(", ".join(f"{name}={value}" for name, value in _shown_fields(fact).items())),
        )
    screen.print(table if count else Text("No facts.", "dim"))
    if count > _MOST_ROWS:
        text = f"The last {_MOST_ROWS} of {count_of(count, 'fact')}; `--json` shows all."
        screen.print(Text(text, style="dim"))


def _shown_fields(fact: Fact[Any]) -> dict[str, Any]:
    """Return the fields of a fact without its signature, after what they do not say: reason, worth, anomaly."""
    notification, means = fact.notification, {}
    if isinstance(notification, UnknownNotification):
        means["reason"] = notification.reason
    if isinstance(notification, Completion):
        means["worth"] = f"{notification.revenue:.2f}"  # the field Revenue counts hundredths
    if isinstance(notification, Reconciliation) and notification.amount is not None:
        means["worth"] = f"-{notification.amount:.2f}"
    if fact.anomaly:
        means["anomaly"] = fact.anomaly
    return {**means, **{name: value for name, value in fact.fields.items() if name != "EncryptedValue"}}


def _fact_json(fact: Fact[Any]) -> dict[str, Any]:
    notification = fact.notification
    unknown = (
        {"Reason": notification.reason, "Body": notification.body.decode("utf-8", "backslashreplace")}
        if isinstance(notification, UnknownNotification)
        else {}
    )
    return {
        "FactID": fact.id,
        "Key": fact.key,
        "Kind": str(fact.kind or "unknown"),
        **show.fields_of(fact, "posted_as fields anomaly receipts differing received_at verified corrects"),
        "Standing": fact.validity,
        **show.fields_of(fact, "state attempts error"),
        **unknown,
    }
