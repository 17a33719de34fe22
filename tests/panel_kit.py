"""Helpers for tests of panels: small inventories, and results of a panel and of an index."""

from __future__ import annotations

from collections import Counter
from functools import cache

from matching_kit import AGE, GENDER, MALE, panel_of, quota, row, sub_quota

from sampling_async.matching import PanelMatcher, QuestionKinds, QuotaIndex
from sampling_async.simulator import AGE_BANDS, generate_inventory, generate_members

AGES = QuestionKinds.default().with_age(AGE, AGE_BANDS)
ALL = quota(quota_id=1)
MEN = quota([sub_quota(row(GENDER, MALE))], quota_id=2)


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
