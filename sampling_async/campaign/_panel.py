"""The panel of a campaign: a file, a query or an Arrow stream, which is read twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import frozen

from sampling_async._contract.errors import InvalidRequestError
from sampling_async.matching.panel import _files as files
from sampling_async.matching.panel._arrow import pa
from sampling_async.matching.panel._columns import EXCLUDED, MEMBER_CODE, OTHERS
from sampling_async.matching.panel._prices import INVITES_LEFT

if TYPE_CHECKING:
    from sampling_async.matching import PanelMatcher

Panel: TypeAlias = "str | os.PathLike[str] | Callable[[], Any] | Any"
"""A file (.parquet, .csv, .jsonl, .ndjson), a DuckDB query, an Arrow table or data frame, or a function that
opens an Arrow stream anew each time it is called."""


@frozen
class ReopenablePanel:
    """A panel that can be opened several times."""

    columns: tuple[str, ...]
    opened: Callable[[], Iterator[Any]]  # returns its batches, from the first one on
    name: str  # what to call it in messages


def source_of(
    panel: Panel, matcher: PanelMatcher, renamed: Mapping[str, str], extra: frozenset[str]
) -> ReopenablePanel:
    """Return a panel, after a look at its columns."""
    if isinstance(panel, str | os.PathLike):
        text = os.fspath(panel)
        names = OTHERS | {INVITES_LEFT} | extra | {str(question_id) for question_id in matcher.questions}
        opened = partial(files.opened, text, names, renamed, matcher.text_columns)
        name = "the query" if files.is_query(text) else text
        source = ReopenablePanel(opened().columns, lambda: opened().batches, name)
    else:
        given = panel if callable(panel) else lambda: panel
        if not callable(panel) and (
            not hasattr(panel, "__arrow_c_stream__") or isinstance(panel, pa.RecordBatchReader)
        ):
            raise InvalidRequestError(
                "a campaign reads its panel twice, so it must be a file, a query, a table or data frame, or a "
                f"function that opens it anew; this is a {type(panel).__name__}"
            )
        first = _batches(given(), renamed)
        try:
            columns = tuple(next(first).schema.names)
        except StopIteration:
            columns = ()
        source = ReopenablePanel(columns, lambda: _batches(given(), renamed), "the panel")
    _check(source, matcher)
    return source


def missing_questions(source: ReopenablePanel, matcher: PanelMatcher) -> tuple[int, ...]:
    """Return the questions of the inventory that the panel has no column for."""
    return tuple(question_id for question_id in matcher.questions if str(question_id) not in source.columns)


def _check(source: ReopenablePanel, matcher: PanelMatcher) -> None:
    if not source.columns:
        raise InvalidRequestError(f"{source.name} has no members")
    has, questions = f"it has {files.named(source.columns)}", matcher.questions
    if MEMBER_CODE not in source.columns:
        raise InvalidRequestError(
            f"{source.name} has no column {MEMBER_CODE!r}; {has}. Name the column that holds the codes: "
            f"columns={{'its name': {MEMBER_CODE!r}}}, or --column {MEMBER_CODE}=NAME"
        )
    if questions and len(missing_questions(source, matcher)) == len(questions):
        raise InvalidRequestError(
            f"{source.name} has no column for any question of the inventory, such as {questions[0]}; {has}. "
            f"Name the columns that hold answers: columns={{'its name': '{questions[0]}'}}, or --column "
            f"{questions[0]}=NAME"
        )


def _batches(stream: Any, renamed: Mapping[str, str]) -> Iterator[Any]:
    batches: Iterable[Any] = (
        pa.RecordBatchReader.from_stream(stream) if hasattr(stream, "__arrow_c_stream__") else stream
    )
    for batch in batches:
        names = [renamed.get(name, name) for name in batch.schema.names]
        yield batch.rename_columns(names) if renamed else batch


@frozen
class Held:
    """What members hold of earlier plans."""

    surveys: Mapping[str, set[int]]  # the surveys that each member must not be offered again, by member code
    left: Mapping[str, int]  # how many more invites a member may get, by member code; the others may get all


def excluding(batches: Iterable[Any], held: Held) -> Iterator[Any]:
    """Yield a panel in which members are offered less, because of what they hold."""
    for batch in batches:
        codes = [str(code) for code in batch.column(batch.schema.names.index(MEMBER_CODE)).to_pylist()]
        yield _with_fewer_invites(_with_exclusions(batch, codes, held), codes, held)


def _with_fewer_invites(batch: Any, codes: list[str], held: Held) -> Any:
    given = (
        batch.column(INVITES_LEFT).to_pylist() if INVITES_LEFT in batch.schema.names else [None] * len(codes)
    )
    left = [_least(left, held.left.get(code)) for left, code in zip(given, codes, strict=True)]
    rest = [name for name in batch.schema.names if name != INVITES_LEFT]
    columns = [*(batch.column(name) for name in rest), pa.array(left, pa.int64())]
    return pa.record_batch(columns, names=[*rest, INVITES_LEFT])


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _with_exclusions(batch: Any, codes: list[str], held: Held) -> Any:
    more = [held.surveys.get(code, ()) for code in codes]
    names = batch.schema.names
    if EXCLUDED in names:
        at = names.index(EXCLUDED)
        before = batch.column(at).to_pylist()
        more = [{*(had or ()), *new} for had, new in zip(before, more, strict=True)]
        batch = batch.select([name for name in names if name != EXCLUDED])
    lists = pa.array([sorted(new) for new in more], pa.list_(pa.int64()))
    return pa.record_batch([*batch.columns, lists], names=[*batch.schema.names, EXCLUDED])
