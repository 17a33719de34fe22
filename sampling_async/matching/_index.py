"""Which quotas is this member for: an inventory as an index, asked in a fraction of a millisecond."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from operator import eq, itemgetter
from typing import Any, Final, TypeAlias, overload

from attrs import field, frozen

from sampling_async._errors import InvalidRequestError
from sampling_async._models import Participation, Quota, Quotas, Survey, hidden
from sampling_async._protocol import InviteRequest
from sampling_async.matching._bits import all_of, ascending, without
from sampling_async.matching._evaluate import Reason, evaluate
from sampling_async.matching._policy import MatchPolicy, Truth
from sampling_async.matching._program import Diagnostic, Program, Target
from sampling_async.matching._questions import Profile, QuestionKinds, lasting
from sampling_async.matching._segment import Segment

Rank: TypeAlias = Callable[[Survey, Quota], Any]
"""What quotas are sorted by, lowest first: `lambda survey, quota: -survey.price.amount` for the best paid."""

_MOST_PARTS: Final = 3
"""An index is compiled in so many parts at most: each one more makes matching a tenth to a fifth slower."""

_LEFT: Final = 2
"""A part is kept as long as so many times as much is left of it as has changed since it was compiled."""


@frozen
class Member:
    """A member to be matched; the attributes are the arguments of `QuotaIndex.match`.

    The member code, and what the member answered and did, are hidden in the repr.
    """

    member_code: str = field(repr=hidden)
    profile: Profile = field(repr=False)
    device_type: int | None = None
    exclude_surveys: Collection[int] = field(default=(), repr=False)
    participations: Collection[Participation] = field(default=(), repr=False)


def most_wanted(_: Survey, quota: Quota) -> int:
    """Rank by the completes that are still wanted, the most first."""
    return -quota.estimated_completes_remaining


class QuotaIds(Sequence[int]):
    """Quota IDs in the order of their rank, made as they are asked for: a member may match thousands."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[tuple[_Part, int]]) -> None:
        self._parts = [(part, bits) for part, bits in parts if bits]

    def __len__(self) -> int:
        return sum(bits.bit_count() for _, bits in self._parts)

    def __iter__(self) -> Iterator[int]:
        return (target.quota.quota_id for target in self.targets())

    def __contains__(self, quota_id: object) -> bool:
        return any(bits >> part.bit_of.get(quota_id, len(part.targets)) & 1 for part, bits in self._parts)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step > 0:
                return tuple(islice(self, first, last, step))
            return tuple(self)[index]
        at = index + len(self) if index < 0 else index
        for quota_id in islice(self, at, at + 1) if at >= 0 else ():
            return quota_id
        raise IndexError(index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(str, islice(self, 3)))
        return f"<{len(self)} quota IDs: {shown}{', ...' if len(self) > 3 else ''}>"  # noqa: PLR2004

    def __reversed__(self) -> Iterator[int]:
        return reversed(tuple(self))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the place of a quota ID."""
        return tuple(self).index(value, start, len(self) if stop is None else stop)

    def targets(self) -> Iterator[Target]:
        """Yield the quotas themselves."""
        if len(self._parts) == 1:
            part, bits = self._parts[0]
            return (part.targets[bit] for bit in ascending(bits))
        return (target for _, target in self.compiled())

    def compiled(self) -> Iterator[tuple[Program, Target]]:
        """Yield the same, each after the program it was compiled in."""
        ranked = heapq.merge(*(part.ranked(bits) for part, bits in self._parts), key=itemgetter(0))
        return ((program, target) for _, program, target in ranked)


@frozen
class MatchResult:
    """The quotas of one member.

    Attributes:
        certain: Those that the member matches, best first.
        possible: Those that it may match, best first: an answer is missing, or the service did not show all.
    """

    certain: QuotaIds
    possible: QuotaIds

    def select(self, n: int, *, one_per_survey: bool = True) -> tuple[int, ...]:
        """Return at most `n` quota IDs to ask invites for: certain ones first, then possible ones, best first.

        Args:
            n: How many at most; a bulk invite takes 100 in one request.
            one_per_survey: Take one quota of a survey, since a member takes a survey once.
        """
        if not isinstance(n, int) or n < 0:
            raise InvalidRequestError(f"n is how many to select, not {n!r}")
        selected: list[int] = []
        surveys: set[int] = set()
        for target in chain(self.certain.targets(), self.possible.targets()):
            if len(selected) == n:
                break
            if not (one_per_survey and target.survey.survey_id in surveys):
                surveys.add(target.survey.survey_id)
                selected.append(target.quota.quota_id)
        return tuple(selected)


class _Part:
    """Some of an inventory's surveys, compiled together."""

    def __init__(
        self, surveys: Iterable[Survey], kinds: QuestionKinds, policy: MatchPolicy, rank: Rank
    ) -> None:
        self.program = program = Program(surveys, kinds, policy)
        keys = [(rank(target.survey, target.quota), target.quota.quota_id) for target in program.targets]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self.segment = Segment(program, order)
        self.targets = [program.targets[place] for place in order]
        self.ranks = [keys[place] for place in order]
        self.bit_of: dict[object, int] = {target.quota.quota_id: bit for bit, target in enumerate(self.targets)}
        self.diagnostics = program.diagnostics
        self._of_survey: defaultdict[int, int] = defaultdict(int)
        self._of_device: dict[int, int] = {}
        self._excluding: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self.recontact = 0
        for bit, target in enumerate(self.targets):
            survey = target.survey
            self._of_survey[survey.survey_id] |= 1 << bit
            for exclusion in survey.survey_wave_exclusions:
                for status_id in exclusion.participation_status_ids:
                    key = exclusion.survey_id, exclusion.wave_id, status_id
                    self._excluding[key] |= 1 << bit
            if survey.is_survey_recontact:
                self.recontact |= 1 << bit

    def ranked(self, bits: int) -> Iterator[tuple[Any, Program, Target]]:
        """Yield quotas after their rank, best first, and what they were compiled in."""
        return ((self.ranks[bit], self.program, self.targets[bit]) for bit in ascending(bits))

    def of_surveys(self, survey_ids: Iterable[int]) -> int:
        """Return the quotas of surveys."""
        return all_of(self._of_survey.get(survey_id, 0) for survey_id in survey_ids)

    def for_device(self, device_type: int) -> int:
        """Return the quotas open to a device; a survey that names none is open to all."""
        found = self._of_device.get(device_type)
        if found is None:
            devices = (target.survey.device_type_ids for target in self.targets)
            found = all_of(1 << bit for bit, ids in enumerate(devices) if not ids or device_type in ids)
            self._of_device[device_type] = found
        return found

    def excluding(self, participations: Iterable[Participation]) -> int:
        """Return the quotas that exclude who took part so."""
        return all_of(
            self._excluding.get((one.survey_id, wave_id, one.status_id), 0)
            for one in participations
            for wave_id in (one.wave_id, 0)
        )


