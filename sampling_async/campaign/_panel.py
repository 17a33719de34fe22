"""The panel of a campaign: a file, a query or an Arrow stream, which is read twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import frozen

from sampling_async._contract.errors import InvalidRequestError
from sampling_async.campaign._earlier import stored_code
from sampling_async.matching.panel import _files as files
from sampling_async.matching.panel._arrow import MEMBER_CODE, is_null, member_codes, pa, settled
from sampling_async.matching.panel._columns import EXCLUDED, INVITES_LEFT, OTHERS, excluded, known_numbers

if TYPE_CHECKING:
    from collections.abc import Generator

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
    members: int | None = None  # None if that is not known before it is read


def source_of(
    panel: Panel,
    matcher: PanelMatcher,
    renamed: Mapping[str, str],
    extra: frozenset[str],
    if_once: frozenset[str],
) -> ReopenablePanel:
    """Check the columns of a panel, and return it. Of `if_once`, none is read that stands there twice."""
    if isinstance(panel, str | os.PathLike):
        text = os.fspath(panel)
        names = OTHERS | {INVITES_LEFT} | extra | {str(question_id) for question_id in matcher.questions}
        found = files.opened(text, names, renamed, matcher.text_columns)
        names |= {each for each in if_once if found.columns.count(each) <= 1}
        opened = partial(files.opened, text, names, renamed, matcher.text_columns)
        name = "the query" if files.is_query(text) else text
        source = ReopenablePanel(found.columns, lambda: opened().batches, name, found.members())
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
    return source


def missing_questions(source: ReopenablePanel, matcher: PanelMatcher) -> tuple[int, ...]:
    return tuple(question_id for question_id in matcher.questions if str(question_id) not in source.columns)


def _batches(stream: Any, renamed: Mapping[str, str]) -> Iterator[Any]:
    batches: Iterable[Any] = (
        pa.RecordBatchReader.from_stream(stream) if hasattr(stream, "__arrow_c_stream__") else stream
    )
    for batch in batches:
        names = [renamed.get(name, name) for name in batch.schema.names]
        yield settled(batch.rename_columns(names) if renamed else batch)


@contextmanager
def naming_panel(source: ReopenablePanel) -> Generator[None]:
    """Put the name of the panel before an error about one of its rows or columns."""
    try:
        yield
    except InvalidRequestError as exc:
        if str(exc).startswith(("row ", "column ")):
            raise InvalidRequestError(f"{source.name}: {exc}") from None
        raise


def offered_less(batch: Any, first: int, surveys: Mapping[str, set[int]], left: Mapping[str, int]) -> Any:
    """Return a part of a panel in which members are offered less, because of what they hold of earlier plans.

    By member code: `surveys` are not offered again, and `left` is how many more invites there may be. The part
    begins with row `first`.
    """
    names, codes = batch.schema.names, member_codes(batch, first).to_pylist()
    taken = [{*surveys.get(stored_code(code), ())} for code in codes]
    if EXCLUDED in names and not is_null(batch.schema.field(EXCLUDED).type):
        survey_ids, members = excluded(batch.column(EXCLUDED), first)
        for survey_id, member in zip(survey_ids.tolist(), members.tolist(), strict=True):
            taken[member].add(survey_id)
    most = [left.get(code) for code in codes]
    if INVITES_LEFT in names:
        given = known_numbers(batch.column(INVITES_LEFT), INVITES_LEFT, first)
        both = zip(most, given, strict=True)
        most = [min((each for each in pair if each is not None), default=None) for pair in both]
    lists = pa.array([sorted(each) for each in taken], pa.list_(pa.int64()))
    new = {EXCLUDED: lists, INVITES_LEFT: pa.array(most, pa.int64())}
    # By place: of the columns that matching does not need, several may have the same name.
    rest = [at for at, name in enumerate(batch.schema.names) if name not in new]
    columns = [*map(batch.column, rest), *new.values()]
    return pa.record_batch(columns, names=[*(batch.schema.names[at] for at in rest), *new])
