"""Convert outcomes to lines of a journal's row, and back."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from sampling_async._contract.errors import JournalError, SamplingError
from sampling_async._contract.records import Invite
from sampling_async._json.codec import json_lines
from sampling_async._protocol.results import InviteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from sampling_async._protocol.results import OutcomeStatus

_LINES: Final = 100


def lines_of(outcomes: Iterable[InviteOutcome]) -> bytes:
    """Return for each outcome a line feed and a JSON list, which begins with its quota ID and its status."""
    values = [
        (
            outcome.quota_id,
            outcome.status,
            None if outcome.invite is None else _values_of(outcome.invite),
            outcome.result_code,
            outcome.result,
            *_oddities(outcome),
        )
        for outcome in outcomes
    ]
    try:
        return b"\n" + json_lines(values)
    except UnicodeEncodeError:
        # A text that came over the network may hold half of a surrogate pair. `json.dumps` escapes it.
        return b"".join(b"\n" + json.dumps(each, separators=(",", ":")).encode("ascii") for each in values)


def _oddities(outcome: InviteOutcome) -> tuple[list[str] | None, str | None]:
    error = outcome.error
    failure = None if error is None else [str(error).removeprefix("bulk_invite: "), error.delivery]
    return failure, outcome.anomaly


def status_of(line: bytes | None) -> OutcomeStatus:
    """Return the status in a line without decoding the whole line; `unknown` for a line of None."""
    # The status is the first text in the line: `[5,"invited",...` is split at the first two quotation marks.
    status: Any = "unknown" if line is None else line.split(b'"', 2)[1].decode("ascii")
    found: OutcomeStatus = status
    return found


def outcomes_of(
    member_code: str, lines: Mapping[int, bytes | None], path: Path, *, replayed: bool
) -> Iterator[InviteOutcome]:
    """Yield the outcomes in the lines of quotas. A line of None means that no outcome was recorded.

    Args:
        member_code: The member.
        lines: The line of each quota.
        path: The journal, for errors.
        replayed: Whether the outcomes are from an earlier run.

    Raises:
        JournalError: A line cannot be read.
    """
    for quota_id, line in lines.items():
        if line is None:
            yield _in_flight(member_code, quota_id, replayed=replayed)
    answered = filter(None, lines.values())
    # In groups of lines, so that few decoded lists are in memory at a time.
    while some := list(islice(answered, _LINES)):
        yield from _read(member_code, some, path, replayed=replayed)


def _read(member_code: str, lines: Iterable[bytes], path: Path, *, replayed: bool) -> list[InviteOutcome]:
    try:
        return [_outcome(member_code, each, replayed) for each in json.loads(b"[%b]" % b",".join(lines))]
    except (ValueError, TypeError):
        pass
    # Raised outside of the handler: inside, the decoding error would be its context, and it holds the line.
    raise JournalError("has been damaged since it was opened: a response cannot be read", path=path)


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
    """Return the outcome for the decoded values of a line."""
    quota_id, status, invite, code, result, failure, anomaly = values
    return InviteOutcome(
        member_code,
        quota_id,
        status,
        None if invite is None else Invite(*invite),
        code,
        result,
        None if failure is None else SamplingError(failure[0], endpoint="bulk_invite", delivery=failure[1]),
        anomaly,
        replayed,
    )


def _in_flight(member_code: str, quota_id: int, *, replayed: bool) -> InviteOutcome:
    text = (
        ("sent by an earlier run, which ended before it noted a response")
        if replayed
        else "sent, and the response has not come yet"
    )
    error = SamplingError(text, endpoint="bulk_invite", delivery="unknown")
    return InviteOutcome(member_code, quota_id, "unknown", error=error, replayed=replayed)
