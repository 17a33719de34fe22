"""The inbox: receives notifications, stores them, and passes facts to handlers."""

from __future__ import annotations

import logging
import re
import secrets as random_secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeVar

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import (
    require_functions,
    require_instance,
    text_of,
    texts_of,
    whole_id,
    whole_number,
)
from sampling_async._contract.records import INT64_MAX, safe_repr
from sampling_async._pacing.threads import in_thread, join_uncancelled, start
from sampling_async.notifications._access import AccessControl, ForgedError, Signatures
from sampling_async.notifications._app import Admission, Headers, HitResponse, NotificationsApp
from sampling_async.notifications._bodies import MOST_BYTES, RefusedBodyError, is_compressed
from sampling_async.notifications._committer import Committer
from sampling_async.notifications._entries import read_entries
from sampling_async.notifications._facts import Hit, Receipt, State, StoreError
from sampling_async.notifications._handlers import Handlers, checked_records, kind_of
from sampling_async.notifications._handling import HandlerPolicy, Handling
from sampling_async.notifications._reading import Arrivals, FactStream, InboxStatus, status_of
from sampling_async.notifications._records import SETTINGS, Kind
from sampling_async.notifications._stores import AnyStore, run_once, store_of

if TYPE_CHECKING:
    from types import TracebackType

    from sampling_async._contract.checks import Text
    from sampling_async.notifications._records import Notification
    from sampling_async.notifications._sql import SqlStore

N = TypeVar("N", bound="Notification")
H = TypeVar("H", bound=Callable[..., Any])
_Pairs: TypeAlias = "list[tuple[str, str]]"

_LOG: Final = logging.getLogger("sampling_async.notifications")
_SECRET_HEADERS: Final = {"authorization", "cookie", "proxy-authorization", "api_auth_key"}
_LARGE: Final = 1 << 13
_KINDS: Final = {kind.value: kind for kind in Kind}


_STORED: Final = HitResponse(200, b"OK")
_NOT_ALLOWED: Final = HitResponse(403, b"This address may not post here")
_NOT_SIGNED: Final = HitResponse(403, b"The signature is missing or wrong")
_NOT_FOUND: Final = HitResponse(404, b"Not found")
_TOO_LARGE: Final = HitResponse(413, b"The body is too large")
_NOT_READ: Final = HitResponse(415, b"The content encoding is not known; gzip and deflate are")
_NOT_STORED: Final = HitResponse(503, b"Not stored; send it again")


