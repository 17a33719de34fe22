"""What has changed between two states of a survey, as records. Plain functions: two surveys in, changes out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from attrs import frozen

from sampling_async._contract.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sampling_async._contract.records import Quota, Survey

Key: TypeAlias = tuple[int, int]  # what identifies a survey: its ID and its wave

ChangeKind: TypeAlias = Literal[
    "survey_opened",
    "survey_closed",
    "quota_opened",
    "quota_closed",
    "price",
    "loi",
    "ir",
    "remaining",
    "targeting",
    "details",
    "synced",
]
"""What a `Change` is about."""


@frozen(kw_only=True)
class Change:
    """One change of the inventory, from what the reader knew to what is true now.

    The kinds, and what `before` and `after` are:

    - `survey_opened`, `survey_closed`: None and a `Survey`, or the other way round.
    - `quota_opened`, `quota_closed`: None and a `Quota`, or the other way round.
    - `price` (a `Price`), `loi` and `ir` (whole numbers): of a survey.
    - `remaining`: the `estimated_completes_remaining` of a survey or of a quota.
    - `targeting`: a `Survey` whose devices, exclusions or kind (recontact) have changed, or a `Quota` whose
      conditions have.
    - `details`: a `Survey` or a `Quota` of which something else has changed, such as a count of a sub-quota.
    - `synced`: None. The first inventory is complete.

    Attributes:
        kind: What it is about.
        survey_id: The survey; 0 for `synced`.
        wave_id: The wave of the survey; 0 for `synced`.
        quota_id: The quota; None if the change is about the survey.
        before: What the reader knew.
        after: What is true now.
    """

    kind: ChangeKind
    survey_id: int = 0
    wave_id: int = 0
    quota_id: int | None = None
    before: Any = None
    after: Any = None


SYNCED: Final = Change(kind="synced")

# The fields of each kind. With one field, a change holds its value; with several, the whole record.
_OF_SURVEY: Final[tuple[tuple[ChangeKind, tuple[str, ...]], ...]] = (
    ("price", ("price",)),
    ("loi", ("loi",)),
    ("ir", ("ir",)),
    ("remaining", ("estimated_completes_remaining",)),
    ("targeting", ("device_type_ids", "is_survey_recontact", "survey_wave_exclusions")),
    ("details", ("study_type_id", "scheduled_completion_date", "completes_required", "survey_name")),
)
_FIELDS_OF_SURVEY: Final[dict[str, tuple[str, ...]]] = dict(_OF_SURVEY)


def key_of(survey: Survey) -> Key:
    return survey.survey_id, survey.wave_id


def differences(key: Key, before: Survey | None, after: Survey | None) -> Iterator[Change]:
    """Yield the changes that lead from one state of a survey to another; None is a survey that is not open.

    A survey opens before its quotas, and closes after them.
    """
    change = partial(Change, survey_id=key[0], wave_id=key[1])
    if before is None and after is not None:
        yield change(kind="survey_opened", after=after)
    elif before is not None and after is not None:
        for kind, fields in _OF_SURVEY:
            if any(getattr(before, name) != getattr(after, name) for name in fields):
                old, new = (getattr(each, fields[0]) if len(fields) == 1 else each for each in (before, after))
                yield change(kind=kind, before=old, after=new)
    yield from _of_quotas(change, _quotas(before), _quotas(after))
    if before is not None and after is None:
        yield change(kind="survey_closed", before=before)


def _quotas(survey: Survey | None) -> dict[int, Quota]:
    found: dict[int, Quota] = {}
    for quota in () if survey is None else survey.quotas:
        # Of a quota that is listed twice, the first one counts, as in a `QuotaIndex`.
        found.setdefault(quota.quota_id, quota)
    return found


def _of_quotas(
    change: Callable[..., Change], before: dict[int, Quota], after: dict[int, Quota]
) -> Iterator[Change]:
    for quota_id, old in before.items():
        if quota_id not in after:
            yield change(kind="quota_closed", quota_id=quota_id, before=old)
    for quota_id, new in after.items():
        known = before.get(quota_id)
        if known is None:
            yield change(kind="quota_opened", quota_id=quota_id, after=new)
        elif known is not new and known != new:
            remaining, now = known.estimated_completes_remaining, new.estimated_completes_remaining
            if remaining != now:
                yield change(kind="remaining", quota_id=quota_id, before=remaining, after=now)
            has_other_layers = known.layers != new.layers
            is_other_target = has_other_layers and _conditions(known) != _conditions(new)
            if is_other_target:
                yield change(kind="targeting", quota_id=quota_id, before=known, after=new)
            if known.completes_required != new.completes_required or (has_other_layers and not is_other_target):
                yield change(kind="details", quota_id=quota_id, before=known, after=new)


def _conditions(quota: Quota) -> list[object]:
    """Return the layers of a quota without their counts."""
    return [
        (layer.layer_id, [(part.sub_quota_id, part.questions_and_answers) for part in layer.sub_quotas])
        for layer in quota.layers
    ]


def applied(known: Survey | None, change: Change) -> Survey | None:
    """Return what a reader knows of a survey after one more change, in the order of `differences`."""
    survey: Survey
    if change.kind == "survey_opened":
        # The quotas of the survey follow one by one.
        survey = change.after
        return replace(survey, quotas=())
    if change.kind == "survey_closed":
        return None
    assert known is not None
    if change.quota_id is not None:
        return replace(known, quotas=tuple(_quotas_after(known, change)))
    fields = _FIELDS_OF_SURVEY[change.kind]
    if len(fields) == 1:
        return replace(known, **{fields[0]: change.after})
    return replace(known, **{name: getattr(change.after, name) for name in fields})


def _quotas_after(known: Survey, change: Change) -> Iterator[Quota]:
    for quota in known.quotas:
        if quota.quota_id != change.quota_id:
            yield quota
        elif change.kind == "remaining":
            yield replace(quota, estimated_completes_remaining=change.after)
        elif change.kind == "targeting":
            yield replace(quota, layers=change.after.layers)
        elif change.kind == "details":
            new = change.after
            yield replace(quota, layers=new.layers, completes_required=new.completes_required)
    if change.kind == "quota_opened":
        yield change.after
