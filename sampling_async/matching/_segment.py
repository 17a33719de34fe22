"""Matching of one member with all quotas: a program as sets of quotas, which are Python's big integers.

Each answer of a member rules out some quotas. Many members give the same answer, so the set that an answer
rules out is computed once and cached. To match a member, the sets of its answers are united, some hundred of
them. There are two such unions: the quotas that are ruled out (they do not match), and the quotas that are
uncertain (they do not certainly match).

One question alone can rule out most layers: a layer with one sub-quota, by any of its questions, and a layer
whose sub-quotas all ask the same question, as age groups do. The other layers cross questions, as gender by
age. For these, the matcher first finds the sub-quotas that fit or may fit, and then applies the rule of a
layer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from sampling_async._contract.errors import InvalidRequestError
from sampling_async._json.gc_pauses import put_off_a_pause
from sampling_async.matching._bits import Unions, all_of, ascending, without
from sampling_async.matching._layers import Fitting, fitting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async.matching._conditions import Condition
    from sampling_async.matching._policy import MatchPolicy
    from sampling_async.matching._program import LayerShape, Program
    from sampling_async.matching._questions import Known, Profile, QuestionKinds

_REMEMBERED_BYTES: Final = 2**25
"""The largest size of the cache of the sets that answers rule out; then it is cleared and filled again."""

_REMEMBERED_SIZE: Final = 64
"""The most answer IDs, or letters, of an answer that is cached; longer answers hardly occur twice."""

_UNIONS_BYTES: Final = 2**25
"""The largest size of the cache of unions of quotas by crossed layers; then it is cleared and filled again."""


class _Layout(NamedTuple):
    """The layout of the four sets that an answer rules out, packed into one integer.

    One integer needs one union instead of four. From the lowest bit on, it holds: quotas ruled out, uncertain
    quotas, sub-quotas of crossed layers ruled out, and uncertain ones. Few questions occur in crossed layers;
    the integers of all others are shorter, because their highest bits are 0.

    Attributes:
        quotas: How many bits a set of quotas has.
        crossed: How many bits a set of sub-quotas of crossed layers has.
    """

    quotas: int
    crossed: int

    def packed(self, out: int, uncertain: int, out_crossed: int, uncertain_crossed: int) -> int:
        """Return the four sets as one integer."""
        # With 3 quotas and 2 sub-quotas: bits 0-2 are `out`, 3-5 `uncertain`, 6-7 `out_crossed` and 8-9
        # `uncertain_crossed`.
        return (
            out | (uncertain | (out_crossed | uncertain_crossed << self.crossed) << self.quotas) << self.quotas
        )

    def parts(self, packed: int) -> tuple[int, int, int, int]:
        """Return the four sets of one integer."""
        quotas, crossed = (1 << self.quotas) - 1, (1 << self.crossed) - 1
        of_crossed = packed >> 2 * self.quotas
        return (
            packed & quotas,
            packed >> self.quotas & quotas,
            of_crossed & crossed,
            of_crossed >> self.crossed,
        )


class _OneOf(NamedTuple):
    """Alternatives about one question: an answer that meets none of them rules out the quotas that ask.

    Attributes:
        conditions: The conditions, a bit each.
        asking: The quotas that ask these alternatives and, in the bits above, the sub-quotas of crossed layers.
    """

    conditions: int
    asking: int


class _Folded(NamedTuple):
    """A layer that asks one question only.

    Attributes:
        sub_quotas: The conditions of each sub-quota, a bit each, and whether it is full.
        quotas: The quotas that have this layer.
    """

    sub_quotas: tuple[tuple[int, bool], ...]
    quotas: int

    def fits(self, met: int, may: int, *, exactly_one: bool) -> Fitting[int]:
        """Return whether an answer fits the layer, given the conditions that it meets and those it may meet."""
        # Sets of one member: 1 holds the member, 0 is empty.
        sub_quotas = [(int(each & met > 0), int(each & may > 0), int(full)) for each, full in self.sub_quotas]
        return fitting(sub_quotas, 0, exactly_one=exactly_one)


class _Question:
    """Everything that an inventory asks about one question; bit `n` stands for the `n`th condition added."""

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
        # For each condition, the places in `_one_of` of the alternatives that contain it.
        self._having: list[list[int]] = []
        self._folded: list[_Folded] = []
        # Sets of quotas that ask: any alternatives at all; alternatives without a vague condition, which a
        # wrong answer rules out; and several alternatives.
        self._asking = 0
        self._asking_sure = 0
        self._twice = 0
        # The alternatives asked by a quota or sub-quota in `_twice`.
        self._shared: list[int] = []

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
        """Add alternatives, with the quotas and the sub-quotas of crossed layers that ask them."""
        asking = quotas | crossed << self._layout.quotas
        for place in ascending(conditions):
            self._having[place].append(len(self._one_of))
        self._one_of.append(_OneOf(conditions, asking))
        # Before `asking` is added: whoever is in `_asking` already asks a second time.
        self._twice |= self._asking & asking
        self._asking |= asking

    def add_folded(self, sub_quotas: tuple[tuple[int, bool], ...], quotas: int) -> None:
        """Add a layer that asks this question only, with the quotas that have it."""
        self._folded.append(_Folded(sub_quotas, quotas))

    def seal(self) -> None:
        """Precompute what does not depend on an answer; call it after everything was added."""
        self._shared = [at for at, each in enumerate(self._one_of) if each.asking & self._twice]
        self._asking_sure = all_of(each.asking for each in self._one_of if not each.conditions & self._vague)
        self._lengths = tuple({len(prefix) for prefix in self._by_prefix})

    def ruled_unanswered(self) -> int:
        """Return the sets that a missing answer rules out, packed."""
        sure = all_of(each.asking for each in self._one_of if not each.conditions & self._unanswered)
        return self._packed(sure, self._asking, 0, self._unanswered)

    def ruled(self, answer: Known) -> int:
        """Return the sets that an answer rules out, packed."""
        # Assume that the answer rules out all quotas that ask, then revive those whose alternatives it meets:
        # it meets few alternatives, and misses many.
        met = self._met(answer)
        hit = {at for place in ascending(met) for at in self._having[place]}
        revived = all_of(self._one_of[at].asking for at in hit)
        out, uncertain = without(self._asking_sure, revived), without(self._asking, revived)
        # A quota that asks twice was revived if either of its alternatives is met, but it needs both. So rule
        # it out again by the alternatives that are not met.
        for at in self._shared if revived & self._twice else ():
            if at not in hit:
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
            certain, possible = folded.fits(met, may, exactly_one=exactly_one)
            if not certain:
                uncertain_quotas |= folded.quotas
                if not possible:
                    out_quotas |= folded.quotas
        bits = self._layout.quotas
        return self._layout.packed(out_quotas, uncertain_quotas, out >> bits, uncertain >> bits)

    def _met(self, answer: Known) -> int:
        """Return the conditions that an answer meets, a bit each."""
        if isinstance(answer, frozenset):
            return all_of(self._by_id.get(one, 0) for one in answer)
        if isinstance(answer, str):
            return all_of(self._by_prefix.get(answer[:length], 0) for length in self._lengths)
        return all_of(1 << place for place, one in enumerate(self._conditions) if one.is_met_by(answer))


class _Plane(NamedTuple):
    """The sub-quotas at one position of all crossed layers that have so many.

    Attributes:
        begin: The first bit of these sub-quotas.
        layers: The layers that have this position, a bit each; always the lowest bits.
        full: The layers whose sub-quota at this position is full.
    """

    begin: int
    layers: int
    full: int


class _Crossed:
    """Layers that ask several questions and have several sub-quotas.

    The bits of the first sub-quotas of all layers come first, then those of the second sub-quotas, and so on.
    The layers are sorted by their number of sub-quotas, the most first, so that each position is one run of
    bits: layers A with three sub-quotas and B with two have, from bit 0 on, A0 B0 A1 B1 A2. A shift then brings
    the sub-quotas of a position to the bits of their layers, and the rule of a layer is applied to all layers
    at once.

    Attributes:
        places: The place in the program of each bit's sub-quota.
    """

    def __init__(self, layers: Sequence[tuple[LayerShape, int]]) -> None:
        ordered = sorted(layers, key=lambda each: -len(each[0].sub_quotas))
        self.places: list[int] = []
        self._planes: list[_Plane] = []
        self._quotas = Unions([quotas for _, quotas in ordered], _UNIONS_BYTES)
        self._all = (1 << len(ordered)) - 1
        for position in range(len(ordered[0][0].sub_quotas) if ordered else 0):
            having = [shape.sub_quotas[position] for shape, _ in ordered if len(shape.sub_quotas) > position]
            full = all_of(1 << at for at, (_, is_full) in enumerate(having) if is_full)
            self._planes.append(_Plane(len(self.places), (1 << len(having)) - 1, full))
            self.places += [place for place, _ in having]

    def ruled(self, out: int, uncertain: int, policy: MatchPolicy) -> tuple[int, int]:
        """Return the quotas that the layers rule out, and the quotas that the layers make uncertain.

        Args:
            out: Sub-quotas that are ruled out.
            uncertain: Sub-quotas that do not certainly fit.
            policy: How many sub-quotas of a layer must fit.
        """
        # What is not uncertain fits; what is not ruled out may fit. `layers` masks the bits of later positions.
        sub_quotas = (
            (without(layers, uncertain >> begin), without(layers, out >> begin), full)
            for begin, layers, full in self._planes
        )
        fits = fitting(sub_quotas, 0, exactly_one=policy.subquota_rule == "exactly_one")
        no, unsure = without(self._all, fits.possible), without(self._all, fits.certain)
        return self._quotas.of(no), self._quotas.of(unsure)


class _Sorted:
    """The layers of a program, sorted by how they are matched, each with the quotas that have it.

    Args:
        program: The program.
        having: For each layer, the set of quotas that have it.

    Attributes:
        never: Quotas with a layer that nobody can fit: it has no sub-quotas, or all of them are full.
        never_certain: Quotas with a layer that asks for nothing.
        one_of: Alternatives that rule out quotas on their own, by their places in `Program.asked`.
        folded: Layers with several sub-quotas, all of which ask one and the same question.
        crossed: All other layers.
    """

    def __init__(self, program: Program, having: Sequence[int]) -> None:
        self.never = self.never_certain = 0
        self.one_of: defaultdict[int, int] = defaultdict(int)
        self.folded: list[tuple[LayerShape, int]] = []
        self.crossed: list[tuple[LayerShape, int]] = []
        for shape, quotas in zip(program.layers, having, strict=True):
            # No garbage is made here, as in `Program`.
            put_off_a_pause()
            asked = [program.sub_quotas[sub_quota].asked for sub_quota, _ in shape.sub_quotas]
            # `all` is true for a layer without sub-quotas, too: nobody can fit it.
            if all(full for _, full in shape.sub_quotas):
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
    """A program prepared for matching one member at a time.

    Args:
        program: The inventory.
        order: Places in `program.targets`, best first; bit `n` of every set stands for the `n`th of these.

    Attributes:
        all: The set of all quotas.
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
        # Sub-quotas that ask for nothing, and so never fit for certain.
        self._crossed_vague = 0
        crossed: defaultdict[int, int] = defaultdict(int)
        for bit, sub_quota in enumerate(self._crossed.places):
            asked = program.sub_quotas[sub_quota].asked
            for place in asked:
                crossed[place] |= 1 << bit
            self._crossed_vague |= 0 if asked else 1 << bit
        # For each condition, its bit in its own question.
        bits: dict[int, int] = {}
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
        """Return the question of some alternatives, and their conditions as bits of that question."""
        asked = program.asked[place]
        question = self._questions.get(asked.question_id)
        if question is None:
            question = self._questions[asked.question_id] = _Question(self._layout, self._policy)
        for condition in asked.conditions:
            if condition not in bits:
                bits[condition] = question.add(program.conditions[condition])
        return question, all_of(bits[condition] for condition in asked.conditions)

    def match(self, profile: Profile, kinds: QuestionKinds) -> tuple[int, int]:
        """Return the quotas that a member certainly matches, and those it may match, these included.

        Raises:
            InvalidRequestError: An answer is not valid for its question, and the inventory asks this question.
        """
        # Start as if nothing was answered, then replace the sets of the questions that were.
        ruled = self._unanswered.copy()
        places, remembered = self._places, self._remembered
        for question_id, answer in profile.items():
            at = places.get(question_id)
            if at is None:
                _check_question_id(question_id)
            else:
                # The cache is by equality, and True == 1 == 1.0. Only for `int` and `str` do equal answers mean
                # the same; all others are normalized first.
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
            f"profile[{question_id!r:.40}]: question IDs must be whole numbers, not texts (JSON turns them "
            "into texts)"
        )