class Inbox:
    """Takes in the notifications of the service ("Events"): stores each one, then acknowledges it.

        store = SqliteStore("notifications.db")
        inbox = Inbox(store, secrets=kept_secrets(store))

        @inbox.on(Completion)
        async def paid(fact: Fact[Completion]) -> None: ...

        @inbox.on(UnknownNotification)
        async def look(fact: Fact[UnknownNotification]) -> None: ...

        async with inbox:               # in the lifespan of your application
            app.mount("/notifications", inbox.app)

    Enter the URLs of `inbox.urls("https://partner.example/notifications")` at the operator. Each one holds
    a secret: keep them out of logs. Any framework can also call `receive` or `receive_sync`.

    A *hit* is one HTTP request. Before and after the block, hits get a 503, so that they are sent again. It may
    be entered again, in another event loop too, as `TestClient` does in each test.

    Args:
        store: The path of a file, a `SqliteStore`, a `PostgresStore`, or the address of a database.
        secrets: The secrets of the URLs, at least 16 characters each: one or several for all kinds, or a
            mapping from kinds. All of them are valid; `urls` shows the first. See `kept_secrets`.
        basic: Names and passwords of Basic auth, instead of secrets or in addition to them.
        networks: Where hits may come from, such as `"198.51.100.0/24"`; by default from everywhere.
        trusted_proxies: The networks of your proxies, whose X-Forwarded-For is believed; `"unix"` for one that
            connects through a Unix socket.
        shared_secrets: The secrets that EncryptedValue is checked with. A wrong value is refused with 403: its
            receipt is stored, but no fact.
        require_signature: Whether a completion or terminate without EncryptedValue is refused likewise.
        handling: How handlers are called.
        clock: The clock, in seconds since 1970.

    Raises:
        InvalidRequestError: There is neither a secret nor Basic auth, or one of them is too short.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        secrets: Text | Iterable[Text] | Mapping[Kind, Text | Iterable[Text]] = (),
        basic: Iterable[tuple[Text, Text]] = (),
        networks: Iterable[str] = (),
        trusted_proxies: Iterable[str] = (),
        shared_secrets: Text | Iterable[Text] = (),
        require_signature: bool = False,
        handling: HandlerPolicy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        known = _known(secrets, basic, networks, trusted_proxies, shared_secrets, is_required=require_signature)
        # Deleted before an error is raised: error reports may show the local variables of this frame.
        del secrets, basic, shared_secrets
        if isinstance(known, str):
            raise InvalidRequestError(known)
        require_instance(require_signature, bool, "require_signature", "True or False")
        require_instance(handling, HandlerPolicy | None, "handling", "a HandlerPolicy")
        require_functions(clock=clock)
        self.store: Final[SqlStore] = store_of(store)
        self._secrets, self._access, self._signatures = known
        self._handlers = Handlers()
        self._policy = handling or HandlerPolicy()
        self._clock = clock
        self._committer = Committer(self.store)
        self._handling: Handling | None = None
        self._is_entered = False
        self._arrivals, self._reading = Arrivals(), threading.Lock()
        self._is_open = False
        self._not_stored_count = 0

    @safe_repr
    def __repr__(self) -> str:
        return f"<Inbox {'open' if self._is_open else 'closed'} {self.store!r}>"

    # --- Opening and closing

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise RuntimeError("an inbox is entered once at a time; make another one over the same store")
        self._handlers.close()
        self._is_entered = True
        try:
            await join_uncancelled(start(self._committer.start))
            if self._handlers:
                hidden = [secret for each in self._secrets.values() for secret in each]
                self._handling = Handling(
                    self._committer, self._handlers, self._policy, secrets=hidden, clock=self._clock
                )
                await self._handling.__aenter__()
            self._is_open = True
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handling is not None:
            self._handling.must_be_outside()
        self._is_open = False
        try:
            if self._handling is not None:
                try:
                    await self._handling.finish()
                finally:
                    handling, self._handling = self._handling, None
                    await handling.__aexit__(exc_type, exc, traceback)
        finally:
            await join_uncancelled(start(self._committer.stop))
            self._is_entered = False

    # --- Receiving

    @property
    def app(self) -> NotificationsApp:
        """The inbox as an ASGI application, to mount in another one or to serve alone.

        It handles no lifespan: open the inbox yourself, or it returns 503.
        """
        return NotificationsApp(self._admit, self._keep)

    def urls(self, base: Text) -> dict[Kind, str]:
        """Return the URL of each kind that has a setting, to be entered at the operator. They hold secrets.

        `base` is the URL that `app` is reached at from outside. Reconciliations come to the URLs of completions
        and terminates; for a separate URL see `path`.

        Raises:
            InvalidRequestError: `base` is no http or https URL.
        """
        base = text_of(base)
        if not isinstance(base, str) or not re.match(r"https?://[^/?#]", base, re.IGNORECASE):
            raise InvalidRequestError(f"the public URL must be like https://partner.example, not {base!r:.60}")
        return {kind: f"{base.rstrip('/')}{self.path(kind)}" for kind in SETTINGS}

    def path(self, kind: Kind) -> str:
        """Return the path of a kind below `app`, with its first secret: `/completion/<secret>`."""
        return "/".join(["", kind, *self._secrets[kind][:1]])

    def refuses(self, kind: str, headers: Headers, peer: str, *, secret: str = "") -> HitResponse | None:
        """Return the response to a hit that is refused without reading its body, else None; see `receive`."""
        admission = self._admit(kind, _pairs(headers), peer or "", secret or "")
        return admission if isinstance(admission, HitResponse) else None

    def _admit(
        self, kind: str, headers: Sequence[tuple[str, str]], peer: str, secret: str
    ) -> Admission | HitResponse:
        """Return who may post, as far as it can be known without the body, or the response to a refused hit."""
        if not self._is_open:
            return _NOT_STORED
        known = _KINDS.get(kind)
        if known is None or not self._access.authenticates(known, secret, headers):
            return _NOT_FOUND
        source = self._access.source(peer, headers)
        if not self._access.allows(source):
            _LOG.warning("a notification from %s was refused: the address is in none of the networks", source)
            return _NOT_ALLOWED
        shown = [(name, "<hidden>" if name in _SECRET_HEADERS else value) for name, value in headers]
        return Admission(known, shown, source)

    async def receive(
        self, kind: str, body: bytes, headers: Headers, peer: str, *, secret: str = "", query: str = ""
    ) -> HitResponse:
        """Store a hit: it is on the disk when this returns a status of 200.

        It never raises. It returns 404 for a wrong secret or kind, 403 for an address or a signature, 413 for a
        body over 1 MiB, 415 for a compression that is neither gzip nor deflate, 503 if it could not be stored.
        If cancelled, it may be stored nevertheless.

        Args:
            kind: The kind whose URL was called.
            body: The body as it came, or decompressed.
            headers: The headers.
            peer: The address of the other end of the connection.
            secret: The secret in the path.
            query: The query string, without its question mark.
        """
        try:
            admission = self._admit(kind, _pairs(headers), peer or "", secret or "")
        except Exception as exc:  # noqa: BLE001  the service must get a 503, so that it sends it again
            return self._not_stored(exc)
        return admission if isinstance(admission, HitResponse) else await self._keep(admission, body, query)

    async def _keep(self, admission: Admission, body: bytes, query: str) -> HitResponse:
        try:
            receipt = self._receipt(admission, body, query)
            if isinstance(receipt, HitResponse):
                return receipt
            if len(receipt.body) < _LARGE and not is_compressed(receipt.body, receipt.headers):
                hit, reply = self._prepared(receipt)
            else:
                # Parsing a large body would stall the event loop for too long, and so would two at once.
                hit, reply = await in_thread(self._prepared_alone, receipt)
            verdicts: list[str] = await self._committer.run(hit, size=len(receipt.body))
        except Exception as exc:  # noqa: BLE001  likewise
            return self._not_stored(exc)
        return self._stored(hit, verdicts, reply)

    def _prepared_alone(self, receipt: Receipt) -> tuple[Hit, HitResponse]:
        with self._reading:
            return self._prepared(receipt)

    def receive_sync(
        self, kind: str, body: bytes, headers: Headers, peer: str, *, secret: str = "", query: str = ""
    ) -> HitResponse:
        """Store a hit as `receive` does, from any thread but the event loop's: it blocks."""
        try:
            admission = self._admit(kind, _pairs(headers), peer or "", secret or "")
            if isinstance(admission, HitResponse):
                return admission
            receipt = self._receipt(admission, body, query)
            if isinstance(receipt, HitResponse):
                return receipt
            hit, reply = self._prepared(receipt)
            verdicts: list[str] = self._committer.submit(hit, size=len(receipt.body)).result()
        except Exception as exc:  # noqa: BLE001  likewise
            return self._not_stored(exc)
        return self._stored(hit, verdicts, reply)

    def _receipt(self, admission: Admission, body: bytes, query: str) -> Receipt | HitResponse:
        """Return a hit as its receipt, or the response if it is refused."""
        if not self._is_open:  # it was closed while the body came
            return _NOT_STORED
        if len(body) > MOST_BYTES:
            return _TOO_LARGE
        kind, headers, source = admission.kind, admission.headers, admission.source
        return Receipt(kind, self._clock(), bytes(body), query or "", headers, source)

    def _prepared(self, receipt: Receipt) -> tuple[Hit, HitResponse]:
        """Return a hit as it is stored, and the response when it is stored."""
        try:
            entries = read_entries(receipt, self._signatures)
        except (ForgedError, RefusedBodyError) as exc:
            verdict = str(exc)
            reply = _NOT_SIGNED
            if isinstance(exc, RefusedBodyError):
                _LOG.warning("a %s notification is answered with %d: %s", receipt.kind, exc.status, verdict)
                reply = _TOO_LARGE if exc.status == _TOO_LARGE.status else _NOT_READ
            return Hit(receipt, (), verdict), reply
        if self._handlers and any(entry.kind is Kind.RECONCILIATION for entry in entries):
            self._handlers.warn_without(Kind.RECONCILIATION)
        return Hit(receipt, entries), _STORED

    def _stored(self, hit: Hit, verdicts: Sequence[str], reply: HitResponse) -> HitResponse:
        if self._not_stored_count:
            _LOG.warning("notifications are stored again; %d were answered with 503", self._not_stored_count)
            self._not_stored_count = 0
        self._arrivals.note(hit.entries, verdicts)
        if self._handling is not None:
            self._handling.wake()
        return reply

    def _not_stored(self, exc: Exception) -> HitResponse:
        if not self._not_stored_count:  # one line for a full disk, not one for each hit
            # The text of another exception may hold what was posted.
            reason = exc if isinstance(exc, StoreError) else type(exc).__name__
            _LOG.error("notifications are not stored, and are answered with 503: %s", reason)
        self._not_stored_count += 1
        return _NOT_STORED

    # --- State

    @property
    def is_open(self) -> bool:
        """Whether it takes hits: its block is open."""
        return self._is_open

    async def status(self) -> InboxStatus:
        """Return how many facts wait and are dead, and how long. For a probe, see `sampling_async.health`.

        The inbox need not be open. It reads the store, in some milliseconds for 100,000 pending facts, and
        raises a StoreError if it cannot.
        """
        return await in_thread(self.read_status)

    def read_status(self) -> InboxStatus:
        """Return what `status` returns, in this thread: for callbacks of metrics."""
        failed = self._handling.failed if self._handling is not None else {}
        return status_of(
            self.store.backlog(),
            dict(failed),
            self._handlers.kinds,
            is_open=self._is_open,
            not_stored=self._not_stored_count,
            now=self._clock(),
        )

    def check_writable(self) -> None:
        """Raise a StoreError if no notification could be stored now; from any thread but the event loop's.

        It writes to the store, as a notification would, but nothing that stays.
        """
        self._committer.submit(lambda store: store.check_writable()).result()

    # --- Facts

    def on(self, *records: type[Any]) -> Callable[[H], H]:
        """Register a handler of facts, before the inbox is entered.

        The handler gets a `Fact`: at least once, and again after a time if it raises (see `HandlerPolicy`,
        `RetryLater`, `GiveUp`). Facts about the same member and survey, or the same quota, come in the order of
        their arrival, one after the other. A function that is no coroutine function is called in a thread.

        If there is any handler, there must be one for `UnknownNotification`. Facts of a kind without a handler
        wait in the store for an inbox that has one.

        Args:
            *records: `Completion`, `Terminate`, ...

        Raises:
            InvalidRequestError: No record is given, one is not a record or has a handler, or the annotation of
                the handler's argument says another one, as `Fact[Terminate]` for `Completion`.
            RuntimeError: The inbox was entered already.
        """
        kinds = checked_records(records)

        def register(handler: H) -> H:
            self._handlers.add(kinds, handler)
            return handler

        return register

    def facts(
        self, *records: type[N], after: int = 0, state: State | None = None, follow: bool = False
    ) -> FactStream[N]:
        """Return the facts in the order of their arrival: `async for fact in inbox.facts(Completion)`.

        The inbox need not be open. Without `records`, the facts of all kinds are returned.

        Args:
            *records: The records to return, such as `Completion`.
            after: The ID of the last fact that you have.
            state: Return only facts in this state.
            follow: Whether to wait for more facts at the end, forever.

        Raises:
            InvalidRequestError: One of `records` is not a record, `after` no ID, or `state` no State.
        """
        kinds = [kind_of(record) for record in records] or None
        after = whole_number(whole_id(after, "after"), "after", least=0, most=INT64_MAX)
        if state is not None and (follow or state not in list(State)):
            raise InvalidRequestError(
                "state must be a State, such as State.DEAD, and without follow: facts change"
            )
        poll = self._policy.poll if follow else None
        return FactStream(self.store, kinds, after, state, poll=poll, arrivals=self._arrivals)


