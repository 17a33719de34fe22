"""One member against all quotas: a program as sets of quotas, for Python's big integers.

A member is asked question by question, and each answer says which quotas it rules out. Answers repeat from
member to member, so what one rules out is found once and remembered. What is left of a member is to unite some
hundred sets, twice: those ruled out for good, and those ruled out as certain.

Most layers can be ruled out by one question alone: those with one sub-quota, by any of its questions, and those
whose sub-quotas all ask the same question, as age groups do. Layers that cross questions, as gender by age, are
counted first, in sets of sub-quotas: how many fit, how many may.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from sampling_async._collector import put_off_a_pause
from sampling_async._errors import InvalidRequestError
from sampling_async.matching._bits import Unions, all_of, ascending, without
from sampling_async.matching._policy import MatchPolicy, Truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async.matching._conditions import Condition
    from sampling_async.matching._program import LayerShape, Program
    from sampling_async.matching._questions import Known, Profile, QuestionKinds

_REMEMBERED_BYTES: Final = 2**25
"""What answers rule out is remembered up to here, and then found again."""

_REMEMBERED_SIZE: Final = 64
"""Answers of so many answer IDs, or letters, are remembered at most; longer ones hardly come twice."""

_UNIONS_BYTES: Final = 2**25
"""What the unions of quotas by crossed layers may take; beyond, they are made one by one."""


class _Layout(NamedTuple):
    """How many bits there are of each kind in what an answer rules out.

    That is one number, so that it is united at once: from the lowest bits on, quotas for good and as certain,
    and sub-quotas of crossed layers for good and as certain. Few questions have these; without, it is shorter.
    """

    quotas: int
    crossed: int

    def packed(self, out: int, uncertain: int, out_crossed: int, uncertain_crossed: int) -> int:
        """Return the four as one."""
        return (
            out | (uncertain | (out_crossed | uncertain_crossed << self.crossed) << self.quotas) << self.quotas
        )

    def parts(self, packed: int) -> tuple[int, int, int, int]:
        """Return the four."""
        quotas, crossed = (1 << self.quotas) - 1, (1 << self.crossed) - 1
        of_crossed = packed >> 2 * self.quotas
        return (
            packed & quotas,
            packed >> self.quotas & quotas,
            of_crossed & crossed,
            of_crossed >> self.crossed,
        )


class _OneOf(NamedTuple):
    """Alternatives about one question: they rule out what asks them, where none of the conditions is met.

    What asks is a set of quotas and, in the bits above, of sub-quotas of crossed layers.
    """

    conditions: int
    asking: int


class _Folded(NamedTuple):
    """A layer that asks one question only: its sub-quotas, as conditions and whether full, and its quotas."""

    sub_quotas: tuple[tuple[int, bool], ...]
    quotas: int

    def truth(self, met: int, may: int, *, exactly_one: bool) -> Truth:
        """Return what `layer_truth` does; there are a thousand of these, and an answer asks them all."""
        certain = possible_open = possible_full = 0
        for conditions, full in self.sub_quotas:
            if conditions & may:
                if full:
                    possible_full += 1
                else:
                    possible_open += 1
                if conditions & met:
                    if full:
                        return Truth.NO
                    certain += 1
        if not possible_open or (exactly_one and certain > 1):
            return Truth.NO
        if exactly_one:
            is_certain = certain == possible_open + possible_full == 1
        else:
            is_certain = certain > 0 and possible_full == 0
        return Truth.CERTAIN if is_certain else Truth.POSSIBLE


class _Question:
    """All that is asked about one question; conditions are bits here, by their places in this question."""

    def __init__(self, layout: _Layout, policy: MatchPolicy) -> None:
        self._layout = layout
        self._policy = policy
        self._conditions: list[Condition] = []
        self._by_id: defaultdict[int, int] = defaultdict(int)
        self._by_prefix: defaultdict[str, int] = defaultdict(int)
        self._lengths: tuple[int, ...] = ()
        self._vague = 0
        self._unanswered = 0
        self._one_of: list[_OneOf] = []
        self._having: list[list[int]] = []  # of each condition, the alternatives that hold it
        self._folded: list[_Folded] = []
        self._asking = 0  # what asks any of the alternatives
        self._asking_sure = 0  # what asks those for which a miss is a miss
        self._twice = 0  # what asks in several alternatives
        self._shared: list[int] = []  # the alternatives that are asked by such

    def add(self, condition: Condition) -> int:
        """Add a condition and return its bit."""
        bit = 1 << len(self._conditions)
        self._conditions.append(condition)
        self._having.append([])
        for answer_id in condition.ids:
            self._by_id[answer_id] |= bit
        for prefix in condition.prefixes:
            self._by_prefix[prefix] |= bit
        if condition.may_be_met(answered=True, policy=self._policy):
            self._vague |= bit
        if condition.may_be_met(answered=False, policy=self._policy):
            self._unanswered |= bit
        return bit

    def add_one_of(self, conditions: int, quotas: int, crossed: int) -> None:
        """Add alternatives that quotas ask, and sub-quotas of crossed layers."""
        asking = quotas | crossed << self._layout.quotas
        for place in ascending(conditions):
            self._having[place].append(len(self._one_of))
        self._one_of.append(_OneOf(conditions, asking))
        self._twice |= self._asking & asking
        self._asking |= asking

    def add_folded(self, sub_quotas: tuple[tuple[int, bool], ...], quotas: int) -> None:
        """Add a layer."""
        self._folded.append(_Folded(sub_quotas, quotas))

    def seal(self) -> None:
        """Make ready what answers have in common, after all was added."""
        self._shared = [at for at, each in enumerate(self._one_of) if each.asking & self._twice]
        self._asking_sure = all_of(each.asking for each in self._one_of if not each.conditions & self._vague)
        self._lengths = tuple({len(prefix) for prefix in self._by_prefix})

    def ruled_unanswered(self) -> int:
        """Return what no answer rules out, packed."""
        sure = all_of(each.asking for each in self._one_of if not each.conditions & self._unanswered)
        return self._packed(sure, self._asking, 0, self._unanswered)

    def ruled(self, answer: Known) -> int:
        """Return what an answer rules out, packed."""
        met = self._met(answer)
        hit = {at for place in ascending(met) for at in self._having[place]}
        revived = all_of(self._one_of[at].asking for at in hit)
        out, uncertain = without(self._asking_sure, revived), without(self._asking, revived)
        for at in self._shared if revived & self._twice else ():
            if at not in hit:  # it rules out what another one would let pass
                conditions, asking = self._one_of[at]
                uncertain |= asking
                if not conditions & self._vague:
                    out |= asking
        return self._packed(out, uncertain, met, met | self._vague)

    def _packed(self, out: int, uncertain: int, met: int, may: int) -> int:
        quotas = (1 << self._layout.quotas) - 1
        out_quotas, uncertain_quotas = out & quotas, uncertain & quotas
        exactly_one = self._policy.subquota_rule == "exactly_one"
        for folded in self._folded:
            truth = folded.truth(met, may, exactly_one=exactly_one)
            if truth < Truth.CERTAIN:
                uncertain_quotas |= folded.quotas
                if truth < Truth.POSSIBLE:
                    out_quotas |= folded.quotas
        bits = self._layout.quotas
        return self._layout.packed(out_quotas, uncertain_quotas, out >> bits, uncertain >> bits)

    def _met(self, answer: Known) -> int:
        """Return the conditions that an answer meets."""
        if isinstance(answer, frozenset):
            return all_of(self._by_id.get(one, 0) for one in answer)
        if isinstance(answer, str):
            return all_of(self._by_prefix.get(answer[:length], 0) for length in self._lengths)
        return all_of(1 << place for place, one in enumerate(self._conditions) if one.is_met_by(answer))


class _Plane(NamedTuple):
    """Sub-quotas of crossed layers at one position: where their bits begin, whose they are, which are full."""

    begin: int
    layers: int
    full: int


class _Crossed:
    """Layers that ask several questions and have several sub-quotas.

    The first sub-quotas of all layers come first, then the second ones of those that have two, and so on; with
    the layers sorted by how many they have, each position is one run of bits.
    """

    def __init__(self, layers: Sequence[tuple[LayerShape, int]]) -> None:
        ordered = sorted(layers, key=lambda each: -len(each[0].sub_quotas))
        self.places: list[int] = []  # of the sub-quotas, bit by bit
        self._planes: list[_Plane] = []
        self._quotas = Unions([quotas for _, quotas in ordered], _UNIONS_BYTES)
        self._all = (1 << len(ordered)) - 1
        for position in range(len(ordered[0][0].sub_quotas) if ordered else 0):
            having = [shape.sub_quotas[position] for shape, _ in ordered if len(shape.sub_quotas) > position]
            full = all_of(1 << at for at, (_, is_full) in enumerate(having) if is_full)
            self._planes.append(_Plane(len(self.places), (1 << len(having)) - 1, full))
            self.places += [place for place, _ in having]

    def ruled(self, out: int, uncertain: int, policy: MatchPolicy) -> tuple[int, int]:
        """Return the quotas that the layers rule out, for good and as certain.

        Args:
            out: Sub-quotas that are ruled out for good.
            uncertain: Those that are ruled out as certain.
            policy: Says how many must fit.
        """
        fits = two_fit = may = two_may = may_open = full_fits = full_may = open_fits = 0
        for begin, layers, full in self._planes:
            certain = without(layers, uncertain >> begin)
            possible = without(layers, out >> begin)
            two_fit |= fits & certain
            fits |= certain
            two_may |= may & possible
            may |= possible
            may_open |= without(possible, full)
            full_fits |= certain & full
            full_may |= possible & full
            open_fits |= without(certain, full)
        no = full_fits | without(self._all, may_open)
        if policy.subquota_rule == "exactly_one":
            no |= two_fit
            uncertain = two_may | without(self._all, fits)
        else:
            uncertain = full_may | without(self._all, open_fits)
        return self._quotas.of(no), self._quotas.of(uncertain | no)


class _Sorted:
    """The layers of a program, by how they are matched, each with the quotas that have it.

    Attributes:
        never: Quotas with a layer that nobody can fit: all its sub-quotas are full.
        never_certain: Quotas with a layer that asks for nothing.
        one_of: What rules quotas out by one question alone, by its place in `Program.asked`.
        folded: Layers with several sub-quotas, all of which ask one and the same question.
        crossed: The others.
    """

    def __init__(self, program: Program, having: Sequence[int]) -> None:
        self.never = self.never_certain = 0
        self.one_of: defaultdict[int, int] = defaultdict(int)
        self.folded: list[tuple[LayerShape, int]] = []
        self.crossed: list[tuple[LayerShape, int]] = []
        for shape, quotas in zip(program.layers, having, strict=True):
            put_off_a_pause()  # as in `Program`
            asked = [program.sub_quotas[sub_quota].asked for sub_quota, _ in shape.sub_quotas]
            if all(full for _, full in shape.sub_quotas):  # or there are none
                self.never |= quotas
            elif len(asked) == 1:
                for place in asked[0]:
                    self.one_of[place] |= quotas
                self.never_certain |= 0 if asked[0] else quotas
            elif _is_one_question(program, asked):
                self.folded.append((shape, quotas))
            else:
                self.crossed.append((shape, quotas))


def _is_one_question(program: Program, asked: Sequence[tuple[int, ...]]) -> bool:
    questions = {tuple(program.asked[place].question_id for place in each) for each in asked}
    return len(questions) == 1 == len(asked[0])


class Segment:
    """A program made ready for matching, with its quotas in an order of their own.

    Args:
        program: The inventory.
        order: Places of `program.targets`, best first; bit `n` of every set stands for the `n`th of these.
    """

    def __init__(self, program: Program, order: Sequence[int]) -> None:
        self.all = (1 << len(order)) - 1
        self._policy = program.policy
        self._questions: dict[int, _Question] = {}
        having = [0] * len(program.layers)
        for bit, place in enumerate(order):
            for layer in program.targets[place].layers:
                having[layer] |= 1 << bit
        self._build(program, _Sorted(program, having))

    def _build(self, program: Program, layers: _Sorted) -> None:
        self._never, self._never_certain = layers.never, layers.never_certain
        self._crossed = _Crossed(layers.crossed)
        self._layout = _Layout(self.all.bit_length(), len(self._crossed.places))
        self._crossed_vague = 0  # sub-quotas that ask for nothing
        crossed: defaultdict[int, int] = defaultdict(int)
        for bit, sub_quota in enumerate(self._crossed.places):
            asked = program.sub_quotas[sub_quota].asked
            for place in asked:
                crossed[place] |= 1 << bit
            self._crossed_vague |= 0 if asked else 1 << bit
        bits: dict[int, int] = {}  # of conditions, each in its question
        for place in sorted(layers.one_of.keys() | crossed.keys()):
            put_off_a_pause()
            question, conditions = self._asked(program, place, bits)
            question.add_one_of(conditions, layers.one_of[place], crossed[place])
        for shape, quotas in layers.folded:
            of = [(program.sub_quotas[sub_quota].asked[0], full) for sub_quota, full in shape.sub_quotas]
            question, _ = self._asked(program, of[0][0], bits)
            question.add_folded(
                tuple((self._asked(program, place, bits)[1], full) for place, full in of), quotas
            )
        for question in self._questions.values():
            question.seal()
        self._places = {question_id: at for at, question_id in enumerate(self._questions)}
        self._unanswered = [question.ruled_unanswered() for question in self._questions.values()]
        self._remembered: list[dict[object, int]] = [{} for _ in self._questions]
        self._bytes = 0

    def _asked(self, program: Program, place: int, bits: dict[int, int]) -> tuple[_Question, int]:
        """Return the question of some alternatives, and these as bits in it."""
        asked = program.asked[place]
        question = self._questions.get(asked.question_id)
        if question is None:
            question = self._questions[asked.question_id] = _Question(self._layout, self._policy)
        for condition in asked.conditions:
            if condition not in bits:
                bits[condition] = question.add(program.conditions[condition])
        return question, all_of(bits[condition] for condition in asked.conditions)

    def match(self, profile: Profile, kinds: QuestionKinds) -> tuple[int, int]:
        """Return the quotas that a member matches for certain, and those it may match, these included.

        Raises:
            InvalidRequestError: An answer to a question that is asked is none.
        """
        ruled = self._unanswered.copy()
        places, remembered = self._places, self._remembered
        for question_id, answer in profile.items():
            at = places.get(question_id)
            if at is None:
                _check_question_id(question_id)
            else:
                # Only of these is it sure that equal ones mean the same: True is equal to 1.
                found = remembered[at].get(answer) if type(answer) is int or type(answer) is str else None
                ruled[at] = self._ruled(at, question_id, answer, kinds) if found is None else found
        out, uncertain, out_crossed, uncertain_crossed = self._layout.parts(all_of(ruled))
        by_crossed = self._crossed.ruled(out_crossed, uncertain_crossed | self._crossed_vague, self._policy)
        possible = without(self.all, out | by_crossed[0] | self._never)
        return without(possible, uncertain | by_crossed[1] | self._never_certain), possible

    def _ruled(self, at: int, question_id: int, answer: object, kinds: QuestionKinds) -> int:
        known = kinds.known(question_id, answer)
        if known is None:
            return self._unanswered[at]
        key = answer if type(answer) is int or type(answer) is str else known
        found = self._remembered[at].get(key)
        if found is None:
            found = self._questions[question_id].ruled(known)
            size = 1 if isinstance(known, int) else len(known)
            if size > _REMEMBERED_SIZE:
                return found
            self._bytes += found.bit_length() // 8 + 200 + 100 * size
            if self._bytes > _REMEMBERED_BYTES:
                self._bytes = 0
                for each in self._remembered:
                    each.clear()
            self._remembered[at][key] = found
        return found


def _check_question_id(question_id: object) -> None:
    if isinstance(question_id, str):
        raise InvalidRequestError(
            f"profile[{question_id!r:.40}]: question IDs are whole numbers, not texts, which JSON makes of them"
        )
