"""Helpers for tests of panels: small inventories, and results of a panel and of an index."""

from __future__ import annotations

from collections import Counter
from functools import cache

from matching_kit import AGE, GENDER, MALE, panel_of, quota, row, sub_quota

from sampling_async.matching import PanelMatcher, QuestionKinds, QuotaIndex
from sampling_async.matching.panel import _allocate, _files, _matcher, _sample
from sampling_async.simulator import AGE_BANDS, generate_inventory, generate_members

AGES = QuestionKinds.default().with_age(AGE, AGE_BANDS)
ALL = quota(quota_id=1)
MEN = quota([sub_quota(row(GENDER, MALE))], quota_id=2)


def divide(monkeypatch, *, rows=None, chunk=None, line_bytes=None, allocated=None, sampled=None) -> None:
    """Divide panels into small pieces, so that tests need no large ones.

    Args:
        monkeypatch: Takes the changes back.
        rows: The members of a piece.
        chunk: The members that are matched at once.
        line_bytes: The bytes that are read at once from lines of JSON.
        allocated: The members that are allocated at once.
        sampled: The members from which prices are learned.
    """
    parts = (
        (_files, "ROWS", rows),
        (_files, "_LINES_BYTES", line_bytes),
        (_matcher, "CHUNK", chunk),
        (_allocate, "_AT_ONCE", allocated),
        (_sample, "MEMBERS", sampled),
    )
    for module, name, size in parts:
        if size is not None:
            monkeypatch.setattr(module, name, size)


def counted(matcher: PanelMatcher, panel) -> dict[int, tuple[int, int]]:
    """Return the certain and possible members of each quota."""
    table = matcher.run(panel).read_all()
    return {one["quota_id"]: (one["certain"], one["possible"]) for one in table.to_pylist()}


def by_index(index: QuotaIndex, matched) -> dict[int, tuple[int, int]]:
    certain = Counter(id_ for each in matched for id_ in each.certain)
    possible = Counter(id_ for each in matched for id_ in each.possible)
    return {id_: (certain[id_], possible[id_]) for id_ in index.quota_ids}


@cache
def generated_panel():
    """Return an index of a generated inventory, and a panel of generated members."""
    index = QuotaIndex(generate_inventory(9, surveys=30), kinds=AGES)
    members = list(generate_members(9, members=400))
    panel = panel_of([each.profile for each in members], member_code=[each.member_code for each in members])
    return index, panel
