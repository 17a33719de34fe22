"""Convert outcomes to lines of a journal's row, and back."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from sampling_async._contract.errors import DecodeError, Delivery, JournalError, SamplingError
from sampling_async._contract.records import Invite
from sampling_async._contract.structs import WireStruct, astuple
from sampling_async._json.converter import structure, write_lines
from sampling_async._protocol.results import InviteOutcome, OutcomeStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_LINES: Final = 100


class OutcomeLine(WireStruct, array_like=True):
    """An outcome in a journal: a JSON list, which begins with the quota ID and the status."""

    quota_id: int
    status: OutcomeStatus
    invite: tuple[int, int, int, float, str, int, int, float | None] | None  # its fields, in their order
    result_code: int | None
    result: str | None
    failure: tuple[str, Delivery] | None
    anomaly: str | None


def lines_of(outcomes: Iterable[InviteOutcome]) -> bytes:
    """Return for each outcome a line feed and a `OutcomeLine`."""
    lines = [
        OutcomeLine(
            outcome.quota_id,
            outcome.status,
            None if outcome.invite is None else astuple(outcome.invite),
            outcome.result_code,
            outcome.result,
            None if outcome.error is None else _failure_of(outcome.error),
            outcome.anomaly,
        )
        for outcome in outcomes
    ]
    try:
        return b"\n" + write_lines(lines, OutcomeLine)
    except UnicodeEncodeError:
        # A text that came over the network may hold half of a surrogate pair. `json.dumps` escapes it.
        return b"".join(
            b"\n" + json.dumps(astuple(each), separators=(",", ":")).encode("ascii") for each in lines
        )


def _failure_of(error: SamplingError) -> tuple[str, Delivery]:
    return str(error).removeprefix("bulk_invite: "), error.delivery


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
        read = structure(list[OutcomeLine], b"[%b]" % b",".join(lines))
    except DecodeError:
        pass
    else:
        return [_outcome(member_code, line, replayed) for line in read]
    # Raised outside of the handler: inside, the decoding error would be its context.
    raise JournalError("has been damaged since it was opened: a response cannot be read", path=path)


def _outcome(member_code: str, line: OutcomeLine, replayed: bool) -> InviteOutcome:  # noqa: FBT001
    failure = line.failure
    return InviteOutcome(
        member_code,
        line.quota_id,
        line.status,
        None if line.invite is None else Invite(*line.invite),
        line.result_code,
        line.result,
        None if failure is None else SamplingError(failure[0], endpoint="bulk_invite", delivery=failure[1]),
        line.anomaly,
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
