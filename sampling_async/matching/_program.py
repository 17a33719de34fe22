"""An inventory compiled to a program, in which quotas share equal conditions, sub-quotas and layers.

Shared parts are evaluated once. This makes matching fast, because most conditions of an inventory occur many
times in it. Nothing here depends on a member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeAlias, TypeVar

from attrs import frozen

from sampling_async import Quota, Survey
from sampling_async._pacing.gc_pauses import with_gc_deferred
from sampling_async.matching._conditions import Condition, condition_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from sampling_async import QuestionAndAnswers, SubQuota
    from sampling_async.matching._conditions import MatchPolicy, QuestionKinds

K = TypeVar("K", bound="Hashable")


@frozen
class Diagnostic:
    """A report of something odd about a quota.

    The quota is matched nevertheless; a part that is not understood counts as possible. `path` is the place in
    the quota, such as `Layers[0].SubQuotas[2]`; it is empty for the whole quota.
    """

    survey_id: int
    quota_id: int
    path: str
    message: str


class _ConditionRow(NamedTuple):
    """A row as it was read."""

    question_id: int
    condition: int  # its place in the program
    asked: int  # the place of this condition as the only alternative
    odd: tuple[str, ...]  # messages about what is odd in the row


class Alternatives(NamedTuple):
    """The alternatives about one question: any of these conditions, by their places in the program."""

    question_id: int
    conditions: tuple[int, ...]


SubQuotaShape: TypeAlias = tuple[int, ...]
"""A sub-quota without its IDs and counts: it needs all of these, by their places in `Program.asked`."""

LayerShape: TypeAlias = tuple[tuple[int, bool], ...]
"""A layer without IDs: its sub-quotas, by their places in the program, and whether each is full."""


@frozen
class Target:
    """A quota with its survey, and its layers by their places in `Program.layers`."""

    survey: Survey
    quota: Quota
    layers: tuple[int, ...]


class DistinctList(Generic[K]):
    """A list of distinct items; an item's place is its position in `items`."""

    __slots__ = ("_places", "items")

    def __init__(self) -> None:
        self.items: list[K] = []
        self._places: dict[K, int] = {}

    def place(self, item: K) -> int:
        # One lookup for both cases: a new item is assigned the place at the end of the list.
        place = self._places.setdefault(item, len(self.items))
        if place == len(self.items):
            self.items.append(item)
        return place


class Program:
    """A parsed inventory: lists of its distinct parts, in which places are positions."""

    def __init__(self, surveys: Iterable[Survey], kinds: QuestionKinds, policy: MatchPolicy) -> None:
        self.policy = policy
        self.targets: list[Target] = []
        self.diagnostics: list[Diagnostic] = []
        self._kinds = kinds
        self._conditions, self._asked = DistinctList[Condition](), DistinctList[Alternatives]()
        self._sub_quotas, self._layers = DistinctList[SubQuotaShape](), DistinctList[LayerShape]()
        self.conditions, self.asked = self._conditions.items, self._asked.items
        self.sub_quotas, self.layers = self._sub_quotas.items, self._layers.items
        # Rows by `id(row)`. Equal rows mostly are the same object, and an id is cheaper to hash than a row.
        self._rows: dict[int, _ConditionRow] = {}
        self._equal_rows: dict[QuestionAndAnswers, _ConditionRow] = {}
        # Sub-quotas by the ids of their rows: their place, and messages about what is odd in them.
        self._shapes: dict[tuple[int, ...], tuple[int, tuple[str, ...]]] = {}
        seen: set[int] = set()
        # There may be millions of objects here, and none of them is garbage: a collection would only cost time.
        for survey in with_gc_deferred(surveys):
            for quota in survey.quotas:
                if quota.quota_id in seen:
                    self._report(survey, quota, "", "the quota is listed twice: the first one counts")
                else:
                    seen.add(quota.quota_id)
                    self.targets.append(Target(survey, quota, self._layers_of(survey, quota)))
        # These are needed during parsing only. The ids must not be used later: when a row is freed, another
        # object may get its id.
        del self._rows, self._equal_rows, self._shapes
        del self._conditions, self._asked, self._sub_quotas, self._layers

    def _layers_of(self, survey: Survey, quota: Quota) -> tuple[int, ...]:
        blocks = self.policy.full == "blocks"
        # A dict as an ordered set: equal layers of a quota count once.
        places: dict[int, None] = {}
        for at, layer in enumerate(quota.layers):
            shapes: list[tuple[int, bool]] = []
            for sub_quota in layer.sub_quotas:
                shape, odd = self._shape(sub_quota)
                target = sub_quota.max_target_completes
                shapes.append((shape, blocks and sub_quota.current_completes >= target))
                if odd or target <= 0:
                    path = f"Layers[{at}].SubQuotas[{len(shapes) - 1}]"
                    self._report(survey, quota, path, *odd, *([_NO_TARGET] if target <= 0 else []))
            if not shapes:
                self._report(
                    survey, quota, f"Layers[{at}]", "a layer without sub-quotas: no member can match it"
                )
            # Sorted, layers that differ only in the order of their sub-quotas are one.
            places[self._layers.place(tuple(sorted(shapes)))] = None
        return tuple(places)

    def _report(self, survey: Survey, quota: Quota, path: str, *messages: str) -> None:
        for message in messages:
            self.diagnostics.append(Diagnostic(survey.survey_id, quota.quota_id, path, message))

    def _shape(self, sub_quota: SubQuota) -> tuple[int, tuple[str, ...]]:
        """Return the place of a sub-quota's shape, and messages about what is odd in it."""
        key = tuple(map(id, sub_quota.questions_and_answers))
        found = self._shapes.get(key)
        if found is None:
            known = self._rows
            rows = [known.get(id(row)) or self._row(row) for row in sub_quota.questions_and_answers]
            asked = [row.asked for row in rows]
            if len(rows) > 1 and len({row.question_id for row in rows}) < len(rows):
                # Rows about the same question are alternatives: one of them must be met.
                by_question: dict[int, set[int]] = {}
                for row in rows:
                    by_question.setdefault(row.question_id, set()).add(row.condition)
                asked = [self._alternatives(id_, each) for id_, each in by_question.items()]
            odd = [message for row in rows for message in row.odd]
            place = self._sub_quotas.place(tuple(sorted(asked)))
            found = self._shapes[key] = place, tuple(odd if key else ["a sub-quota without questions"])
        return found

    def _row(self, row: QuestionAndAnswers) -> _ConditionRow:
        found = self._equal_rows.get(row)
        if found is None:
            odd: list[str] = []
            condition = self._conditions.place(condition_of(row, self._kinds, self.policy, odd.append))
            asked = self._alternatives(row.question_id, (condition,))
            found = self._equal_rows[row] = _ConditionRow(row.question_id, condition, asked, tuple(odd))
        self._rows[id(row)] = found
        return found

    def _alternatives(self, question_id: int, conditions: Iterable[int]) -> int:
        return self._asked.place(Alternatives(question_id, tuple(sorted(conditions))))


_NO_TARGET: Final = "MaxTargetCompletes is not above 0: the sub-quota counts as full"
