"""An inventory as it is shown: the surveys of a poll, without what was closed by notifications since."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from attrs import define, evolve, field

from sampling_async._contract.records import leave_out, may_list
from sampling_async._contract.structs import replace
from sampling_async._pacing.steps import LoopYielder
from sampling_async._watch.changes import Key, key_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sampling_async._contract.records import Quotas, Survey

Wave: TypeAlias = "tuple[int, int | None]"  # a survey and its wave, or None for all its waves


@define
class Closings:
    """What notifications closed, each with the number of polls that had begun by then.

    A poll that began before a closing was noted may still show the quota as open. A later poll decides.
    """

    quotas: dict[int, int] = field(factory=dict[int, int])
    surveys: dict[Wave, int] = field(factory=dict["Wave", int])

    def close(self, what: int | Wave, begun: int) -> None:
        if isinstance(what, int):
            self.quotas[what] = max(begun, self.quotas.get(what, 0))
        else:
            self.surveys[what] = max(begun, self.surveys.get(what, 0))

    def since(self, poll: int) -> Closings:
        """Return the closings that are newer than a poll, given its number."""
        return Closings(
            {quota_id: begun for quota_id, begun in self.quotas.items() if begun >= poll},
            {wave: begun for wave, begun in self.surveys.items() if begun >= poll},
        )

    def left_of(self, survey: Survey) -> Survey | None:
        """Return a survey without its closed quotas; None if it is closed or all its quotas are."""
        if self.surveys and (key_of(survey) in self.surveys or (survey.survey_id, None) in self.surveys):
            return None
        if not self.quotas or not any(quota.quota_id in self.quotas for quota in survey.quotas):
            return survey
        left = tuple(quota for quota in survey.quotas if quota.quota_id not in self.quotas)
        return replace(survey, quotas=left) if left else None


class Shown:
    """What one poll gave, and what is shown of it."""

    def __init__(self, given: Quotas, poll: int, began: float) -> None:
        # Of a survey that is listed twice, only the first listing. A survey that was left out, because it lacks
        # a value, is as it was shown before.
        self.given = given
        self.repeated = 0  # the number of the other listings
        self.poll = poll  # 0 for an inventory from the cache
        self.began = began  # when the poll began, in seconds since 1970
        self.view: dict[Key, Survey] = {}  # the surveys that are shown, each without its closed quotas
        self.surveys: dict[Key, Survey] = {}  # as they were given
        self._homes: dict[int, tuple[Key, ...]] = {}
        self._waves: dict[int, list[Key]] = {}
        self._quotas: Quotas | None = None

    async def fill(self, closings: Closings, before: Shown | None) -> dict[Key, None]:
        """Arrange the surveys, with turns for the event loop, and return those that look different now."""
        turns, old = LoopYielder(), {} if before is None else before.view
        changed: dict[Key, None] = {}
        for survey in self.given.surveys:
            key = key_of(survey)
            if key in self.surveys:
                self.repeated += 1
                continue
            self._add(key, survey)
            left = closings.left_of(survey)
            if left is not None:
                self.view[key] = left
            # An unchanged survey mostly is the same object, and `is` is faster than a comparison by value.
            known = old.get(key)
            if left is not known and left != known:
                changed[key] = None
            await turns.step(1 + len(survey.quotas))
        # No await from here on. What was shown is without what was closed meanwhile, which this poll does not
        # know better for a survey that it cannot read.
        kept = {key: old[key] for key in old if key not in self.surveys and may_list(self.given, *key)}
        for key, survey in kept.items():
            self._add(key, survey)
        self.view |= kept
        if self.repeated or kept:
            self.given = self._with(self.surveys)
        changed.update(dict.fromkeys(key for key in old if key not in self.view))
        return changed

    def _add(self, key: Key, survey: Survey) -> None:
        self.surveys[key] = survey
        self._waves.setdefault(survey.survey_id, []).append(key)
        for quota in survey.quotas:
            homes = self._homes.get(quota.quota_id, ())
            if key not in homes:
                self._homes[quota.quota_id] = (*homes, key)

    def _with(self, surveys: dict[Key, Survey]) -> Quotas:
        return leave_out(evolve(self.given, surveys=tuple(surveys.values())), self.given.left_out)

    def about(self, what: int | Wave) -> tuple[Key, ...]:
        """Return the surveys that list a quota, or the known waves of a survey."""
        if isinstance(what, int):
            return self._homes.get(what, ())
        survey_id, wave_id = what
        if wave_id is not None:
            return ((survey_id, wave_id),) if (survey_id, wave_id) in self.surveys else ()
        return tuple(self._waves.get(survey_id, ()))

    def hide(self, keys: Iterable[Key], closings: Closings) -> dict[Key, None]:
        """Show surveys without their closed quotas, and return those that look different now."""
        changed: dict[Key, None] = {}
        for key in keys:
            known, left = self.view.get(key), closings.left_of(self.surveys[key])
            if left == known:
                continue
            changed[key] = self._quotas = None
            if left is None:
                del self.view[key]
            else:
                self.view[key] = left
        return changed

    def hidden(self, closings: Closings) -> list[int]:
        """Return the IDs of the quotas that the poll gave and that are closed."""
        found = [quota_id for quota_id in closings.quotas if quota_id in self._homes]
        for wave in closings.surveys:
            found += (quota.quota_id for key in self.about(wave) for quota in self.surveys[key].quotas)
        return found

    def size(self) -> int:
        return sum(len(survey.quotas) for survey in self.view.values())

    def quotas(self) -> Quotas:
        """Return the inventory: the very object that was given, if nothing of it is closed."""
        if self._quotas is None:
            # Mostly the same objects, which takes no comparison by value.
            whole = self.view == self.surveys
            self._quotas = self.given if whole else self._with(self.view)
        return self._quotas
