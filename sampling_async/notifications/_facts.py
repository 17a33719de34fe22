"""What is stored: a receipt for each hit, and a fact for each event."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from typing import Generic, TypeVar

from attrs import Factory, evolve, field, frozen

from sampling_async import SamplingError
from sampling_async._contract.records import hidden
from sampling_async.notifications._records import Fields, Kind, Notification, UnknownNotification

N_co = TypeVar("N_co", bound=Notification, covariant=True)


class StoreError(SamplingError):
    """The store of notifications cannot be opened, read or written. The text says why."""


class DamagedStoreError(StoreError):
    """A value of the store is one that no inbox writes: another attempt cannot help.

    `fact_id` is the ID of the fact that has it, if it is one.
    """

    fact_id: int | None = None


class StoreConflictError(StoreError):
    """Another transaction was in the way, and nothing of this one was stored: run it again.

    An inbox does so by itself. A store raises it for a deadlock or a serialization failure.
    """


class Validity(StrEnum):
    """Whether a fact is still true.

    `OVERRULED`: a terminate of a member who has a completion of the same survey and wave. `STALE`: a quota
    status that is older than another one of its quota, or a revenue whose `DateTime` is before that of the
    current one. Handlers get only facts that are still true, and corrections.
    """

    STANDS = "stands"
    OVERRULED = "overruled"
    STALE = "stale"


class State(StrEnum):
    """How far the handling of a fact is. `DEAD` facts wait for a replay; `SKIPPED` ones are no longer true."""

    PENDING = "pending"
    HANDLED = "handled"
    DEAD = "dead"
    SKIPPED = "skipped"


@frozen
class Receipt:
    """One hit: what was posted, from where, to which URL."""

    kind: Kind
    at: float
    body: bytes = field(repr=lambda body: f"<{len(body)} bytes>")
    query: str = field(default="", repr=hidden)
    headers: Sequence[tuple[str, str]] = field(default=(), repr=hidden)
    peer: str = ""


@frozen(kw_only=True)
class SurveyEnd:
    """How a member's survey ended, in the form in which the ledger of outcomes joins it with invites.

    Attributes:
        original_survey_id: The survey of the invite, if the member was routed to another one.
        hundredths: The revenue of a completion; what a reconciliation takes back. None if it is not given.
        reason: The reason of a terminate or a reconciliation.
        at: When it ended, in seconds since 1970, if it is known.
    """

    member_code: str = field(repr=hidden)
    survey_id: int
    wave_id: int
    quota_id: int | None
    original_survey_id: int | None
    hundredths: int | None
    reason: str | None
    at: float | None


def fact_key(identity: str, *more: object) -> str:
    """Return a `Fact.key`: a hash, so that it names no member."""
    return sha256("\n".join([identity, *map(str, more)]).encode()).hexdigest()[:32]


@frozen(kw_only=True)
class Entry:
    """One notification of a receipt, prepared for the store.

    Attributes:
        kind: The kind; None if the notification was not understood.
        posted_as: The kind whose URL it came to.
        key: What it is about: a member in a survey and wave, a quota, a survey. Order is kept for each key.
        identity: Identifies the event: a second entry with this identity is a repetition.
        content: A hash of all fields, by which a repetition with other content is noticed.
        rank: Orders the entries of a key where the newest counts; None where all count.
        fields: The fields as JSON.
        reason: Why it was not understood.
        verified: Whether the signature over survey, wave and member was there, and right.
        end: How a member's survey ended; None for the other kinds.
        undated: Whether it closes a quota without a readable time, and so counts from when it came.
        fact_key: The `Fact.key` of the fact that this becomes if it is a new one. The fact keeps it when its
            `key` and `identity` change.
    """

    kind: Kind | None
    posted_as: Kind
    key: str = field(repr=hidden)
    identity: str = field(repr=hidden)
    content: str
    rank: int | None = None
    fields: str = field(default="{}", repr=hidden)
    reason: str = ""
    verified: bool = False
    end: SurveyEnd | None = None
    undated: bool = False
    fact_key: str = field(default=Factory(lambda self: fact_key(self.identity), takes_self=True))

    @property
    def member_code(self) -> str | None:
        return None if self.end is None else self.end.member_code


@frozen
class Hit:
    """One hit as it is stored. A refused hit has no entries; `verdict` says why it was refused."""

    receipt: Receipt
    entries: Sequence[Entry]
    verdict: str = ""

    def without(self, members: AbstractSet[str]) -> Hit:
        """Return the hit without its body if it names one of these; what was not understood is needed whole."""
        is_named = not members.isdisjoint(entry.member_code for entry in self.entries)
        if not is_named or any(entry.kind is None for entry in self.entries):
            return self
        return evolve(self, receipt=evolve(self.receipt, body=b"", query="", headers=()))


@frozen(kw_only=True)
class Fact(Generic[N_co]):
    """One event that the service has reported, however often it did.

    Attributes:
        id: The number of the fact in its store, in the order of arrival.
        key: The same text for the same event, in every store and after a restore. Use it to do your work only
            once, because handlers get a fact at least once. It is a hash of what identifies the event and names
            no member. A correction has its own key, and the corrected fact keeps its key. If an end comes once
            with its wave and once without, the first one counts.
        notification: The notification.
        fields: The fields as they came first, in the service's names.
        received_at: When it came first.
        receipts: How many times it came.
        differing: How many of these differed from the first in some field.
        verified: Whether EncryptedValue proves the survey, the wave and the member. It never proves the kind
            or the revenue.
        anomaly: What was odd about the fields, in words, such as a time that cannot be read; else None.
        posted_as: The kind whose URL it came to.
        corrects: For a completion with another revenue than the member's first: the ID of that first fact. For
            a terminate that was handled and then overruled by a completion: the ID of that terminate.
        validity: Whether it is still true.
        state: How far its handling is.
        attempts: How many times a handler was called with it, this time included.
        error: The type and text of what the last attempt raised.
    """

    id: int
    notification: N_co
    fields: Fields = field(repr=hidden)
    received_at: datetime
    receipts: int = 1
    differing: int = 0
    verified: bool = False
    anomaly: str | None = None
    posted_as: Kind = field(default=Factory(lambda self: self.notification.kind, takes_self=True))
    corrects: int | None = None
    validity: Validity = Validity.STANDS
    state: State = State.PENDING
    attempts: int = 0
    error: str | None = field(default=None, repr=hidden)
    key: str = ""

    @property
    def kind(self) -> Kind | None:
        """The kind, or None if the notification was not understood."""
        return None if isinstance(self.notification, UnknownNotification) else self.notification.kind


@frozen(kw_only=True)
class Settled:
    """The result of one attempt to handle a fact.

    Attributes:
        state: Handled or dead; pending if there is another attempt.
        due: The time of the next attempt, in seconds since 1970.
        error: What the attempt raised.
        counts: Whether the attempt counts; one that ends in `RetryLater` does not.
    """

    fact_id: int
    state: State
    due: float = 0.0
    error: str | None = field(default=None, repr=hidden)
    counts: bool = True


@frozen(kw_only=True)
class Backlog:
    """The facts of a kind that wait for their handler, or for a replay.

    Attributes:
        kind: The kind; None for what was not understood.
        pending: How many wait for their handler, or are with it now.
        dead: How many wait for a replay.
        oldest_at: When the oldest pending one came, in seconds since 1970; None if there is none.
    """

    kind: Kind | None
    pending: int
    dead: int
    oldest_at: float | None
