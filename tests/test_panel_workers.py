"""Several processes that match a panel."""

from __future__ import annotations

import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import time
from multiprocessing import active_children
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pyarrow as pa
import pytest
from matching_kit import (
    AGE,
)
from panel_kit import divide, generated_panel

from sampling_async import InvalidRequestError
from sampling_async.matching import (
    Counts,
    PanelMatcher,
    Sample,
    TopK,
    Workers,
)
from sampling_async.matching.panel import _workers


@pytest.fixture(scope="module")
def generated():
    return generated_panel()


class Crew:
    """The processes that were started, and the number of pieces they got."""

    def __init__(self, monkeypatch):
        self.workers, self.given = [], 0
        start, match = _workers._Worker.__init__, _workers._Worker.match

        def starts(worker):
            start(worker)
            self.workers.append(worker)

        def matches(worker, path, first):
            self.given += 1
            return match(worker, path, first)

        monkeypatch.setattr(_workers._Worker, "__init__", starts)
        monkeypatch.setattr(_workers._Worker, "match", matches)

    def awaited(self, batches):
        """Yield batches, but only some before all processes have started; one process could do them all."""
        assert len(batches) >= 10
        for number, batch in enumerate(batches):
            if number == 6:
                assert self.workers
                for worker in self.workers:
                    worker.wait_until_ready()
            yield batch


@pytest.fixture
def crew(monkeypatch):
    divide(monkeypatch, rows=40)
    yield Crew(monkeypatch)
    assert not active_children()


@pytest.mark.parametrize("output", [Counts(), TopK(5), Sample(6)], ids=lambda output: type(output).__name__)
def test_several_processes_give_the_results_of_one_in_the_same_order(generated, crew, output):
    index, panel = generated
    matcher = PanelMatcher(index, output)
    batches = panel.to_batches(max_chunksize=40)
    assert matcher.run(crew.awaited(batches), workers=3).read_all() == matcher.run(panel).read_all()
    assert len(crew.workers) == 2
    assert 1 < crew.given < len(batches)


def test_the_last_pieces_are_cut_in_halves():
    batch = pa.record_batch({"n": list(range(5))})
    pieces = [(0, batch), (5, batch), (10, batch.slice(0, 1))]
    halved = list(_workers.halved_at_the_end(pieces, 2))
    assert [(first, made["n"].to_pylist()) for first, made in halved] == [
        (0, [0, 1, 2, 3, 4]),
        (5, [0, 1, 2]),
        (8, [3, 4]),
        (10, [0]),
    ]
    assert [len(made) for _, made in _workers.halved_at_the_end(pieces[:1], 2)] == [3, 2]


def test_processes_that_start_too_late_are_not_waited_for(generated, crew):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    assert matcher.run(panel, workers=2).read_all() == matcher.run(panel).read_all()
    assert len(crew.workers) == 1


def test_a_process_that_stands_still_for_a_while_loses_nothing(generated, crew, monkeypatch):
    index, panel = generated
    monkeypatch.setattr(_workers, "_AHEAD", 2)
    matcher = PanelMatcher(index, TopK(5))
    large = pa.concat_tables([panel] * 8)

    def watched():
        for number, batch in enumerate(crew.awaited(large.to_batches(max_chunksize=40))):
            if number == 12:
                (pid,) = (child.pid for child in active_children())
                os.kill(pid, signal.SIGSTOP)
                Timer(0.2, os.kill, (pid, signal.SIGCONT)).start()
            yield batch

    assert matcher.run(watched(), workers=2).read_all() == matcher.run(large).read_all()