class QuotaIndex:
    """An inventory, compiled for matching member by member.

    Building takes a while; on an event loop, do it in a thread. Matching is fast enough for the loop.

    Args:
        quotas: What `client.get_quotas()` returns, or surveys.
        kinds: Which questions are matched otherwise than by answer IDs.
        policy: How to take what the contract leaves open.
        rank: What quotas are sorted by, the lowest first. Default: the most completes still wanted first. The
            quota ID decides between equal ones.

    Attributes:
        diagnostics: What was odd about the inventory. What is not understood counts as possible, and never
            stops the rest from being matched.
    """

    def __init__(
        self,
        quotas: Quotas | Iterable[Survey],
        *,
        kinds: QuestionKinds | None = None,
        policy: MatchPolicy | None = None,
        rank: Rank | None = None,
    ) -> None:
        self.kinds = QuestionKinds.default() if kinds is None else kinds
        self.policy = MatchPolicy() if policy is None else policy
        self._rank = most_wanted if rank is None else rank
        surveys = _surveys_of(quotas)
        self._surveys = {_key(survey): survey for survey in surveys}
        self._has_twice = _lists_twice(surveys)
        part = self._part(surveys)
        self._settle([part], [part.segment.all])

    def _settle(self, parts: list[_Part], listed: list[int]) -> None:
        """Put parts together, with the quotas of each that count: others were in an older inventory."""
        self._parts, self._listed = parts, listed
        self._open = listed.copy()
        self._recontact: dict[int, frozenset[str]] = {}
        self.diagnostics: tuple[Diagnostic, ...] = tuple(
            each
            for part, bits in zip(parts, listed, strict=True)
            for each in part.diagnostics
            if bits >> part.bit_of[each.quota_id] & 1
        )

    def _part(self, surveys: Iterable[Survey]) -> _Part:
        return _Part(surveys, self.kinds, self.policy, self._rank)

    def __len__(self) -> int:
        """Return how many quotas are open."""
        return sum(bits.bit_count() for bits in self._open)

    @property
    def quota_ids(self) -> QuotaIds:
        """The quotas that are open, best first."""
        return QuotaIds(list(zip(self._parts, self._open, strict=True)))

    def updated(self, quotas: Quotas | Iterable[Survey]) -> QuotaIndex:
        """Return an index of a newer inventory. Surveys that are as they were are not compiled again.

        This one stays as it is. Quotas that were closed, and recontact lists, are not carried over: the newer
        inventory is the newer word.
        """
        surveys = _surveys_of(quotas)
        if self._has_twice or _lists_twice(surveys):  # which one counts may be another one now
            return QuotaIndex(surveys, kinds=self.kinds, policy=self.policy, rank=self._rank)
        index = copy(self)
        index._update(surveys)  # noqa: SLF001  its own class
        return index

    def _update(self, surveys: Iterable[Survey]) -> None:
        before, self._surveys = self._surveys.copy(), {}
        changed: set[tuple[int, int]] = set()
        for survey in surveys:
            key = _key(survey)
            known = before.get(key)
            # What is read again, and is as it was, mostly is the same object.
            if known is survey or known == survey:
                self._surveys[key] = before.pop(key)
            else:
                self._surveys[key] = survey
                changed.add(key)
        gone = {quota.quota_id for survey in before.values() for quota in survey.quotas}
        listed = [
            without(bits, all_of(1 << part.bit_of[id_] for id_ in gone if id_ in part.bit_of))
            for part, bits in zip(self._parts, self._listed, strict=True)
        ]
        kept = self._kept(listed, sum(len(self._surveys[key].quotas) for key in changed))
        for part, bits in zip(self._parts[kept:], listed[kept:], strict=True):
            changed.update(_key(part.targets[bit].survey) for bit in ascending(bits))
        parts = self._parts[:kept]
        if any(self._surveys[key].quotas for key in changed):
            parts.append(self._part(survey for key, survey in self._surveys.items() if key in changed))
        self._settle(parts, [*listed[:kept], *(part.segment.all for part in parts[kept:])])

    def _kept(self, listed: Sequence[int], changed: int) -> int:
        """Return how many parts are kept; those after them are compiled again, with the quotas that changed.

        Parts come out smaller and smaller so, the latest one last, and few quotas are compiled time and again.
        """
        kept, newer = len(self._parts), changed
        for at in reversed(range(len(self._parts))):
            left = listed[at].bit_count()
            if left < _LEFT * (newer + len(self._parts[at].targets) - left):
                kept = at
            newer += left
        return min(kept, _MOST_PARTS - 1) if changed else kept

    def close(self, quota_id: int) -> bool:
        """Take a quota out, as after a notification; return whether it was open here."""
        was_open = False
        for at, part in enumerate(self._parts):
            bit = part.bit_of.get(quota_id)
            if bit is not None and self._open[at] >> bit & 1:
                self._open[at] ^= 1 << bit
                was_open = True
        return was_open

    def recontact(self, quota_id: int, member_codes: Collection[str]) -> None:
        """Say which members a quota is for; the latest list counts.

        Until then, quotas of recontact surveys are possible at most.
        """
        if isinstance(member_codes, str):
            raise InvalidRequestError("member_codes are given as a list or set, not as one text")
        # A new one each time: somebody may be matching in another thread.
        self._recontact = {**self._recontact, quota_id: frozenset(member_codes)}

    @property
    def recontact_lists(self) -> Mapping[int, frozenset[str]]:
        """The lists that were given to `recontact`, by quota ID."""
        return self._recontact

    def match(
        self,
        profile: Profile,
        *,
        device_type: int | None = None,
        exclude_surveys: Iterable[int] = (),
        participations: Iterable[Participation] = (),
        member_code: str | None = None,
    ) -> MatchResult:
        """Return the quotas of a member.

        Args:
            profile: The member's answers by question ID: age in years, postal code, answer IDs. A question that
                is not there, or None, was not answered.
            device_type: The device the member uses now; None leaves it out of account.
            exclude_surveys: Surveys that the member is not to be offered, because it took them.
            participations: What the member took part in; surveys exclude some of those (SurveyWaveExclusions).
            member_code: Looked up in the lists given to `recontact`.

        Raises:
            InvalidRequestError: An answer is none; the text names it.
        """
        profile = lasting(profile)
        if device_type is not None and not isinstance(device_type, int):
            raise InvalidRequestError(f"device_type is a number, not {device_type!r}")
        exclude_surveys, participations = tuple(exclude_surveys), tuple(participations)
        certain: list[tuple[_Part, int]] = []
        possible: list[tuple[_Part, int]] = []
        for part, is_open in zip(self._parts, self._open, strict=True):
            fits, may = part.segment.match(profile, self.kinds)
            may &= is_open
            if device_type is not None:
                may &= part.for_device(device_type)
            if exclude_surveys:
                may = without(may, part.of_surveys(exclude_surveys))
            if participations:
                may = without(may, part.excluding(participations))
            fits &= may
            if part.recontact or self._recontact:
                fits, may = self._recontacted(part, fits, may, member_code)
            certain.append((part, fits))
            possible.append((part, may ^ fits))
        return MatchResult(QuotaIds(certain), QuotaIds(possible))

    def _recontacted(self, part: _Part, fits: int, may: int, member_code: str | None) -> tuple[int, int]:
        listed = 0
        for quota_id, codes in self._recontact.items():
            bit = part.bit_of.get(quota_id)
            if bit is None or member_code is None:
                continue
            if member_code in codes:
                listed |= 1 << bit
            else:
                may = without(may, 1 << bit)
        return without(fits & may, without(part.recontact, listed)), may

    def explain(self, profile: Profile, quota_id: int) -> Reason:
        """Return why a member matches a quota or not, by its answers: a tree of reasons, for people.

        Raises:
            KeyError: There is no such quota in the index.
        """
        for part, listed, is_open in zip(self._parts, self._listed, self._open, strict=True):
            bit = part.bit_of.get(quota_id)
            if bit is None or not listed >> bit & 1:
                continue
            reason = evaluate(lasting(profile), part.targets[bit].quota, self.kinds, self.policy)
            if is_open >> bit & 1:
                return reason
            return Reason(reason.what, Truth.NO, "it was closed", (reason,))
        raise KeyError(quota_id)

    def requests(
        self, members: Iterable[Member], *, n: int = 20, one_per_survey: bool = True
    ) -> Iterator[InviteRequest]:
        """Yield what `client.fan_out` takes: for each member that matches any, the best `n` quotas.

        Args:
            members: The members.
            n: How many quotas a member is asked for at most.
            one_per_survey: See `MatchResult.select`.

        Raises:
            InvalidRequestError: An answer is none; the text says of which member, by place.
        """
        for place, member in enumerate(members):
            try:
                matched = self.match(
                    member.profile,
                    device_type=member.device_type,
                    exclude_surveys=member.exclude_surveys,
                    participations=member.participations,
                    member_code=member.member_code,
                )
            except InvalidRequestError as exc:
                raise InvalidRequestError(f"members[{place}]: {exc}") from None
            selected = matched.select(n, one_per_survey=one_per_survey)
            if selected:
                yield InviteRequest(member.member_code, selected)


def _surveys_of(quotas: Quotas | Iterable[Survey]) -> tuple[Survey, ...]:
    surveys = quotas.surveys if isinstance(quotas, Quotas) else tuple(quotas)
    for survey in surveys:
        if not isinstance(survey, Survey):
            raise InvalidRequestError(
                f"an index is made of what get_quotas() returns, or of surveys, not of {type(survey).__name__}"
            )
    return surveys


def _key(survey: Survey) -> tuple[int, int]:
    return survey.survey_id, survey.wave_id


def _lists_twice(surveys: Sequence[Survey]) -> bool:
    """Return whether there is a survey, or a quota, that is listed more than once."""
    quota_ids = [quota.quota_id for survey in surveys for quota in survey.quotas]
    return len(set(map(_key, surveys))) < len(surveys) or len(set(quota_ids)) < len(quota_ids)
