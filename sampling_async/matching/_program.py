"""An inventory as a program: conditions, sub-quotas and layers, each kept once however many quotas share it.

What is shared is evaluated once, which is where the speed comes from: most conditions of an inventory have been
seen before in it. Nothing here depends on a member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from attrs import frozen

from sampling_async._collector import put_off_a_pause
from sampling_async._models import Quota, Survey
from sampling_async.matching._conditions import Condition, read_condition

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from sampling_async._models import QuestionAndAnswers, SubQuota
    from sampling_async.matching._policy import MatchPolicy
    from sampling_async.matching._questions import QuestionKinds

K = TypeVar("K", bound="Hashable")


@frozen
class Diagnostic:
    """Something odd about a quota, which is matched all the same: what is not understood counts as possible.

    Attributes:
        survey_id: The survey.
        quota_id: The quota.
        path: Where in the quota, such as `Layers[0].SubQuotas[2]`; empty for all of it.
        message: What is odd, in words.
    """

    survey_id: int
    quota_id: int
    path: str
    message: str


class Asked(NamedTuple):
    """What a sub-quota asks about one question: any of these conditions, by their places in the program."""

    question_id: int
    conditions: tuple[int, ...]


class SubQuotaShape(NamedTuple):
    """A sub-quota without its IDs and counts: all of these, by their places in `Program.asked`."""

    asked: tuple[int, ...]


class LayerShape(NamedTuple):
    """A layer without IDs: its sub-quotas, by their places in the program, and which of them are full."""

    sub_quotas: tuple[tuple[int, bool], ...]


@frozen
class Target:
    """A quota: whose it is, and its layers by their places in `Program.layers`."""

    survey: Survey
    quota: Quota
    layers: tuple[int, ...]


class Kept(Generic[K]):
    """Things kept once each, by their places."""

    __slots__ = ("_places", "items")

    def __init__(self) -> None:
        self.items: list[K] = []
        self._places: dict[K, int] = {}

    def place(self, item: K) -> int:
        """Return the place of an item, which is kept if it is new."""
        place = self._places.setdefault(item, len(self.items))
        if place == len(self.items):
            self.items.append(item)
        return place


class Program:
    """An inventory, read. Places are positions in these lists.

    Args:
        surveys: The inventory.
        kinds: How questions are matched.
        policy: What is taken how.

    Attributes:
        conditions: Every condition.
        asked: Every set of alternatives about one question.
        sub_quotas: Every sub-quota.
        layers: Every layer.
        targets: The quotas.
        diagnostics: What was odd.
    """

    def __init__(self, surveys: Iterable[Survey], kinds: QuestionKinds, policy: MatchPolicy) -> None:
        self.policy = policy
        self.targets: list[Target] = []
        self.diagnostics: list[Diagnostic] = []
        self._kinds = kinds
        self._conditions, self._asked = Kept[Condition](), Kept[Asked]()
        self._sub_quotas, self._layers = Kept[SubQuotaShape](), Kept[LayerShape]()
        self.conditions, self.asked = self._conditions.items, self._asked.items
        self.sub_quotas, self.layers = self._sub_quotas.items, self._layers.items
        # Of each row, the place of its condition, and what is odd about it.
        self._read: list[tuple[int, tuple[str, ...]]] = []
        self._rows: dict[QuestionAndAnswers, int] = {}
        self._numbers: dict[int, int] = {}  # of rows, by their id: equal rows mostly are one and the same
        self._shapes: dict[tuple[int, ...], tuple[int, tuple[str, ...]]] = {}  # of sub-quotas, by their rows
        self._shapes_of_layers: dict[tuple[tuple[int, bool], ...], int] = {}
        seen: set[int] = set()
        for survey in surveys:
            put_off_a_pause()  # there may be millions of objects, and all that is made here stays
            for quota in survey.quotas:
                if quota.quota_id in seen:
                    self._tell(survey, quota, "", "a quota that is listed twice: the first one counts")
                else:
                    seen.add(quota.quota_id)
                    self.targets.append(Target(survey, quota, self._layers_of(survey, quota)))
        # What only reading takes; and the ids of rows that are gone by then may be those of others.
        del self._numbers, self._rows, self._read, self._shapes, self._shapes_of_layers
        del self._conditions, self._asked, self._sub_quotas, self._layers

    def _layers_of(self, survey: Survey, quota: Quota) -> tuple[int, ...]:
        blocks = self.policy.full == "blocks"
        places: dict[int, None] = {}
        for at, layer in enumerate(quota.layers):
            shapes: list[tuple[int, bool]] = []
            for sub_quota in layer.sub_quotas:
                shape, odd = self._shape(sub_quota)
                target = sub_quota.max_target_completes
                shapes.append((shape, blocks and sub_quota.current_completes >= target))
                if odd or target <= 0:
                    path = f"Layers[{at}].SubQuotas[{len(shapes) - 1}]"
                    self._tell(survey, quota, path, *odd, *([_NO_TARGET] if target <= 0 else []))
            if not shapes:
                self._tell(survey, quota, f"Layers[{at}]", "a layer without sub-quotas, which nobody can fit")
            key = tuple(shapes)
            place = self._shapes_of_layers.get(key)
            if place is None:
                place = self._shapes_of_layers[key] = self._layers.place(LayerShape(tuple(sorted(shapes))))
            places[place] = None
        return tuple(places)

    def _tell(self, survey: Survey, quota: Quota, path: str, *messages: str) -> None:
        for message in messages:
            self.diagnostics.append(Diagnostic(survey.survey_id, quota.quota_id, path, message))

    def _shape(self, sub_quota: SubQuota) -> tuple[int, tuple[str, ...]]:
        """Return the place of a sub-quota without IDs and counts, and what is odd about it."""
        numbers = self._numbers
        key = tuple(
            [
                numbers[id(row)] if id(row) in numbers else self._number(row)
                for row in sub_quota.questions_and_answers
            ]
        )
        found = self._shapes.get(key)
        if found is None:
            by_question: dict[int, set[int]] = {}
            for row, number in zip(sub_quota.questions_and_answers, key, strict=True):
                by_question.setdefault(row.question_id, set()).add(self._read[number][0])
            asked = [self._asked.place(Asked(id_, tuple(sorted(each)))) for id_, each in by_question.items()]
            odd = [message for number in key for message in self._read[number][1]]
            place = self._sub_quotas.place(SubQuotaShape(tuple(sorted(asked))))
            found = self._shapes[key] = place, tuple(odd if key else ["a sub-quota without questions"])
        return found

    def _number(self, row: QuestionAndAnswers) -> int:
        number = self._rows.setdefault(row, len(self._rows))
        if number == len(self._read):
            odd: list[str] = []
            condition = read_condition(row, self._kinds, self.policy, odd.append)
            self._read.append((self._conditions.place(condition), tuple(odd)))
        self._numbers[id(row)] = number
        return number


_NO_TARGET: Final = "MaxTargetCompletes is not above 0: it counts as full"