def kept_secrets(store: AnyStore) -> Mapping[Kind, Sequence[str]]:
    """Return the secrets of a store, the newest first; create and store one for each kind without any.

    It blocks for some milliseconds, so call it before the event loop runs. Whoever can read the store's file
    can read them.

    Raises:
        StoreError: The store cannot be opened.
    """
    return _with_store(store, lambda opened: opened.secrets(_fresh()))


def rotate_secrets(store: AnyStore, *, keep: int = 2) -> Mapping[Kind, Sequence[str]]:
    """Add a new secret for each kind and return all, the newest first; the newest `keep` of each stay valid.

    A running inbox uses them after its next start. Enter the new URLs at the operator, and rotate once more
    when nothing comes to the old ones any longer.

    Raises:
        InvalidRequestError: `keep` is not a whole number of at least 1.
        StoreError: The store cannot be opened.
    """
    whole_number(keep, "keep")

    def rotated(opened: SqlStore) -> Mapping[Kind, Sequence[str]]:
        opened.rotate(_fresh(), keep=min(keep, INT64_MAX))
        return opened.secrets({})

    return _with_store(store, rotated)


def _with_store(
    store: AnyStore, operation: Callable[[SqlStore], Mapping[Kind, Sequence[str]]]
) -> Mapping[Kind, Sequence[str]]:
    # Not the store that was passed, which an open inbox may be using.
    return run_once(store_of(store).copy(), operation)


