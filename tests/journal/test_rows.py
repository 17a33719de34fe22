"""The filter of members: it knows each of its own, and few others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sampling_async._journal.rows import MemberFilter


@given(st.sets(st.binary(max_size=12)))
def test_each_member_that_was_added_is_known(codes):
    members = MemberFilter()
    for code in codes:
        members.add(code)
    assert all(code in members for code in codes)


def test_few_others_are_taken_for_members_however_many_there_are():
    members, count = MemberFilter(), 200_000  # more than the first field has room for
    for number in range(count):
        members.add(b"m%d" % number)
    assert all(b"m%d" % number in members for number in range(0, count, 97))
    taken = sum(b"n%d" % number in members for number in range(20_000))
    assert taken < 200  # one in 100; about one in 400 is what the sizes give
    assert sum(map(len, members._fields)) < 1_000_000
