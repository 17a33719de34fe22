"""Matching a panel with Polars: quotas as expressions, members as rows of a frame.

For one core, set POLARS_MAX_THREADS=1 before Polars is imported.

There are four steps, and each makes columns for the next one: answers without nulls; one boolean column for
each question and list; one column for each condition that several quotas share; and for each quota two sums, or
one if nothing is uncertain. All steps are one lazy query without optimization.

These variants were tried. Running the steps one by one, Polars' optimizer and its streaming engine take a fifth
longer. A single select takes about twice as long, with or without common subexpression elimination. Series that
are combined in Python are slower for large frames, and so is a large frame in slices. For answers of a
question, `is_in` is as fast as one boolean column for each answer, or as bits, and simpler. For years of age,
columns of the limits are faster. Postal codes are looked up once, in one number for eight lists: `is_in` on
texts takes as long as all the rest.
"""

from __future__ import annotations

from collections import defaultdict
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Final

import polars as pl

from matching.formulas import FALSE, TRUE, All, Leaf, Not, formulas, prefixes_of, uses
from matching.inventories import AGE, POSTAL

if TYPE_CHECKING:
    from matching.formulas import Formula, Prefixes
    from sampling_async import Quotas

_NONE: Final = -1  # means: no answer
_BITS: Final = 8


class ByPolars:
    """An inventory, prepared for Polars.

    Args:
        quotas: The inventory.
        number: How many quotas of the inventory, in its order; None means all.
    """

    def __init__(self, quotas: Quotas, number: int | None = None) -> None:
        wanted = formulas(quotas, number)
        sums = list(dict.fromkeys(formula for each in wanted for formula in (each.certain, each.may)))
        places = {formula: at for at, formula in enumerate(sums)}
        self._places = [(each.quota_id, places[each.certain], places[each.may]) for each in wanted]
        self._uses = uses(sums)
        leaves = [formula for formula in self._uses if isinstance(formula, Leaf)]
        self._codes = prefixes_of(leaves)
        self._answers: list[pl.Expr] = []
        self._parts: dict[str, pl.Expr] = {}
        self._read(leaves)
        self._leaves = [self._leaf(leaf).alias(f"leaf {at}") for at, leaf in enumerate(leaves)]
        # The expressions made so far, and the step from which each can be used.
        self._said: dict[Formula, tuple[pl.Expr, int]] = {
            leaf: (pl.col(f"leaf {at}"), 0) for at, leaf in enumerate(leaves)
        }
        self._shared: defaultdict[int, list[pl.Expr]] = defaultdict(list)
        self._sums = [self._sum(formula).alias(f"sum {at}") for at, formula in enumerate(sums)]

    def counts(self, frame: pl.DataFrame) -> list[tuple[int, int, int]]:
        """Return for each quota its ID, the number of certain members, and the number of possible members."""
        columns = frame.lazy().select(self._answers).with_columns(**self._parts).select(self._leaves)
        for step in sorted(self._shared):
            columns = columns.with_columns(self._shared[step])
        found = columns.select(self._sums).collect(optimizations=pl.QueryOptFlags.none()).row(0)
        return [(id_, found[certain], found[may] - found[certain]) for id_, certain, may in self._places]

    def _read(self, leaves: list[Leaf]) -> None:
        """Return the columns with the answers to each question, made before any condition."""
        question_ids = {leaf.question_id for leaf in leaves}
        self._answers += [pl.col(str(each)).fill_null(_NONE) for each in question_ids - {POSTAL}]
        postal = pl.col(str(POSTAL))
        if POSTAL in question_ids:
            self._answers.append(postal.is_null().alias("missing"))
        for codes in self._codes:
            words = codes.words(_BITS)
            place = postal.str.head(codes.length).cast(pl.Enum(list(words)), strict=False).to_physical()
            self._answers.append((place.cast(pl.UInt32) + 1).fill_null(0).alias(f"places {codes.length}"))
            for at, column in enumerate(zip(*words.values(), strict=True)):
                table = pl.lit(pl.Series([0, *column], dtype=pl.UInt8))
                self._parts[f"words {codes.length} {at}"] = table.gather(pl.col(f"places {codes.length}"))

    def _leaf(self, leaf: Leaf) -> pl.Expr:
        if leaf.question_id == POSTAL:
            return self._postal(leaf)
        answer = pl.col(str(leaf.question_id))
        values = sorted(leaf.values) + [_NONE] * leaf.if_missing
        if len(values) == 1:
            return answer == values[0]
        if leaf.question_id == AGE and values[-1] - values[0] == len(values) - 1:
            # Many ranges begin or end at the same year.
            self._parts[f"from {values[0]}"] = answer >= values[0]
            self._parts[f"to {values[-1]}"] = answer <= values[-1]
            return pl.col(f"from {values[0]}") & pl.col(f"to {values[-1]}")
        return answer.is_in(values)

    def _postal(self, leaf: Leaf) -> pl.Expr:
        parts = [self._listed(codes, codes.of(leaf)) for codes in self._codes if codes.of(leaf)]
        if leaf.if_missing:
            parts.append(pl.col("missing"))
        if leaf.if_answered:
            parts.append(~pl.col("missing"))
        return reduce(or_, parts)

    def _listed(self, codes: Prefixes, prefixes: frozenset[str]) -> pl.Expr:
        at = codes.lists.index(prefixes)
        bit, none = (pl.lit(number, dtype=pl.UInt8) for number in (1 << at % _BITS, 0))
        return (pl.col(f"words {codes.length} {at // _BITS}") & bit) != none

    def _sum(self, formula: Formula) -> pl.Expr:
        if formula in (TRUE, FALSE):
            return pl.len() if formula == TRUE else pl.lit(0)
        return self._say(formula)[0].sum()

    def _say(self, formula: Formula) -> tuple[pl.Expr, int]:
        """Return a formula as an expression, and the step that it can be used from."""
        if formula in self._said:
            return self._said[formula]
        if isinstance(formula, Not):
            said, step = self._say(formula.part)
            said = ~said
        else:
            parts = [self._say(part) for part in formula.parts]
            said = reduce(and_ if isinstance(formula, All) else or_, (part for part, _ in parts))
            step = max(each for _, each in parts)
        if self._uses[formula] == 1:
            return said, step
        name = f"shared {len(self._said)}"
        self._shared[step].append(said.alias(name))
        self._said[formula] = pl.col(name), step + 1
        return self._said[formula]