def _fresh() -> dict[Kind, str]:
    return {kind: random_secrets.token_urlsafe(32) for kind in Kind}


def _known(
    secrets: Text | Iterable[Text] | Mapping[Kind, Text | Iterable[Text]],
    basic: Iterable[tuple[Text, Text]],
    networks: Iterable[str],
    trusted_proxies: Iterable[str],
    shared_secrets: Text | Iterable[Text],
    *,
    is_required: bool,
) -> tuple[dict[Kind, tuple[str, ...]], AccessControl, Signatures] | str:
    """Return who may post, or the text of an error: raised here, its frames would show secrets."""
    try:
        by_kind, passwords = _by_kind(secrets), tuple(basic)
        if not passwords and not all(by_kind.values()):
            return (
                "an inbox needs a secret for each kind, or Basic auth, because whoever knows its URLs can post"
                " to them; kept_secrets(store) makes secrets and keeps them"
            )
        access = AccessControl(by_kind, basic=passwords, networks=networks, trusted_proxies=trusted_proxies)
        return by_kind, access, Signatures(shared_secrets, is_required=is_required)
    except InvalidRequestError as exc:
        return str(exc)
    except (TypeError, ValueError):
        return (
            "secrets must be a text, several, or a mapping from kinds to these; basic a list of pairs of a name"
            " and a password; shared_secrets a text or several"
        )


def _by_kind(
    secrets: Text | Iterable[Text] | Mapping[Kind, Text | Iterable[Text]],
) -> dict[Kind, tuple[str, ...]]:
    given = secrets if isinstance(secrets, Mapping) else dict.fromkeys(Kind, texts_of(secrets))
    unknown = [kind for kind in given if kind not in list(Kind)]
    if unknown:
        raise InvalidRequestError(f"{unknown[0]!r} is no kind of notification: {', '.join(Kind)}")
    return {kind: texts_of(given.get(kind, ())) for kind in Kind}


def _pairs(headers: Headers) -> _Pairs:
    pairs: Any = headers.items() if isinstance(headers, Mapping) else headers
    return [(_text(name).lower(), _text(value)) for name, value in pairs]


def _text(value: str | bytes) -> str:
    """Return a name or value of a header as text; some frameworks have bytes."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
