"""An outcome as a line of a journal's row, and back."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from sampling_async._codec import plain_json
from sampling_async._errors import JournalError, SamplingError
from sampling_async._models import Invite
from sampling_async._outcomes import InviteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from sampling_async._outcomes import OutcomeStatus

_LINES: Final = 100


def line_of(outcome: InviteOutcome) -> bytes:
    """Return a line feed, and an outcome as JSON, which begins with its quota ID and its status."""
    invite, error = outcome.invite, outcome.error
    values = [
        outcome.quota_id,
        outcome.status,
        None if invite is None else _values_of(invite),
        outcome.result_code,
        outcome.result,
    ]
    if error is None and outcome.anomaly is None:
        return b"\n" + plain_json([*values, None, None])
    told = None if error is None else [str(error).removeprefix("bulk_invite: "), error.delivery]
    # What is told may hold anything that came over the wire, which this writes in ASCII.
    return b"\n" + json.dumps([*values, told, outcome.anomaly], separators=(",", ":")).encode("ascii")


def status_of(line: bytes | None) -> OutcomeStatus:
    """Return the status that a line says, without reading the rest of it; None is no answer."""
    status: Any = "unknown" if line is None else line.split(b'"', 2)[1].decode("ascii")
    found: OutcomeStatus = status
    return found


def outcomes_of(
    member_code: str, lines: Mapping[int, bytes | None], path: Path, *, replayed: bool
) -> Iterator[InviteOutcome]:
    """Yield the outcomes that were written in the lines about quotas; None is no answer.

    Args:
        member_code: The member.
        lines: The line about each quota.
        path: The journal, for errors.
        replayed: Whether they are of a run before.

    Raises:
        JournalError: A line cannot be read.
    """
    for quota_id, line in lines.items():
        if line is None:
            yield _in_flight(member_code, quota_id, replayed=replayed)
    answered = filter(None, lines.values())
    while some := list(islice(answered, _LINES)):  # few lists live at once
        yield from _read(member_code, some, path, replayed=replayed)


def _read(member_code: str, lines: Iterable[bytes], path: Path, *, replayed: bool) -> list[InviteOutcome]:
    try:
        return [_outcome(member_code, each, replayed) for each in json.loads(b"[%b]" % b",".join(lines))]
    except (ValueError, TypeError):
        pass
    # Raised out here, since those errors hold the line.
    raise JournalError("has been damaged since it was opened: an answer cannot be read", path=path)


def _values_of(invite: Invite) -> list[Any]:
    return [
        invite.survey_id,
        invite.wave_id,
        invite.quota_id,
        invite.partner_amount,
        invite.url,
        invite.loi,
        invite.ir,
        invite.member_amount,
    ]


def _outcome(member_code: str, values: list[Any], replayed: bool) -> InviteOutcome:  # noqa: FBT001
    """Return the outcome that was written in a line."""
    quota_id, status, invite, code, result, told, anomaly = values
    return InviteOutcome(
        member_code,
        quota_id,
        status,
        None if invite is None else Invite(*invite),
        code,
        result,
        None if told is None else SamplingError(told[0], endpoint="bulk_invite", delivery=told[1]),
        anomaly,
        replayed,
    )


def _in_flight(member_code: str, quota_id: int, *, replayed: bool) -> InviteOutcome:
    text = "sent by a run that ended before an answer was written down" if replayed else "sent, and under way"
    error = SamplingError(text, endpoint="bulk_invite", delivery="unknown")
    return InviteOutcome(member_code, quota_id, "unknown", error=error, replayed=replayed)
