"""Notifications of the service ("Events"): stored before they are acknowledged, handled at least once.

    from sampling_async.notifications import Completion, Fact, Inbox, UnknownNotification, kept_secrets

    inbox = Inbox("notifications.db", secrets=kept_secrets("notifications.db"))

    @inbox.on(Completion)
    async def paid(fact: Fact[Completion]) -> None:
        await book(fact.key, fact.notification.member_code, fact.notification.revenue)

    @inbox.on(UnknownNotification)
    async def look(fact: Fact[UnknownNotification]) -> None:
        await tell_somebody(fact.id)

It needs no framework. `inbox.app` is an ASGI application; `sampling-async notifications serve` runs one alone.
"""

from __future__ import annotations

from sampling_async.notifications._access import verify_redirect
from sampling_async.notifications._app import HitResponse, NotificationsApp
from sampling_async.notifications._erasing import ErasedMember, erase_member
from sampling_async.notifications._facts import (
    Fact,
    State,
    StoreConflictError,
    StoreError,
    Validity,
)
from sampling_async.notifications._handling import GiveUp, HandlerPolicy, RetryLater
from sampling_async.notifications._inbox import Inbox, kept_secrets, rotate_secrets
from sampling_async.notifications._outcomes import OutcomeLedger, OutcomeRow, QuotaFunnel, SurveyEnding
from sampling_async.notifications._postgres import PostgresStore
from sampling_async.notifications._reading import FactStream, InboxStatus, KindStatus
from sampling_async.notifications._records import (
    Completion,
    InviteNotification,
    Kind,
    Notification,
    QuotaStatus,
    Reconciliation,
    SurveyClosed,
    Terminate,
    UnknownNotification,
)
from sampling_async.notifications._settling import (
    PossibleInvite,
    SettledPair,
    Settlements,
    possible_invites,
)
from sampling_async.notifications._sql import SqlStore
from sampling_async.notifications._sqlite import SqliteStore

__all__ = [
    "Completion",
    "ErasedMember",
    "Fact",
    "FactStream",
    "GiveUp",
    "HandlerPolicy",
    "HitResponse",
    "Inbox",
    "InboxStatus",
    "InviteNotification",
    "Kind",
    "KindStatus",
    "Notification",
    "NotificationsApp",
    "OutcomeLedger",
    "OutcomeRow",
    "PossibleInvite",
    "PostgresStore",
    "QuotaFunnel",
    "QuotaStatus",
    "Reconciliation",
    "RetryLater",
    "SettledPair",
    "Settlements",
    "SqlStore",
    "SqliteStore",
    "State",
    "StoreConflictError",
    "StoreError",
    "SurveyClosed",
    "SurveyEnding",
    "Terminate",
    "UnknownNotification",
    "Validity",
    "erase_member",
    "kept_secrets",
    "possible_invites",
    "rotate_secrets",
    "verify_redirect",
]
