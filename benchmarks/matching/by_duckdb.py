"""Matching a panel with DuckDB: quotas as predicates of SQL, members as rows of a table; one core.

The members are first copied into a table that has only the questions of the inventory and no nulls. Postal
codes are joined with the lists that contain them. Each statement counts a hundred predicates and is prepared
once, because planning takes as long as running it on a hundred thousand members.

These variants were tried and are slower: a view instead of the table, planned each time; a query with WHERE for
each predicate; `count(*) FILTER`, `sum` of CASE or of casts; lists as bits; conditions as columns of a subquery
or of a table. Statements of fifty or two hundred predicates are equally fast.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

import duckdb
import pyarrow as pa

from matching.formulas import All, Leaf, Not, formulas, prefixes_of, uses
from matching.inventories import AGE, POSTAL

if TYPE_CHECKING:
    from matching.formulas import Formula
    from sampling_async import Quotas

_NONE: Final = -1  # means: no answer
_BITS: Final = 63
_AT_ONCE: Final = 100


class ByDuckDB:
    """An inventory, prepared for DuckDB.

    Args:
        quotas: The inventory.
        number: How many quotas of the inventory, in its order; None means all.
        at_once: How many predicates a statement counts.
    """

    def __init__(self, quotas: Quotas, number: int | None = None, *, at_once: int = _AT_ONCE) -> None:
        wanted = formulas(quotas, number)
        sums = list(dict.fromkeys(formula for each in wanted for formula in (each.certain, each.may)))
        places = {formula: at for at, formula in enumerate(sums)}
        self._places = [(each.quota_id, places[each.certain], places[each.may]) for each in wanted]
        leaves = [formula for formula in uses(sums) if isinstance(formula, Leaf)]
        self._codes = prefixes_of(leaves)
        self._db = duckdb.connect(config={"threads": 1})
        self._copy = self._prepare(leaves)
        predicates = [f"count_if({self._sql(formula)})" for formula in sums]
        batches = [predicates[at : at + at_once] for at in range(0, len(predicates), at_once)]
        for at, batch in enumerate(batches):
            self._db.execute(f"PREPARE counts_{at} AS SELECT {', '.join(batch)} FROM asked")
        self._statements = [f"EXECUTE counts_{at}" for at in range(len(batches))]

    def counts(self, table: pa.Table) -> list[tuple[int, int, int]]:
        """Return for each quota its ID, the number of certain members, and the number of possible members."""
        self._db.register("given", table)
        self._db.execute("TRUNCATE asked")
        self._db.execute(self._copy)
        self._db.unregister("given")
        rows = (self._db.execute(statement).fetchone() for statement in self._statements)
        found = list(chain.from_iterable(row or () for row in rows))
        return [(id_, found[certain], found[may] - found[certain]) for id_, certain, may in self._places]

    def _prepare(self, leaves: list[Leaf]) -> str:
        """Make the tables. Return the statement that fills the table of answers."""
        columns = {"missing BOOLEAN": f'"{POSTAL}" IS NULL'}
        for question_id in sorted({leaf.question_id for leaf in leaves} - {POSTAL}):
            columns[f"q{question_id} INTEGER"] = f'coalesce("{question_id}", {_NONE})'
        joins = "given"
        for codes in self._codes:
            name, words = f"postal_{codes.length}", codes.words(_BITS)
            lists = [pa.array(column, pa.int64()) for column in zip(*words.values(), strict=True)]
            names = [f"w{codes.length}_{at}" for at in range(len(lists))]
            self._db.register("lists", pa.table([list(words), *lists], ["code", *names]))
            self._db.execute(f"CREATE TABLE {name} AS SELECT * FROM lists")
            self._db.unregister("lists")
            joins += f' LEFT JOIN {name} ON "{POSTAL}"[:{codes.length}] = {name}.code'
            columns |= {f"{each} BIGINT": f"coalesce({each}, 0)" for each in names}
        self._db.execute(f"CREATE TABLE asked ({', '.join(columns)})")
        return f"INSERT INTO asked SELECT {', '.join(columns.values())} FROM {joins}"

    def _sql(self, formula: Formula) -> str:
        if isinstance(formula, Leaf):
            return self._postal(formula) if formula.question_id == POSTAL else _leaf(formula)
        if isinstance(formula, Not):
            return f"NOT {self._sql(formula.part)}"
        word, empty = (" AND ", "true") if isinstance(formula, All) else (" OR ", "false")
        return f"({word.join(map(self._sql, formula.parts)) or empty})"

    def _postal(self, leaf: Leaf) -> str:
        parts: list[str] = []
        for codes in self._codes:
            if prefixes := codes.of(leaf):
                at = codes.lists.index(prefixes)
                parts.append(f"(w{codes.length}_{at // _BITS} & {1 << at % _BITS}) <> 0")
        if leaf.if_missing:
            parts.append("missing")
        if leaf.if_answered:
            parts.append("NOT missing")
        return f"({' OR '.join(parts)})"


def _leaf(leaf: Leaf) -> str:
    column, values = f"q{leaf.question_id}", sorted(leaf.values) + [_NONE] * leaf.if_missing
    if len(values) == 1:
        return f"{column} = {values[0]}"
    if leaf.question_id == AGE and values[-1] - values[0] == len(values) - 1:
        return f"{column} BETWEEN {values[0]} AND {values[-1]}"
    return f"{column} IN ({', '.join(map(str, values))})"
