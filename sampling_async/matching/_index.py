"""An inventory as an index, which finds the quotas of one member in a fraction of a millisecond."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict, TypeVar, Unpack

from attrs import evolve, field, frozen

from sampling_async import InvalidRequestError, InviteRequest, Quotas, Survey
from sampling_async._contract.checks import require_functions, require_instance, text_of, whole_id
from sampling_async._contract.records import Participation, hidden
from sampling_async.matching._bits import all_of, ascending, without
from sampling_async.matching._conditions import MatchPolicy, Profile, QuestionKinds, Truth, lasting
from sampling_async.matching._evaluate import Reason, evaluate, mask_reasons, recontact_reasons
from sampling_async.matching._result import MatchResult, QuotaIds
from sampling_async.matching._segment import CompiledPart, Rank, most_wanted

if TYPE_CHECKING:
    from sampling_async._contract.checks import Text
    from sampling_async.matching._program import Diagnostic, Target

T = TypeVar("T")
_MOST_PARTS: Final = 3
"""The most parts of an index: each additional part makes matching a tenth to a fifth slower."""

_LEFT: Final = 2
"""A part is kept while the quotas left of it are at least so many times those changed since it was compiled."""


def require_kinds_and_policy(kinds: object, policy: object) -> None:
    require_instance(kinds, QuestionKinds | None, "kinds", "a QuestionKinds, such as QuestionKinds.default()")
    require_instance(policy, MatchPolicy | None, "policy", "a MatchPolicy, such as MatchPolicy(missing='no')")


def _kept(given: Any) -> Any:
    """Return what can be read more than once: a member is looked at again after a refusal."""
    is_read_once = isinstance(given, Iterable) and not isinstance(given, Collection)
    return tuple(given) if is_read_once else given


@frozen
class Member:
    """A member to match; the attributes are the arguments of `QuotaIndex.match`.

    The repr hides the member code, the answers, and what the member took part in.
    """

    member_code: str = field(converter=text_of, repr=hidden)
    profile: Profile = field(repr=False)
    device_type: int | None = None
    exclude_surveys: Collection[int] = field(default=(), converter=_kept, repr=False)
    participations: Collection[Participation] = field(default=(), converter=_kept, repr=False)


class UnknownQuotaError(InvalidRequestError, KeyError):
    """The index has no such quota: the ID is of another inventory, or is not a quota ID at all.

    Attributes:
        quota_id: The ID that was not found.
    """

    def __init__(self, quota_id: object = None) -> None:
        super().__init__()
        # Unpickling calls `__init__` with `args`.
        self.args = (quota_id,)
        self.quota_id = quota_id

    def __str__(self) -> str:
        return f"quota {self.quota_id!r:.40} is not in this index; its `quota_ids` lists the open quotas"


class QuotaIndex:
    """An inventory, compiled for matching member by member.

    Building the index takes a while: in an asyncio program, build it in a thread. Matching is fast enough to
    run on the event loop.

    Args:
        quotas: The result of `client.get_quotas()`, or surveys.
        kinds: The questions that are not matched by answer IDs only. Default: `QuestionKinds.default()`.
        policy: Rules for the cases that the contract leaves open. Default: `MatchPolicy()`.
        rank: The sort key of quotas, lowest first. Default: `most_wanted`, the most completes still wanted
            first. Quotas of equal rank are sorted by their ID.

    Attributes:
        kinds: As given, or the default.
        policy: As given, or the default.
        diagnostics: Reports of what was odd in the inventory. A part of a quota that is not understood counts
            as possible; everything else is matched as usual.

    Raises:
        InvalidRequestError: `quotas` contains something that is not a survey.
    """

    def __init__(
        self,
        quotas: Quotas | Iterable[Survey],
        *,
        kinds: QuestionKinds | None = None,
        policy: MatchPolicy | None = None,
        rank: Rank | None = None,
    ) -> None:
        require_kinds_and_policy(kinds, policy)
        require_functions(rank=rank, or_none=True)
        self.kinds = QuestionKinds.default() if kinds is None else kinds
        self.policy = MatchPolicy() if policy is None else policy
        self._rank = most_wanted if rank is None else rank
        surveys = _surveys_of(quotas)
        self._surveys = {_key(survey): survey for survey in surveys}
        self._has_twice = _lists_twice(surveys)
        part = self._part(surveys)
        self._settle([part], [part.segment.all])

    def _settle(self, parts: list[CompiledPart], listed: list[int]) -> None:
        """Set the parts, and in each the quotas that are listed: the others were in an older inventory only."""
        self._parts, self._listed = parts, listed
        self._open = listed.copy()
        self._recontact: dict[int, frozenset[str]] = {}
        self.diagnostics: tuple[Diagnostic, ...] = tuple(
            each
            for part, bits in zip(parts, listed, strict=True)
            for each in part.diagnostics
            if bits >> part.bit_of[each.quota_id] & 1
        )

    def _part(self, surveys: Iterable[Survey]) -> CompiledPart:
        return CompiledPart(surveys, self.kinds, self.policy, self._rank)

    def __len__(self) -> int:
        """Return how many quotas are open."""
        return sum(bits.bit_count() for bits in self._open)

    @property
    def quota_ids(self) -> QuotaIds:
        """The IDs of the quotas that are open, best first."""
        return QuotaIds(list(zip(self._parts, self._open, strict=True)))

    def updated(self, quotas: Quotas | Iterable[Survey]) -> QuotaIndex:
        """Return an index of a newer inventory, in which unchanged surveys are not compiled again.

        This index does not change. The new index does not know which quotas were closed, nor the recontact
        lists: the newer inventory is more recent than both.

        Raises:
            InvalidRequestError: `quotas` contains something that is not a survey.
        """
        surveys = _surveys_of(quotas)
        # Of a survey or quota that is listed twice, the first one counts. That may be another one now, so
        # compile everything again.
        if self._has_twice or _lists_twice(surveys):
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
            # An unchanged survey mostly is the same object, and `is` is faster than a comparison by value.
            if known is survey or known == survey:
                self._surveys[key] = before.pop(key)
            else:
                self._surveys[key] = survey
                changed.add(key)
        # The surveys left in `before` have changed or are gone: their quotas are no longer listed in any part.
        gone = {quota.quota_id for survey in before.values() for quota in survey.quotas}
        listed = [
            without(bits, all_of(1 << part.bit_of[id_] for id_ in gone if id_ in part.bit_of))
            for part, bits in zip(self._parts, self._listed, strict=True)
        ]
        kept = self._kept(listed, sum(len(self._surveys[key].quotas) for key in changed))
        # The surveys of the parts that are not kept are compiled again, together with those that changed.
        for part, bits in zip(self._parts[kept:], listed[kept:], strict=True):
            changed.update(_key(part.targets[bit].survey) for bit in ascending(bits))
        parts = self._parts[:kept]
        if any(self._surveys[key].quotas for key in changed):
            parts.append(self._part(survey for key, survey in self._surveys.items() if key in changed))
        self._settle(parts, [*listed[:kept], *(part.segment.all for part in parts[kept:])])

    def _kept(self, listed: Sequence[int], changed: int) -> int:
        """Return how many parts are kept; the later ones are compiled again, with the quotas that changed.

        Each part is smaller than the one before it, so few quotas are compiled repeatedly.
        """
        # Example: parts of 1000 and 100 quotas, of which 10 and 5 are no longer listed; 60 are new or changed.
        # Second part: 95 are left, fewer than 2 * (60 + 5), so it is compiled again, and 60 + 95 quotas are
        # newer than the first part. First part: 990 are left, not fewer than 2 * (155 + 10), so it is kept.
        kept, newer = len(self._parts), changed
        for at in reversed(range(len(self._parts))):
            left = listed[at].bit_count()
            if left < _LEFT * (newer + len(self._parts[at].targets) - left):
                kept = at
            newer += left
        return min(kept, _MOST_PARTS - 1) if changed else kept

    def close(self, quota_id: int) -> bool:
        """Close a quota, as after a notification; return whether it was open in this index."""
        quota_id, was_open = whole_id(quota_id, "quota_id"), False
        for at, part in enumerate(self._parts):
            bit = part.bit_of.get(quota_id)
            if bit is not None and self._open[at] >> bit & 1:
                self._open[at] ^= 1 << bit
                was_open = True
        return was_open

    def snapshot(self) -> QuotaIndex:
        """Return a copy that later closings in this index do not change. It takes no time."""
        index = copy(self)
        index._open = self._open.copy()  # noqa: SLF001  its own class
        return index

    def recontact(self, quota_id: int, member_codes: Collection[Text]) -> None:
        """Set the codes of the members that a quota is for; they replace an earlier list of this quota.

        A quota of a recontact survey without a list is possible at most.

        Raises:
            InvalidRequestError: `member_codes` is one text, or holds something else than texts.
        """
        quota_id = whole_id(quota_id, "quota_id")
        if isinstance(text_of(member_codes), str) or not isinstance(member_codes, Iterable):
            raise InvalidRequestError(
                f"member_codes must be a list or a set, not {type(member_codes).__name__}"
            )
        codes = frozenset(map(text_of, member_codes))
        if not all(isinstance(code, str) for code in codes):
            raise InvalidRequestError(f"the member codes of quota {quota_id} must be texts, all of them")
        # Replace the dict, do not change it: another thread may be iterating over it in `match`.
        self._recontact = {**self._recontact, quota_id: codes}

    def carry_over(self, older: QuotaIndex) -> None:
        """Take over the recontact lists of an older index of the same service.

        A list is dropped when its quota was in neither inventory: it is gone for good.
        """
        self._recontact = {
            quota_id: codes
            for quota_id, codes in older._recontact.items()
            if self._lists(quota_id) or older._lists(quota_id)
        }

    def _lists(self, quota_id: int) -> bool:
        return any(
            bits >> part.bit_of[quota_id] & 1
            for part, bits in zip(self._parts, self._listed, strict=True)
            if quota_id in part.bit_of
        )

    @property
    def recontact_lists(self) -> Mapping[int, frozenset[str]]:
        """The lists that were given to `recontact`, by quota ID."""
        return self._recontact

    def match(
        self,
        profile: Profile | Member,
        *,
        device_type: int | None = None,
        exclude_surveys: Iterable[int] | None = None,
        participations: Iterable[Participation] | None = None,
        member_code: Text | None = None,
    ) -> MatchResult:
        """Return the quotas that a member matches or may match.

        Args:
            profile: The member's answers by question ID: age in years, postal code, answer IDs. A question that
                is absent, or None, was not answered. Or a `Member`, which has all the other arguments too; an
                argument given here, even an empty list, replaces the member's own.
            device_type: The device that the member uses now; with None, devices are not checked.
            exclude_surveys: Surveys that the member must not be offered, because the member took them.
            participations: What the member took part in; some surveys exclude members by this
                (SurveyWaveExclusions).
            member_code: The member's code, which is looked up in the lists given to `recontact`.

        Raises:
            InvalidRequestError: An answer is not valid for its question, and the text names the question; or
                another argument is not of its type.
        """
        return self._match(_asking(profile, device_type, exclude_surveys, participations, member_code))

    def _match(self, asking: _MatchArguments) -> MatchResult:
        certain: list[tuple[CompiledPart, int]] = []
        possible: list[tuple[CompiledPart, int]] = []
        for part, is_open in zip(self._parts, self._open, strict=True):
            fits, may = part.segment.match(asking.profile, self.kinds)
            may &= is_open
            if asking.device_type is not None:
                may &= part.for_device(asking.device_type)
            if asking.exclude_surveys:
                may = without(may, part.of_surveys(asking.exclude_surveys))
            if asking.participations:
                may = without(may, part.excluding(asking.participations))
            fits &= may
            if part.recontact or self._recontact:
                fits, may = self._recontacted(part, fits, may, asking.member_code)
            certain.append((part, fits))
            possible.append((part, may ^ fits))
        return MatchResult(QuotaIds(certain), QuotaIds(possible))

    def _recontacted(self, part: CompiledPart, fits: int, may: int, member_code: str | None) -> tuple[int, int]:
        # A member on a list keeps the quota; a member not on it loses the quota. Quotas of recontact surveys
        # without such a check remain possible, but are not certain.
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

    def explain(self, profile: Profile | Member, quota_id: int, **options: Unpack[MemberOptions]) -> Reason:
        """Return the reasons why a member matches a quota or not, as a tree for people to read.

        The arguments are those of `match`. The `truth` of the result says the same as `match`.

        Raises:
            UnknownQuotaError: The index has no such quota.
            InvalidRequestError: An answer is not valid for its question; the text names the question.
        """
        asking = _asking(profile, **options)
        if type(quota_id) is int:
            for part, listed, is_open in zip(self._parts, self._listed, self._open, strict=True):
                bit = part.bit_of.get(quota_id)
                if bit is not None and listed >> bit & 1:
                    # Raise the errors of all answers, as `match` does: `evaluate` reads only those that this
                    # quota asks.
                    self._match(asking)
                    return self._explained(asking, part.targets[bit], is_open=bool(is_open >> bit & 1))
        raise UnknownQuotaError(quota_id)

    def _explained(self, asking: _MatchArguments, target: Target, *, is_open: bool) -> Reason:
        quota, survey = target.quota, target.survey
        by_answers = evaluate(asking.profile, quota, self.kinds, self.policy)
        codes = self._recontact.get(quota.quota_id)
        masks = [] if is_open else [Reason("state", Truth.NO, "it was closed")]
        masks += mask_reasons(
            survey,
            device_type=asking.device_type,
            exclude_surveys=asking.exclude_surveys,
            participations=asking.participations,
        )
        masks += recontact_reasons(survey, codes, asking.member_code)
        if not masks:
            return by_answers
        truth, why = min(((each.truth, each.why) for each in masks), key=itemgetter(0))
        if by_answers.truth < truth:
            truth, why = by_answers.truth, by_answers.why
        return Reason(by_answers.what, truth, why, (*masks, evolve(by_answers, what="answers")))

    def requests(
        self, members: Iterable[Member], *, n: int = 20, one_per_survey: bool = True
    ) -> Iterator[InviteRequest]:
        """Yield requests for `client.fan_out`: the best quotas of each member that matches any quota.

        A request has at most `n` quotas; for `one_per_survey` see `MatchResult.select`.

        Raises:
            InvalidRequestError: An answer is not valid for its question; the text names the member by position.
        """
        for place, member in enumerate(members):
            try:
                matched = self.match(member)
            except InvalidRequestError as exc:
                raise InvalidRequestError(f"members[{place}]: {exc}") from None
            selected = matched.select(n, one_per_survey=one_per_survey)
            if selected:
                yield InviteRequest(member.member_code, selected)


class MemberOptions(TypedDict, total=False):
    """The arguments of `QuotaIndex.match` other than the answers; see there."""

    device_type: int | None
    exclude_surveys: Iterable[int] | None
    participations: Iterable[Participation] | None
    member_code: Text | None


class _MatchArguments(NamedTuple):
    """The arguments of `match` in types that can be read more than once."""

    profile: Profile
    device_type: int | None
    exclude_surveys: tuple[int, ...]
    participations: tuple[Participation, ...]
    member_code: str | None


def _asking(
    profile: Profile | Member,
    device_type: int | None = None,
    exclude_surveys: Iterable[int] | None = None,
    participations: Iterable[Participation] | None = None,
    member_code: Text | None = None,
) -> _MatchArguments:
    if isinstance(profile, Member):
        member, profile = profile, profile.profile
        device_type = member.device_type if device_type is None else device_type
        # An empty list is an argument too: it replaces the member's own surveys or participations.
        exclude_surveys = member.exclude_surveys if exclude_surveys is None else exclude_surveys
        participations = member.participations if participations is None else participations
        member_code = member.member_code if member_code is None else member_code
    if device_type is not None:
        device_type = whole_id(device_type, "device_type")
    excluded = tuple(
        whole_id(each, "each of exclude_surveys") for each in _listed(exclude_surveys, "exclude_surveys")
    )
    took_part = _listed(participations, "participations")
    for each in took_part:
        if not isinstance(each, Participation):
            raise InvalidRequestError(f"each of participations is a Participation, not a {type(each).__name__}")
    code = text_of(member_code)
    if code is not None and not isinstance(code, str):
        raise InvalidRequestError(f"a member code must be a str, not {type(code).__name__}")
    return _MatchArguments(lasting(profile), device_type, excluded, took_part, code)


def _listed(several: Iterable[T] | None, name: str) -> tuple[T, ...]:
    if several is None:
        return ()
    if isinstance(several, str) or not isinstance(several, Iterable):
        raise InvalidRequestError(f"{name} must be a list, a set or a tuple, not {several!r:.40}")
    return tuple(several)


def _surveys_of(quotas: Quotas | Iterable[Survey]) -> tuple[Survey, ...]:
    if not isinstance(quotas, Quotas | Iterable):  # such as a coroutine that was not awaited
        raise InvalidRequestError(f"an index is made from a Quotas or a list of surveys, not {quotas!r:.60}")
    surveys = quotas.surveys if isinstance(quotas, Quotas) else tuple(quotas)
    for survey in surveys:
        if not isinstance(survey, Survey):
            raise InvalidRequestError(
                "an index is made from the result of get_quotas(), or from surveys, not from "
                f"{type(survey).__name__}"
            )
    return surveys


def _key(survey: Survey) -> tuple[int, int]:
    return survey.survey_id, survey.wave_id


def _lists_twice(surveys: Sequence[Survey]) -> bool:
    """Return whether any survey or any quota is listed more than once."""
    quota_ids = [quota.quota_id for survey in surveys for quota in survey.quotas]
    return len(set(map(_key, surveys))) < len(surveys) or len(set(quota_ids)) < len(quota_ids)
