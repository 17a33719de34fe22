"""Changes of a watched inventory: what is applied, merged, and in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from panel_kit import A, B, quota, sub_quota, survey
from watch_kit import FakeService, HandClock, inventory, one, settle, watch_of

from sampling_async import Change, Price, Survey, SurveyWaveExclusion
from sampling_async._watch.changes import SYNCED, applied, differences, key_of
from sampling_async._watch.reader import Board, QuotaChanges

if TYPE_CHECKING:
    from collections.abc import Iterable


def short(change: Change) -> tuple[object, ...]:
    about = change.survey_id if change.quota_id is None else change.quota_id
    values = (change.before, change.after)
    return change.kind, about, *(value for value in values if isinstance(value, int | Price))


async def read_all(changes: QuotaChanges) -> list[Change]:
    """Read what can be read without waiting."""
    found: list[Change] = []
    with anyio.move_on_after(60) as scope:
        while True:
            with anyio.CancelScope() as waiting:
                # If the reader has to wait, nothing comes within so many turns.
                async with anyio.create_task_group() as tasks:

                    async def read() -> None:
                        found.append(await anext(changes))
                        tasks.cancel_scope.cancel()

                    tasks.start_soon(read)
                    before = len(found)
                    await settle(20)
                    tasks.cancel_scope.cancel()
                if len(found) == before:
                    return found
            assert not waiting.cancelled_caught
    raise AssertionError(scope)


async def test_the_first_inventory_comes_as_opened_and_synced():
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch:
        async with watch.changes() as changes:
            found = [await anext(changes) for _ in range(5)]
        assert [short(each) for each in found] == [
            ("survey_opened", 100),
            ("quota_opened", 1),
            ("survey_opened", 200),
            ("quota_opened", 2),
            ("synced", 0),
        ]
        assert (found[0].before, found[0].after) == (None, one(1))
        assert found[1].after == one(1).quotas[0]
        assert found[1].wave_id == 1
        async with watch.changes() as changes:  # a later reader begins anew
            assert (await anext(changes)).kind == "survey_opened"


async def test_each_kind_of_change():
    before = survey(quota([sub_quota(A)], quota_id=1), quota([sub_quota(A)], quota_id=2), survey_id=3)
    (first, second) = before.quotas
    counted = evolve(second.layers[0], sub_quotas=(sub_quota(A, full=True),))
    steps: list[tuple[Survey | None, list[tuple[object, ...]]]] = [
        (evolve(before, price=Price(2.0, 1)), [("price", 3, Price(1.0, 1), Price(2.0, 1))]),
        (evolve(before, loi=20), [("loi", 3, 10, 20)]),
        (evolve(before, ir=1), [("ir", 3, 30, 1)]),
        (evolve(before, estimated_completes_remaining=9), [("remaining", 3, 5, 9)]),
        (evolve(before, device_type_ids=(1,)), [("targeting", 3)]),
        (evolve(before, survey_wave_exclusions=(SurveyWaveExclusion(1, 0),)), [("targeting", 3)]),
        (evolve(before, survey_name="New"), [("details", 3)]),
        (evolve(before, quotas=(first,)), [("quota_closed", 2)]),
        (evolve(before, quotas=(*before.quotas, quota(quota_id=9))), [("quota_opened", 9)]),
        (
            evolve(before, quotas=(evolve(first, estimated_completes_remaining=1), second)),
            [("remaining", 1, 5, 1)],
        ),
        (evolve(before, quotas=(quota([sub_quota(B)], quota_id=1), second)), [("targeting", 1)]),
        (evolve(before, quotas=(first, evolve(second, layers=(counted,)))), [("details", 2)]),
        (evolve(before, quotas=(first, evolve(second, completes_required=1))), [("details", 2)]),
        (
            evolve(before, quotas=(first, evolve(quota([sub_quota(B)], quota_id=2), completes_required=1))),
            [("targeting", 2), ("details", 2)],
        ),
        (evolve(before, quotas=(second, first)), []),
        (None, [("quota_closed", 1), ("quota_closed", 2), ("survey_closed", 3)]),
        (before, []),
    ]
    for after, expected in steps:
        changes = list(differences((3, 1), before, after))
        assert [short(each) for each in changes] == expected
        assert {(each.survey_id, each.wave_id) for each in changes} <= {(3, 1)}
        known: Survey | None = before
        for change in changes:
            known = applied(known, change)
        assert ordered(known) == ordered(after)
    assert list(differences((3, 1), None, None)) == []


def ordered(known: Survey | None) -> Survey | None:
    if known is None:
        return None
    return evolve(known, quotas=tuple(sorted(known.quotas, key=lambda each: each.quota_id)))


async def test_unread_changes_are_merged():
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch, watch.changes() as changes:
        await watch.ready()
        await read_all(changes)
        for prices in ([2.0, 3.0], [5.0, 3.0]):
            for price in prices:
                service.inventory = inventory(1, 2, price=Price(price, 1))
                await watch.refresh()
            service.inventory = inventory(1, 2, 3, price=Price(price, 1))  # opens
            await watch.refresh()
            watch.close_quota(3)  # and closes
            found = [short(each) for each in await read_all(changes)]
            if prices[0] == 2.0:
                expected = ("price", 100, Price(1.0, 1), Price(3.0, 1))
                assert found == [expected, ("price", 200, *expected[2:])]
            else:
                assert found == []  # 3, 5, 3


async def test_a_closing_is_reported_at_once():
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch, watch.changes() as changes:
        await watch.ready()
        await read_all(changes)
        found: list[Change] = []

        async def read() -> None:
            found.append(await anext(changes))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await settle()
            assert not found
            watch.close_quota(1)
        assert short(found[0]) == ("quota_closed", 1)
        assert [short(each) for each in await read_all(changes)] == [("survey_closed", 100)]


async def test_what_changes_between_two_reads_of_one_survey_is_reported_as_it_is_now():
    board = Board()
    two = survey(quota(quota_id=1), quota(quota_id=2), quota(quota_id=3), survey_id=3)
    board.view = {(3, 1): two}
    async with QuotaChanges(board) as changes:
        assert short(await anext(changes)) == ("survey_opened", 3)
        assert short(await anext(changes)) == ("quota_opened", 1)
        board.view = {(3, 1): evolve(two, loi=99, quotas=two.quotas[1:2])}
        board.moved([(3, 1)])
        found = [short(each) for each in await read_all(changes)]
        assert found == [("loi", 3, 10, 99), ("quota_closed", 1), ("quota_opened", 2), ("synced", 0)]
        board.view = {(3, 1): evolve(two, loi=1, ir=1)}
        board.moved([(3, 1)])
        await anext(changes)
        board.view = {}
        board.moved([(3, 1)])
        assert [short(each) for each in await read_all(changes)] == [("quota_closed", 2), ("survey_closed", 3)]


async def test_the_loop_ends_when_the_watch_is_left():
    clock, service = HandClock(), FakeService(inventory(1))
    kinds: list[str] = []

    async def read(changes: QuotaChanges) -> None:
        async with changes:
            kinds.extend([change.kind async for change in changes])

    async with anyio.create_task_group() as readers:
        async with watch_of(service, clock) as watch:
            readers.start_soon(read, watch.changes())
            late = watch.changes()
            await late.__aenter__()
            await watch.ready()
            await settle()
    assert kinds == ["survey_opened", "quota_opened", "synced"]
    assert [change.kind async for change in late] == kinds


async def test_an_unexpected_error_is_raised_to_readers():
    clock, service = HandClock(), FakeService(inventory(1))
    with pytest.raises(ZeroDivisionError):
        async with watch_of(service, clock) as watch, watch.changes() as changes:
            await watch.ready()
            service.error = ZeroDivisionError("oops")
            await clock.advance(60)
            with pytest.raises(RuntimeError, match="ended by ZeroDivisionError"):
                async for _ in changes:
                    pass


async def test_changes_are_read_inside_their_block():
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        changes = watch.changes()
        with pytest.raises(RuntimeError, match="inside their block"):
            await anext(changes)
        async with changes:
            await anext(changes)
            with pytest.raises(RuntimeError, match="entered once"):
                await changes.__aenter__()
        with pytest.raises(RuntimeError, match="inside their block"):
            await anext(changes)


async def test_a_reader_that_is_cancelled_loses_nothing():
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch, watch.changes() as changes:
        await watch.ready()
        await read_all(changes)
        with anyio.move_on_after(0.01):
            await anext(changes)
        service.inventory = inventory(1, 2)
        await watch.refresh()
        assert [short(each) for each in await read_all(changes)] == [
            ("survey_opened", 200),
            ("quota_opened", 2),
        ]


async def test_two_tasks_may_wait_for_the_same_changes():
    clock, service, found = HandClock(), FakeService(inventory(1)), []
    async with watch_of(service, clock) as watch, watch.changes() as changes:
        await watch.ready()
        await read_all(changes)

        async def read() -> None:
            found.append(short(await anext(changes)))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                tasks.start_soon(read)
                await settle()
                service.inventory = inventory(1, 2)
                await watch.refresh()
    assert found == [("survey_opened", 200), ("quota_opened", 2)]


async def test_what_comes_and_goes_unread_takes_no_memory():
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch, watch.changes() as changes:
        await watch.ready()
        await read_all(changes)
        for number in range(2, 50):
            service.inventory = inventory(number)
            await watch.refresh()
        assert len(changes._due) == 2
        assert [short(each) for each in await read_all(changes)] == [
            ("quota_closed", 1),
            ("survey_closed", 100),
            ("survey_opened", 4900),
            ("quota_opened", 49),
        ]


async def test_a_large_inventory_is_read_in_turns():
    clock, service = HandClock(), FakeService(inventory(*range(1, 3001)))
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while True:
            await anyio.lowlevel.checkpoint()
            rounds += 1

    async with (
        watch_of(service, clock) as watch,
        watch.changes() as changes,
        anyio.create_task_group() as tasks,
    ):
        await watch.ready()
        tasks.start_soon(count)
        kinds = 0
        async for change in changes:
            if change.kind == "synced":
                break
            kinds += 1
        tasks.cancel_scope.cancel()
    assert kinds == 6000
    assert rounds > 0


# --- Any sequence of inventories, read by any reader


@st.composite
def states(draw) -> list[dict[int, Survey]]:
    found: list[dict[int, Survey]] = []
    for _ in range(draw(st.integers(1, 6))):
        ids = draw(st.sets(st.integers(1, 3), max_size=3))
        found.append(
            {
                id_: survey(
                    *(
                        quota([sub_quota(draw(st.sampled_from((A, B))), full=draw(st.booleans()))], **fields)
                        for fields in draw(
                            st.lists(
                                st.builds(
                                    lambda at, left: {"quota_id": 10 * id_ + at, "remaining": left},  # noqa: B023
                                    st.integers(1, 3),
                                    st.integers(1, 2),
                                ),
                                max_size=3,
                                unique_by=lambda fields: fields["quota_id"],
                            )
                        )
                    ),
                    survey_id=id_,
                    loi=draw(st.integers(1, 2)),
                    price=Price(draw(st.sampled_from((1.0, 2.0))), 1),
                )
                for id_ in ids
            }
        )
    return found


class Model:
    """What a reader knows who applies the changes one by one, written without the code under test."""

    def __init__(self) -> None:
        self.surveys: dict[int, dict[str, object]] = {}
        self.quotas: dict[int, dict[str, object]] = {}

    def apply(self, change: Change) -> None:
        if change.kind == "synced":
            return
        table = self.surveys if change.quota_id is None else self.quotas
        about = change.survey_id if change.quota_id is None else change.quota_id
        if change.kind.endswith("opened"):
            assert about not in table
            table[about] = facts(change.after)
        elif change.kind.endswith("closed"):
            del table[about]
        elif change.kind in {"targeting", "details"}:
            fresh = facts(change.after)
            names = {"targeting": ["layers"], "details": ["layers", "required"]}[change.kind]
            table[about].update({name: fresh[name] for name in names})
        else:
            assert table[about][change.kind] == change.before
            table[about][change.kind] = change.after


def facts(record: object) -> dict[str, object]:
    if isinstance(record, Survey):
        return {"loi": record.loi, "price": record.price, "remaining": record.estimated_completes_remaining}
    return {
        "remaining": record.estimated_completes_remaining,
        "layers": record.layers,
        "required": record.completes_required,
    }


def truth(surveys: Iterable[Survey]) -> tuple[object, object]:
    listed = list(surveys)
    return (
        {each.survey_id: facts(each) for each in listed},
        {each.quota_id: facts(each) for one_ in listed for each in one_.quotas},
    )


@given(states(), st.data())
async def test_a_slow_reader_always_ends_at_the_truth(sequence, data):
    board = Board()
    model = Model()
    async with QuotaChanges(board) as changes:
        for state in sequence:
            old = board.view or {}
            board.view = {key_of(each): each for each in state.values()}
            board.moved([key for key in {**old, **board.view} if old.get(key) != board.view.get(key)])
            for _ in range(data.draw(st.integers(0, 4))):
                if changes._due or changes._batch:
                    model.apply(await one_or_synced(changes))
        while changes._due or changes._batch:
            model.apply(await one_or_synced(changes))
        assert truth(board.view.values()) == (model.surveys, model.quotas)


async def one_or_synced(changes: QuotaChanges) -> Change:
    """Read one change. If what was due is nothing new, the reader would wait, so the board is over then."""
    changes._board.is_over = True
    try:
        return await anext(changes)
    except StopAsyncIteration:
        return SYNCED
    finally:
        changes._board.is_over = False


async def test_a_survey_that_comes_and_goes_before_it_is_due_changes_nothing():
    board = Board()
    board.view = {}
    async with QuotaChanges(board) as changes:
        board.moved([(3, 1)])
        assert await read_all(changes) == [SYNCED]


async def test_a_survey_that_became_another_object_is_still_known():
    board = Board()
    board.view = {(3, 1): survey(quota(quota_id=1), survey_id=3)}
    async with QuotaChanges(board) as changes:
        await read_all(changes)
        board.view = {(3, 1): survey(quota(quota_id=1), survey_id=3)}
        board.moved([(3, 1)])
        assert await read_all(changes) == []
        board.view = {(3, 1): survey(quota(quota_id=1), survey_id=3, price=Price(2.0, 1))}
        board.moved([(3, 1)])
        assert [short(each)[0] for each in await read_all(changes)] == ["price"]


async def test_a_survey_that_goes_while_it_is_read_is_reported_as_closed_and_forgotten():
    board = Board()
    board.view = {(3, 1): survey(quota(quota_id=1), survey_id=3)}
    async with QuotaChanges(board) as changes:
        assert (await anext(changes)).kind == "survey_opened"
        board.view = {}
        board.moved([(3, 1)])
        assert [each if each is SYNCED else each.kind for each in await read_all(changes)] == [
            "survey_closed",
            SYNCED,
        ]
        changes._knows((3, 1), None)  # it is forgotten already


async def test_a_reader_that_was_left_gets_no_more_and_misuse_is_described_in_full():
    board = Board()
    board.view = {}
    changes = QuotaChanges(board)
    async with changes:
        assert list(board._listeners) == [changes]
        with pytest.raises(RuntimeError, match=r"^a reader of changes is entered once; make another one$"):
            await changes.__aenter__()
    assert board._listeners == {}
    board.remove(changes)  # it may be left twice
    with pytest.raises(
        RuntimeError, match=r"^read changes inside their block: async with watch\.changes\(\) as"
    ):
        await anext(changes)


def test_what_opens_and_closes_is_reported_with_its_survey_its_wave_and_the_whole_of_it():
    one_quota = survey(quota(quota_id=1), survey_id=3, wave_id=7)
    opened = differences((3, 7), None, one_quota)
    closed = differences((3, 7), one_quota, None)
    assert [
        (each.kind, each.survey_id, each.wave_id, each.before, each.after) for each in (*opened, *closed)
    ] == [
        ("survey_opened", 3, 7, None, one_quota),
        ("quota_opened", 3, 7, None, one_quota.quotas[0]),
        ("quota_closed", 3, 7, one_quota.quotas[0], None),
        ("survey_closed", 3, 7, one_quota, None),
    ]