@pytest.mark.parametrize("rooms", [[], [1], [10**6]], ids=["of no such place", "of one page", "of many"])
def test_pieces_that_do_not_fit_in_shared_memory_go_through_other_files(
    generated, crew, monkeypatch, tmp_path, rooms
):
    index, panel = generated
    divide(monkeypatch, rows=2400)
    (tmp_path / "memory").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(_workers, "_IN_MEMORY", str(tmp_path / ("memory" if rooms else "missing")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    free = [SimpleNamespace(f_bavail=pages, f_frsize=4096) for pages in rooms]
    statvfs = os.statvfs
    monkeypatch.setattr(_workers.os, "statvfs", lambda path: free[0] if free else statvfs(path))
    matcher = PanelMatcher(index, TopK(5))
    large = pa.concat_tables([panel] * 60)  # pieces and their results are larger than a pipe
    batches = large.combine_chunks().to_batches(max_chunksize=2400)
    made = matcher.run(crew.awaited(batches), workers=2)
    some = [made.read_next_batch()]
    (used,) = tmp_path.glob("*/sampling-async-*")
    assert used.parent.name == ("memory" if rooms == [10**6] else "disk")
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    assert pa.Table.from_batches([*some, *made]) == matcher.run(large).read_all()
    assert crew.given
    assert not used.exists()


@pytest.mark.parametrize("at", [170, 210, 250, 290])
def test_an_error_is_raised_with_its_own_type_from_any_process(generated, crew, at):
    index, panel = generated
    ages = [30] * len(panel)
    ages[at] = -1
    wrong = panel.set_column(panel.column_names.index(str(AGE)), str(AGE), pa.array(ages))
    with pytest.raises(InvalidRequestError, match=rf"row {at} of the panel.*not -1"):
        PanelMatcher(index).run(crew.awaited(wrong.to_batches(max_chunksize=40)), workers=2).read_all()


@pytest.mark.usefixtures("crew")
def test_an_error_of_the_panel_is_raised_while_workers_run(generated):
    index, panel = generated

    def breaking():
        yield from panel.to_batches(max_chunksize=40)[:5]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        PanelMatcher(index).run(breaking(), workers=2).read_all()


def test_a_killed_worker_is_reported(generated, crew):
    index, panel = generated

    def murderous():
        for number, batch in enumerate(crew.awaited(panel.to_batches(max_chunksize=40))):
            if number == 7:
                for child in active_children():
                    child.kill()
            yield batch

    with pytest.raises(ChildProcessError, match=r"a process .* ended: it may have run out of memory"):
        PanelMatcher(index).run(murderous(), workers=2).read_all()


@pytest.mark.usefixtures("crew")
def test_an_unfinished_result_leaves_no_process(generated):
    index, panel = generated
    made = PanelMatcher(index, TopK(2)).run(panel, workers=2)
    assert len(made.read_next_batch()) == 40
    assert active_children()
    del made


PARENT = """
import sys, time
from itertools import cycle
from multiprocessing import active_children

from panel_kit import generated_panel
from sampling_async.matching import PanelMatcher
from sampling_async.matching.panel import _files, _workers

def match(*_):
    (child,) = active_children()
    print(child.pid, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    _files.ROWS, _workers._IN_MEMORY, _workers._Worker.match = 40, sys.argv[1], match
    index, panel = generated_panel()
    PanelMatcher(index).run(cycle(panel.to_batches(max_chunksize=40)), workers=2).read_all()
"""


def test_a_worker_ends_and_cleans_up_after_its_parent_was_killed(tmp_path):
    script, memory = tmp_path / "parent.py", tmp_path / "memory"
    script.write_text(PARENT)
    memory.mkdir()
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, str(script), str(memory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}) as parent:
        child = int(parent.stdout.readline())
        assert list(memory.iterdir())
        parent.kill()
    for _ in range(3000):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not list(memory.iterdir())


def test_a_daemon_may_start_no_processes(generated, crew, monkeypatch):
    """Such as a worker of Dask."""
    index, panel = generated
    matcher = PanelMatcher(index)
    monkeypatch.setattr(_workers, "current_process", lambda: SimpleNamespace(daemon=True))
    with pytest.raises(InvalidRequestError, match="use workers=1"):
        matcher.run(panel, workers=2).read_all()
    assert matcher.run(panel.slice(0, 100), workers=2).read_all() == matcher.run(panel.slice(0, 100)).read_all()
    assert not crew.workers


@pytest.mark.parametrize(("workers", "pieces"), [(2, 4), (4, 4), (8, 7)])
def test_a_panel_of_few_pieces_starts_no_process(generated, crew, workers, pieces):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(2))
    few, more = panel.slice(0, 40 * pieces), panel.slice(0, 40 * pieces + 1)
    assert len(matcher.run(few, workers=workers).read_all()) == len(few)
    assert not crew.workers
    assert len(matcher.run(more, workers=workers).read_all()) == len(more)
    assert len(crew.workers) == workers - 1


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_worker_that_is_stopped_or_ignores_sigterm_is_ended(generated, crew, is_idle):
    index, panel = generated
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Workers(2) as workers:
            made = PanelMatcher(index, TopK(2)).run(panel, workers=workers)
            made.read_next_batch()
            if is_idle:
                made.read_all()
            (child,) = active_children()
            os.kill(child.pid, signal.SIGSTOP)
            del made
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not active_children()


