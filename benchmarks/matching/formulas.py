"""Quotas as two boolean formulas, for engines without a third truth value: who is certain, and who is possible.

`by_polars.py` and `by_duckdb.py` share this, and each translates the formulas into its own language. The
formulas follow the contract with the default policy of the index, and are as short as a careful engineer makes
them. Three things are simpler here: a member gives one answer to a question, so groups without a common answer
are disjoint; postal codes are compared as they are; and no row is one for which the index has a diagnostic.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from attrs import frozen

from matching.inventories import AGE, DMA, POSTAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sampling_async import Layer, QuestionAndAnswers, Quotas, SubQuota

_SHOWN: Final = 1000  # postal codes that the service shows of a list
_OLDEST: Final = 150


class Leaf(NamedTuple):
    """A condition on one question: the accepted answers, and the result without an answer and with any answer.

    The values are answer IDs, years, or beginnings of postal codes.
    """

    question_id: int
    values: frozenset[int] | frozenset[str]
    if_missing: bool = False
    if_answered: bool = False


@frozen(cache_hash=True)
class All:
    """True if all parts are true."""

    parts: frozenset[Formula]


@frozen(cache_hash=True)
class Any:
    """True if any part is true."""

    parts: frozenset[Formula]


@frozen(cache_hash=True)
class Not:
    """True if the part is false."""

    part: Formula


Formula = Leaf | All | Any | Not
TRUE: Final = All(frozenset())
FALSE: Final = Any(frozenset())


class Wanted(NamedTuple):
    """A quota: the formula for certain members, and the one for certain or possible members."""

    quota_id: int
    certain: Formula
    may: Formula


def formulas(quotas: Quotas, number: int | None = None) -> list[Wanted]:
    """Return the first quotas of the inventory. Of a quota that is listed twice, the first one counts."""
    listed = {quota.quota_id: quota for survey in reversed(quotas.surveys) for quota in reversed(survey.quotas)}
    found: list[Wanted] = []
    for quota in islice(reversed(listed.values()), number):
        layers = [_layer(layer) for layer in quota.layers]
        found.append(Wanted(quota.quota_id, both(each for each, _ in layers), both(each for _, each in layers)))
    return found


def uses(all_of_them: Iterable[Formula]) -> Counter[Formula]:
    """Return how often each formula is used: as one of these, and inside them."""
    found: Counter[Formula] = Counter()
    left = list(all_of_them)
    while left:
        formula = left.pop()
        found[formula] += 1
        if found[formula] == 1 and not isinstance(formula, Leaf):
            left += (formula.part,) if isinstance(formula, Not) else formula.parts
    return found


class Prefixes:
    """Beginnings of postal codes of one length. One lookup serves all lists that have such beginnings.

    Attributes:
        length: Their length.
        lists: The lists, without beginnings of other lengths.
    """

    def __init__(self, length: int, leaves: Iterable[Leaf]) -> None:
        self.length = length
        self.lists = list(dict.fromkeys(found for leaf in leaves if (found := self.of(leaf))))

    def of(self, leaf: Leaf) -> frozenset[str]:
        """Return the list of a question, which may be empty."""
        return frozenset(each for each in leaf.values if isinstance(each, str) and len(each) == self.length)

    def words(self, bits: int) -> dict[str, list[int]]:
        """Return for each beginning the lists that contain it, as bits, the lowest for the first list."""
        found: dict[str, list[int]] = {}
        for at, prefixes in enumerate(self.lists):
            for prefix in prefixes:
                words = found.setdefault(prefix, [0] * -(-len(self.lists) // bits))
                words[at // bits] |= 1 << at % bits
        return found


def prefixes_of(leaves: Iterable[Leaf]) -> list[Prefixes]:
    """Return the beginnings of postal codes in all lists, by their length."""
    postal = [leaf for leaf in leaves if leaf.question_id == POSTAL]
    return [
        Prefixes(length, postal) for length in sorted({len(each) for leaf in postal for each in leaf.values})
    ]


def both(parts: Iterable[Formula]) -> Formula:
    """Return "and"."""
    flat: set[Formula] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, All) else {part}
    if FALSE in flat:
        return FALSE
    return flat.pop() if len(flat) == 1 else All(frozenset(flat))


def either(parts: Iterable[Formula]) -> Formula:
    """Return "or". Conditions on the same question become one condition."""
    flat: set[Formula] = set()
    leaves: dict[int, Leaf] = {}
    for part in parts:
        for each in part.parts if isinstance(part, Any) else (part,):
            if isinstance(each, Leaf):
                one = leaves.get(each.question_id, each)
                values = one.values | each.values
                missing, answered = one.if_missing | each.if_missing, one.if_answered | each.if_answered
                leaves[each.question_id] = Leaf(each.question_id, values, missing, answered)
            else:
                flat.add(each)
    flat.update(TRUE if leaf.if_missing and leaf.if_answered else leaf for leaf in leaves.values())
    if TRUE in flat:
        return TRUE
    return flat.pop() if len(flat) == 1 else Any(frozenset(flat))


def not_(formula: Formula) -> Formula:
    """Return "not"."""
    return {TRUE: FALSE, FALSE: TRUE}.get(formula, Not(formula))


def _layer(layer: Layer) -> tuple[Formula, Formula]:
    """Return the formulas for "exactly one sub-quota fits, and it is open": certainly, and possibly."""
    fits = [_sub_quota(each) for each in layer.sub_quotas]
    is_open = [each.current_completes < each.max_target_completes for each in layer.sub_quotas]
    certain, may = [each for each, _ in fits], [each for _, each in fits]
    certain_open = either(_where(is_open, certain))
    may_open = either(_where(is_open, may))
    if all(_are_disjoint(*pair) for pair in combinations(may, 2)):
        return certain_open, may_open
    certain_full = either(_where([not each for each in is_open], certain))
    return (
        both((certain_open, not_(_two_of(may)))),
        both((may_open, not_(certain_full), not_(_two_of(_where(is_open, certain))))),
    )


def _where(chosen: Sequence[bool], parts: Sequence[Formula]) -> list[Formula]:
    return [part for part, is_chosen in zip(parts, chosen, strict=True) if is_chosen]


def _two_of(parts: Sequence[Formula]) -> Formula:
    return either(both((part, either(parts[:at]))) for at, part in enumerate(parts))


def _are_disjoint(one: Formula, other: Formula) -> bool:
    """Return whether no member can fit both, as far as the formulas show it."""
    ones, others = (
        {leaf.question_id: leaf for leaf in (each.parts if isinstance(each, All) else (each,))}
        for each in (one, other)
    )
    return any(
        leaf.values.isdisjoint(others[question_id].values)
        and not (leaf.if_missing and others[question_id].if_missing)
        and question_id != POSTAL
        for question_id, leaf in ones.items()
        if question_id in others
    )


def _sub_quota(sub_quota: SubQuota) -> tuple[Formula, Formula]:
    rows: dict[int, list[QuestionAndAnswers]] = {}
    for row in sub_quota.questions_and_answers:
        rows.setdefault(row.question_id, []).append(row)
    if not rows:
        return FALSE, TRUE
    asked = [tuple(map(_row, same)) for same in rows.values()]
    certain = both(either(each for each, _ in same) for same in asked)
    return certain, both(either(each for _, each in same) for same in asked)


def _row(row: QuestionAndAnswers) -> tuple[Leaf, Leaf]:
    values: frozenset[int] | frozenset[str]
    if row.question_id == AGE:
        spans = [tuple(map(int, value.split("-"))) for value in row.answer_values]
        years = (range(first, (last if last < 99 else _OLDEST) + 1) for first, last in spans)
        values = frozenset().union(*years)
    elif row.question_id == POSTAL:
        values = frozenset(row.answer_values)
    elif row.question_id == DMA:
        values = frozenset(map(int, row.answer_values))
    else:
        values = frozenset(row.answer_ids)
    is_cut = row.question_id == POSTAL and len(row.answer_values) >= _SHOWN
    return (
        Leaf(row.question_id, values),
        Leaf(row.question_id, values, if_missing=row.is_routable, if_answered=is_cut),
    )
