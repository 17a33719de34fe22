"""One run of `match`: a panel in a file against an inventory."""

from __future__ import annotations

import shlex
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sampling_async import InvalidRequestError
from sampling_async._cli import _match_view as view
from sampling_async._cli import _panel_files as written
from sampling_async._cli import _rendering as show
from sampling_async._cli._inventory_files import read_inventory
from sampling_async.matching import Allocate, Counts, PanelMatcher, QuotaIndex, Sample
from sampling_async.matching.panel import _files as files
from sampling_async.matching.panel._arrow import pa
from sampling_async.matching.panel._choosing import INVITES_LEFT
from sampling_async.matching.panel._columns import MEMBER_CODE, OTHERS

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from sampling_async import Quotas, Survey
    from sampling_async._cli._connection import ServiceOptions
    from sampling_async._cli._match import MatchOptions
    from sampling_async.matching.panel._files import PanelFile

_FEW: Final = 5
_OTHERS: Final = OTHERS | {INVITES_LEFT}
"""The columns that are not questions."""

_GUESSES: Final = (
    ("1001538", frozenset({"age", "alter", "years"})),
    ("1001007", frozenset({"gender", "sex"})),
    ("1001042", frozenset({"zip", "zipcode", "postal", "postalcode", "postcode", "plz"})),
    (MEMBER_CODE, frozenset({"id", "code", "member", "memberid", "membercode", "panelist", "panelistid"})),
)
"""Common names of columns, for advice in error messages. They are never used for matching."""


class MatchRun:
    """Matches a panel, and shows or writes the results.

    Args:
        service: How to call the service, if the inventory comes from there.
        panel: A file, or a query.
        options: The options of the command.
    """

    def __init__(self, service: ServiceOptions, panel: str, options: MatchOptions) -> None:
        self._service = service
        self._panel = panel
        self._options = options

    def run(self) -> None:
        """Read the inventory and the panel, match them, and show or write the results.

        Raises:
            InvalidRequestError: An option cannot be used, or the panel holds unusable data.
        """
        options = self._options
        # All options are checked before the first request and before any reading, which may take long.
        wanted, renamed = options.wanted(), options.renamed(_OTHERS)
        kinds = options.kinds(None if files.is_query(self._panel) else Path(self._panel))
        if options.output is not None:
            written.check_output(options.output, self._panel, options.inventory)
        index = QuotaIndex(self._inventory(), kinds=kinds, policy=options.policy)
        matcher = PanelMatcher(index, wanted)
        names = _OTHERS | {str(question_id) for question_id in matcher.questions}
        opened = partial(files.opened, self._panel, names, renamed, matcher.text_columns)
        source = opened()
        view.tell_oddities(index)
        self._check_columns(matcher, source)
        if options.as_requests:
            # Before the first line: what is in a pipe is being sent already.
            codes = files.opened(self._panel, frozenset({MEMBER_CODE}), renamed, matcher.text_columns)
            with self._file_named():
                must_be_distinct(codes.batches)
        if isinstance(wanted, Allocate):
            with self._file_named():
                matcher = matcher.learn(source.batches, workers=options.processes)
            source = opened()
        followed = Followed(source)
        results = iter(matcher.run(iter(followed), workers=options.processes))
        if options.as_requests:
            results = written.matching_any(results)
        with followed.progress, self._file_named():
            self._hand_out(results, matcher, followed)
        if options.output is not None:
            view.tell_written(followed.members, options.output)

    def _inventory(self) -> Quotas | tuple[Survey, ...]:
        if self._options.inventory is None:
            return self._service.call(lambda client: client.get_quotas())
        return read_inventory(self._options.inventory)

    def _hand_out(self, results: Iterator[Any], matcher: PanelMatcher, followed: Followed) -> None:
        options = self._options
        if options.output is not None:
            written.write(results, matcher.schema, options.output)
        elif show.as_lines(options.as_json):
            for line in written.lines(results, only_ascii=sys.stdout.isatty()):
                show.emit(line)
        elif isinstance(matcher.output, Counts):
            view.show_counts(results, followed)
        elif isinstance(matcher.output, Sample):
            view.show_sample(results, followed)
        else:
            view.show_best(results, followed, as_requests=options.as_requests)

    def _check_columns(self, matcher: PanelMatcher, source: PanelFile) -> None:
        """Refuse a panel without any question or without a needed member code; report other missing columns."""
        questions, columns = matcher.questions, source.columns
        missing = [str(question_id) for question_id in questions if str(question_id) not in columns]
        if missing and len(missing) == len(questions):
            raise InvalidRequestError(
                f"{self._name}: the panel has no column for any question of the inventory, such as "
                f"{missing[0]}; it has {files.named(columns)}. Name the columns: "
                f"{_advice(columns, questions) or f'--column {missing[0]}=NAME'}"
            )
        if not isinstance(matcher.output, Counts) and MEMBER_CODE not in columns:
            raise InvalidRequestError(
                f"{self._name}: the panel has no column {MEMBER_CODE!r}, which is needed to name members; it "
                f"has {files.named(columns)}. Give {_advice(columns, ()) or f'--column {MEMBER_CODE}=NAME'}"
            )
        if missing:
            view.tell_missing(missing[:_FEW], len(missing), len(questions))

    @contextmanager
    def _file_named(self) -> Generator[None]:
        """Put the name of the file before an error about one of its rows or columns."""
        try:
            yield
        except InvalidRequestError as exc:
            if str(exc).startswith(("row ", "column ", "the panel ")):
                raise InvalidRequestError(f"{self._name}: {exc}") from None
            raise

    @property
    def _name(self) -> str:
        return "the query" if files.is_query(self._panel) else self._panel


def _advice(columns: tuple[str, ...], questions: tuple[int, ...]) -> str:
    """Return `--column` options for columns with common names, for these questions and the member code."""
    asked = {MEMBER_CODE, *map(str, questions)}
    # Compared without case and punctuation: "Member_ID" becomes "memberid".
    plain = {"".join(filter(str.isalnum, column.casefold())): column for column in columns}
    guessed = [
        shlex.join(["--column", f"{question}={plain[word]}"])
        for question, words in _GUESSES
        if question in asked and question not in columns
        for word in sorted(words & plain.keys())[:1]
    ]
    return " ".join(guessed)


def must_be_distinct(batches: Iterable[Any]) -> None:
    """Refuse a panel in which two rows have the same member code: both would get requests.

    Raises:
        InvalidRequestError: The text names the row only.
    """
    codes = pa.chunked_array([batch.column(MEMBER_CODE).cast(pa.string()) for batch in batches], pa.string())
    codes_given = codes.drop_null()
    if len(codes_given.unique()) == len(codes_given):
        return
    seen: set[str] = set()
    for row, code in enumerate(codes.to_pylist()):
        if code in seen:
            raise InvalidRequestError(
                f"row {row} has the member code of an earlier row; each member must have one row"
            )
        if code is not None:
            seen.add(code)


class Followed:
    """A panel while it is read: counts members, and moves the bar.

    Attributes:
        members: How many members have been read.
        progress: The bar.
    """

    def __init__(self, source: PanelFile) -> None:
        self._batches = source.batches
        self.members = 0
        self.progress = show.progress_bar(total_known=source.members is not None, lines=True)
        self._task = self.progress.add_task("Matching", total=source.members)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.members += len(batch)
            self.progress.advance(self._task, len(batch))
            yield batch