def test_kept_processes_serve_one_run_after_the_other(generated, crew):
    index, panel = generated
    batches = panel.to_batches(max_chunksize=40)
    with Workers(3) as workers:
        for output in (Counts(), TopK(5), Sample(6)):
            matcher = PanelMatcher(index, output)
            given = crew.given
            made = matcher.run(crew.awaited(batches), workers=workers).read_all()
            assert made == matcher.run(panel).read_all()
            assert crew.given > given
        assert len(crew.workers) == len(active_children()) == 2


def test_kept_processes_are_sent_the_matcher_once(generated, crew, monkeypatch):
    index, panel = generated
    sent = []
    monkeypatch.setattr(
        _workers,
        "pickle",
        SimpleNamespace(dumps=lambda match: sent.append(match) or pickle.dumps(match), loads=pickle.loads),
    )
    batches = panel.to_batches(max_chunksize=40)
    fewer = panel.drop_columns([str(AGE)])
    one, other = PanelMatcher(index, TopK(5)), PanelMatcher(index, TopK(5))
    expected, of_fewer = one.run(panel).read_all(), one.run(fewer).read_all()
    assert expected != of_fewer
    with Workers(3) as workers:

        def run(matcher, batches):
            given = crew.given
            made = matcher.run(crew.awaited(batches), workers=workers).read_all()
            assert crew.given > given
            return made

        assert run(one, batches) == run(one, batches) == expected
        assert len(sent) == 1
        # Another plan, because another column is missing; then another matcher.
        assert run(one, fewer.to_batches(max_chunksize=40)) == of_fewer
        assert len(sent) == 2
        assert run(other, batches) == expected
        assert len(sent) == 3
        assert run(other, batches) == expected
        assert len(sent) == 3


def test_kept_processes_are_waited_for(generated, crew):
    """They started too late for the first run; the next one uses them."""
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    with Workers(4) as workers:
        for _ in range(3):
            assert matcher.run(panel, workers=workers).read_all() == matcher.run(panel).read_all()
            assert len(crew.workers) == len(active_children()) == 3


def test_kept_processes_end_with_a_failed_run_and_the_next_one_starts_others(generated, crew):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    ages = pa.array([30] * 210 + [-1] * (len(panel) - 210))
    wrong = panel.set_column(panel.column_names.index(str(AGE)), str(AGE), ages)
    with Workers(2) as workers:
        for number in (1, 2):
            with pytest.raises(InvalidRequestError, match=r"of the panel: .* not -1"):
                matcher.run(crew.awaited(wrong.to_batches(max_chunksize=40)), workers=workers).read_all()
            assert not active_children()
            assert len(crew.workers) == number
        assert matcher.run(panel, workers=workers).read_all() == matcher.run(panel).read_all()


def test_a_killed_kept_process_is_replaced(generated, crew):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    with Workers(2) as workers:
        for number in (1, 2):
            assert matcher.run(panel, workers=workers).read_all() == matcher.run(panel).read_all()
            assert len(crew.workers) == number
            for child in active_children():
                child.kill()
                child.join()


def test_concurrent_runs_have_their_own_processes(generated, crew):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    expected = matcher.run(panel).read_all()
    with Workers(2) as workers:
        runs = [matcher.run(panel, workers=workers) for _ in range(3)]
        made = [[run.read_next_batch()] for run in runs]
        assert len(crew.workers) == 3
        made[0] += runs[0]
        made[1] += runs[1]
        assert len(active_children()) == 2  # the kept process, and that of the third run
    made[2] += runs[2]
    assert not active_children()
    assert [pa.Table.from_batches(some) for some in made] == [expected] * 3


def test_workers_can_be_kept_by_one_block_only():
    with Workers(2) as workers, pytest.raises(InvalidRequestError, match="kept already"), workers:
        pass
    with workers:
        pass


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2", None])
def test_the_number_of_workers_is_checked(generated, wrong):
    with pytest.raises(InvalidRequestError, match="workers must be a whole number of at least 1"):
        PanelMatcher(generated[0]).run(generated[1], workers=wrong)
