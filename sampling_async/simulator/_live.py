"""The current inventory: the counts that change with every invite, and the body of Get Quotas."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import attrs

from sampling_async import Layer, Quota, Quotas, SubQuota, Survey
from sampling_async._contract.structs import replace
from sampling_async._json.converter import unstructure
from sampling_async.simulator._members import targets_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sampling_async.simulator._members import Fit, Targets

_TOPICS: Final = ("Consumer topics", "Consumer topics", "Leisure", "Food", "Travel", "New Products")


class LiveSurvey:
    __slots__ = ("bodies", "quotas", "remaining", "survey")

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.remaining = survey.estimated_completes_remaining
        self.quotas = tuple(LiveQuota(quota, self) for quota in survey.quotas)
        self.bodies: dict[bool, bytes | None] = {}

    def now(self) -> Survey | None:
        """Return the survey with its open quotas and their current counts, or None if no quota is open."""
        if self.remaining <= 0:
            return None
        quotas = tuple(quota.now() for quota in self.quotas if quota.is_live and quota.remaining > 0)
        if not quotas:
            return None
        return replace(self.survey, estimated_completes_remaining=self.remaining, quotas=quotas)

    def body(self, *, include_routables: bool) -> bytes | None:
        """Return the survey as Get Quotas shows it, or None. The result is cached until a count changes."""
        if include_routables not in self.bodies:
            survey = self.now()
            self.bodies[include_routables] = (
                _survey_body(survey, include_routables=include_routables) if survey else None
            )
        return self.bodies[include_routables]


class LiveQuota:
    __slots__ = ("_targets", "completes", "is_live", "position", "quota", "remaining", "survey")

    def __init__(self, quota: Quota, survey: LiveSurvey) -> None:
        self.quota = quota
        self.survey = survey
        self.position = 0
        self.is_live = True
        self.remaining = quota.estimated_completes_remaining
        self.completes = [[part.current_completes for part in layer.sub_quotas] for layer in quota.layers]
        self._targets: Targets | None = None

    @property
    def targets(self) -> Targets:
        """The quota's conditions, prepared on first use."""
        if self._targets is None:
            self._targets = targets_of(self.quota)
        return self._targets

    @property
    def is_full(self) -> bool:
        """Whether the quota, or its survey as a whole, needs no more completes."""
        return self.remaining <= 0 or self.survey.remaining <= 0

    def places(self, fits: Sequence[Fit]) -> list[int] | None:
        """Return the sub-quota that a member takes in each layer, or None if a layer has no open one."""
        places: list[int] = []
        for fit, completes, layer in zip(fits, self.completes, self.quota.layers, strict=True):
            parts = layer.sub_quotas
            place = next((at for at in fit if completes[at] < parts[at].max_target_completes), None)
            if place is None:
                return None
            places.append(place)
        return places

    def take(self, places: Sequence[int]) -> None:
        """Count one invite as a complete: in the quota, in its survey and in one sub-quota of every layer."""
        self.remaining -= 1
        self.survey.remaining -= 1
        for completes, place in zip(self.completes, places, strict=True):
            completes[place] += 1

    def now(self) -> Quota:
        layers = zip(self.quota.layers, self.completes, strict=True)
        return replace(
            self.quota,
            estimated_completes_remaining=self.remaining,
            layers=tuple(
                Layer(layer.layer_id, tuple(map(_part_now, layer.sub_quotas, completes)))
                for layer, completes in layers
            ),
        )


class LiveInventory:
    """All surveys and quotas of the service, including closed ones."""

    def __init__(self, inventory: Quotas) -> None:
        self._inventory = inventory
        self.surveys = tuple(map(LiveSurvey, inventory.surveys))
        self._bodies: dict[bool, bytes] = {}
        self._quotas: dict[int, LiveQuota] = {}
        for quota in (quota for survey in self.surveys for quota in survey.quotas):
            # `MemberState` keeps one byte for every quota, at this position.
            quota.position = len(self._quotas)
            if self._quotas.setdefault(quota.quota.quota_id, quota) is not quota:
                raise ValueError(f"quota ID {quota.quota.quota_id} occurs twice; IDs must be unique")

    def __len__(self) -> int:
        return len(self._quotas)

    def __iter__(self) -> Iterator[LiveQuota]:
        return iter(self._quotas.values())

    def get(self, quota_id: int) -> LiveQuota | None:
        return self._quotas.get(quota_id)

    def named(self, quota_id: int) -> LiveQuota:
        quota = self._quotas.get(quota_id)
        if quota is None:
            raise KeyError(f"quota {quota_id} is not in the inventory; sim.inventory lists the open quotas")
        return quota

    def moved(self, quota: LiveQuota) -> None:
        """Discard the cached bodies that show a quota, because its counts or state have changed."""
        quota.survey.bodies.clear()
        self._bodies.clear()

    def now(self) -> Quotas:
        surveys = (survey.now() for survey in self.surveys)
        return attrs.evolve(self._inventory, surveys=tuple(survey for survey in surveys if survey))

    def body(self, *, include_routables: bool) -> bytes:
        """Return the body of Get Quotas: the same object as long as nothing has changed."""
        # Each survey keeps its own part of the body, so after an invite only one survey is encoded again.
        if include_routables not in self._bodies:
            surveys = (survey.body(include_routables=include_routables) for survey in self.surveys)
            self._bodies[include_routables] = b'{"Surveys":[%b],"CountryID":%d,"CacheExpires":"%b"}' % (
                b",".join(survey for survey in surveys if survey),
                self._inventory.country_id,
                _ticks(self._inventory.cache_expires).encode(),
            )
        return self._bodies[include_routables]


def _part_now(part: SubQuota, completes: int) -> SubQuota:
    return SubQuota(part.sub_quota_id, completes, part.max_target_completes, part.questions_and_answers)


def _survey_body(survey: Survey, *, include_routables: bool) -> bytes:
    fields: dict[str, Any] = unstructure(survey)
    for quota in () if include_routables else fields["Quotas"]:
        for layer in quota["Layers"]:
            for part in layer["SubQuotas"]:
                questions = part["QuestionsAndAnswers"]
                part["QuestionsAndAnswers"] = [each for each in questions if not each["IsRoutable"]]
    fields["ScheduledCompletionDate"] = _milliseconds(survey.scheduled_completion_date)
    # Real bodies have these fields, although the contract does not name them.
    fields["SurveyTopic"] = _TOPICS[survey.survey_id % len(_TOPICS)]
    fields["IsTqsSurvey"] = survey.survey_id % 20 == 0
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def _ticks(moment: datetime) -> str:
    """Format a dateTime as CacheExpires has it: seven fractional digits, and Z unless it has no zone."""
    zone = "Z" if moment.tzinfo else ""
    moment = moment.astimezone(UTC) if moment.tzinfo else moment
    # Python has six fractional digits; a constant 6 is the seventh.
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond:06}6{zone}"


def _milliseconds(moment: datetime) -> str:
    """Format a dateTime with no more fractional digits than needed, as real bodies do."""
    # isoformat() writes six fractional digits or none: .510000 becomes .51.
    text = moment.isoformat()
    return text.rstrip("0") if moment.microsecond and not moment.tzinfo else text
