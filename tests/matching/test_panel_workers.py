"""Several processes that match a panel."""

from __future__ import annotations

import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
from collections import deque
from multiprocessing import Pipe, active_children, get_context
from threading import Lock, Thread, Timer
from types import SimpleNamespace

import pyarrow as pa
import pytest
from panel_kit import (
    AGE,
    generated_panel,
)

from sampling_async import InvalidRequestError
from sampling_async.matching import (
    Counts,
    PanelMatcher,
    Sample,
    TopK,
    Workers,
)
from sampling_async.matching.panel import (
    _files,
    _worker,
    _workers,
)
from sampling_async.simulator import Simulator


@pytest.fixture(scope="module")
def generated():
    return generated_panel()


class Crew:
    """The processes that were started, and the number of members they got."""

    def __init__(self, monkeypatch):
        self.workers, self.given = [], 0
        begin, give = _worker.Worker.__init__, _worker.Worker.give

        def begins(worker, *of):
            begin(worker, *of)
            self.workers.append(worker)

        def gives(worker, number, piece):
            give(worker, number, piece)
            self.given += len(piece[1])

        monkeypatch.setattr(_worker.Worker, "__init__", begins)
        monkeypatch.setattr(_worker.Worker, "give", gives)

    def awaited(self, batches):
        """Yield batches, but only some before all processes have started; one process could do them all."""
        assert len(batches) >= 10
        for number, batch in enumerate(batches):
            if number == 6:
                assert self.workers
                there = [each for each in self.workers if not each.connection.closed]
                assert all(worker.is_ready or worker.connection.poll(60) for worker in there)
            yield batch


@pytest.fixture
def crew(monkeypatch):
    monkeypatch.setattr(_files, "ROWS", 40)
    yield Crew(monkeypatch)
    assert not active_children()


@pytest.mark.parametrize("output", [Counts(), TopK(5), Sample(6)], ids=lambda output: type(output).__name__)
def test_several_processes_give_the_results_of_one_in_the_same_order(generated, crew, output):
    index, panel = generated
    matcher = PanelMatcher(index, output)
    batches = panel.to_batches(max_chunksize=40)
    assert matcher.run(crew.awaited(batches), workers=3).read_all() == matcher.run(panel).read_all()
    assert len(crew.workers) == 2
    assert 40 < crew.given < len(panel)


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


class Quick:
    """A worker that has finished all its pieces whenever it is looked at."""

    is_ready = True

    def __init__(self):
        self.connection, self._theirs = Pipe()
        self.pieces = deque()
        self.had = []

    @property
    def has_room(self):
        return len(self.pieces) < 2

    def give(self, number, piece):
        self.pieces.append(number)
        self.had.append(number)
        self._theirs.send(("done", []))

    def receive(self):
        return self.connection.recv()

    def finish(self):
        pass


def test_a_process_that_has_finished_two_pieces_gets_two():
    worker = Quick()
    lead = _workers._Distribution([worker], iter([(0, None)] * 9))
    for given in (2, 4, 6):
        lead._receive_messages(0)
        assert worker.had == list(range(given))


def test_a_piece_larger_than_all_before_has_another_file(tmp_path):
    file = _worker._File(tmp_path / "0")
    paths = []
    for rows in (10, 1000, 5, 20_000, 20_000):
        file.write(pa.record_batch({"n": list(range(rows))}))
        assert list(tmp_path.iterdir()) == [file.path]
        with pa.memory_map(str(file.path)) as mapped:
            assert pa.ipc.open_stream(mapped).read_next_batch().num_rows == rows
        paths.append(file.path)
    file.close()
    assert len(set(paths)) == 3
    assert max(len(path.name) for path in paths) < 12


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
                pid = crew.workers[0]._process.pid
                os.kill(pid, signal.SIGSTOP)
                Timer(0.2, os.kill, (pid, signal.SIGCONT)).start()
            yield batch

    assert matcher.run(watched(), workers=2).read_all() == matcher.run(large).read_all()


class Slow(Quick):
    """A worker that finishes a piece only when it is waited for."""

    def give(self, number, piece):
        self.pieces.append(number)

    def receive(self):
        return ("done", [self.pieces[0]]) if self.pieces else ("end", [])

    def leave(self):
        pass


def test_pieces_far_ahead_of_an_unfinished_one_wait(monkeypatch):
    worker = Slow()
    read, ahead = [], []

    def wait(connections, seconds):
        if seconds == 0:
            return []
        if worker.pieces:
            ahead.append(read[-1] - worker.pieces[0])
        return connections

    def pieces():
        for number in range(40):
            read.append(number)
            yield number, number

    monkeypatch.setattr(_workers, "wait", wait)
    lead = _workers._Distribution([worker], pieces())
    made = lead.matched(lambda own: (piece for _, piece in own), lambda: False)
    assert [piece for _, piece in made] == list(range(40))
    assert max(ahead) == 2 * _workers._AHEAD


@pytest.mark.parametrize("rooms", [[], [1], [10**6]], ids=["of no such place", "of one page", "of many"])
def test_pieces_that_do_not_fit_in_shared_memory_go_through_other_files(
    generated, crew, monkeypatch, tmp_path, rooms
):
    index, panel = generated
    monkeypatch.setattr(_files, "ROWS", 2400)
    (tmp_path / "memory").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(_worker, "_IN_MEMORY", str(tmp_path / ("memory" if rooms else "missing")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    free = [SimpleNamespace(f_bavail=pages, f_frsize=4096) for pages in rooms]
    statvfs = os.statvfs
    monkeypatch.setattr(_worker.os, "statvfs", lambda path: free[0] if free else statvfs(path))
    matcher = PanelMatcher(index, TopK(5))
    large = pa.concat_tables([panel] * 60)  # pieces and their results are larger than a pipe
    batches = large.combine_chunks().to_batches(max_chunksize=2400)
    made = matcher.run(crew.awaited(batches), workers=2)
    some = [made.read_next_batch()]
    (used,) = tmp_path.glob("*/*")
    assert used.parent.name == ("memory" if rooms == [10**6] else "disk")
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    assert pa.Table.from_batches([*some, *made]) == matcher.run(large).read_all()
    assert crew.given
    assert not used.exists()


def test_a_worker_cleans_up_after_its_parent_is_gone(generated, tmp_path, monkeypatch):
    index, _ = generated
    monkeypatch.setattr(_worker, "_IN_MEMORY", str(tmp_path))
    (tmp_path / "work").write_bytes(pickle.dumps(PanelMatcher(index)._matched))
    (tmp_path / "3").write_bytes(b"a piece")
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=_worker._work, args=(theirs,))
    process.start()
    theirs.close()
    ours.send(tmp_path)
    ours.send(tmp_path / "work")
    assert ours.poll(60)
    ours.close()
    process.join(60)
    assert process.exitcode == 0
    assert not tmp_path.exists()


@pytest.mark.parametrize("at", [170, 210, 250, 290])
def test_an_error_is_raised_with_its_own_type_from_any_process(generated, crew, at):
    index, panel = generated
    ages = [30] * len(panel)
    ages[at] = -1
    wrong = panel.set_column(panel.column_names.index(str(AGE)), str(AGE), pa.array(ages))
    with pytest.raises(InvalidRequestError, match=rf"row {at} of the panel.*not -1"):
        PanelMatcher(index).run(crew.awaited(wrong.to_batches(max_chunksize=40)), workers=2).read_all()


class TwoArguments(Exception):  # noqa: N818  it is pickled with its one text, and two arguments make it
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class WithLock(Exception):  # noqa: N818
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = Lock()


def fail_with_two_arguments(_pieces):
    raise TwoArguments("this", "that")


def fail_with_a_lock(_pieces):
    raise WithLock("locked")


@pytest.mark.parametrize(
    ("fail", "text"),
    [(fail_with_two_arguments, "TwoArguments: this and that"), (fail_with_a_lock, "WithLock: locked")],
)
def test_an_error_that_cannot_be_pickled_is_told_with_its_type_and_text(tmp_path, monkeypatch, fail, text):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / _worker._WORK).write_bytes(pickle.dumps(fail))
    ours, theirs = Pipe()
    received = []

    def parent():
        ours.send(tmp_path)
        ours.send(tmp_path / _worker._WORK)
        received.append(ours.recv())
        ours.close()

    thread = Thread(target=parent)
    thread.start()
    _worker._work(theirs)
    thread.join()
    theirs.close()
    [(kind, error)] = received
    assert kind == "error"
    # tblib, which dask.distributed imports, lets all exceptions of a process be pickled.
    if not (isinstance(error, TwoArguments) and "tblib" in sys.modules):
        assert str(error) == f"a process that matched the panel failed: {text}"


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

    with pytest.raises(ChildProcessError, match="ended with exit code -9"):
        PanelMatcher(index).run(murderous(), workers=2).read_all()


@pytest.mark.usefixtures("crew")
def test_an_unfinished_result_leaves_no_process(generated):
    index, panel = generated
    made = PanelMatcher(index, TopK(2))._matched_by(Workers(2), panel.to_batches())
    assert len(next(made)) == 40
    assert active_children()
    made.close()


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
            os.kill(crew.workers[0]._process.pid, signal.SIGSTOP)
            del made
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not active_children()


def test_a_run_may_be_ended_by_a_garbage_collection(generated, crew, monkeypatch):
    """While processes of one run are put back, the processes of an abandoned run are too."""
    index, panel = generated
    workers = Workers(2)
    unread = workers._taking_part(1)

    class Collecting(list):
        def append(self, worker):
            nonlocal unread
            super().append(worker)
            if unread is not None:
                ended, unread = unread, None
                ended.__exit__(None, None, None)

    with workers:
        (done,) = unread.__enter__()
        monkeypatch.setattr(workers, "_idle", Collecting())
        made = PanelMatcher(index, TopK(2)).run(panel, workers=workers)
        made.read_next_batch()
        done.leave()
        made.read_all()
        assert unread is None
        assert len(active_children()) == 1  # one process is kept


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


def test_kept_processes_have_new_files_if_somebody_removed_theirs(generated, crew, monkeypatch, tmp_path):
    index, panel = generated
    monkeypatch.setattr(_worker, "_IN_MEMORY", str(tmp_path))
    matcher = PanelMatcher(index, TopK(5))
    expected = matcher.run(panel).read_all()
    with Workers(2) as workers:
        for _ in range(3):
            batches = crew.awaited(panel.to_batches(max_chunksize=40))
            assert matcher.run(batches, workers=workers).read_all() == expected
            (folder,) = tmp_path.iterdir()
            # The matcher was read and removed.
            assert sorted(file.stem for file in folder.iterdir()) == ["0", "1"]
            for file in folder.iterdir():
                file.unlink()
        assert len(crew.workers) == 1


def test_a_kept_process_has_a_new_folder_if_somebody_removed_the_empty_one(monkeypatch, tmp_path):
    monkeypatch.setattr(_worker, "_IN_MEMORY", str(tmp_path))
    worker = _worker.Worker()
    try:
        worker.join(100, 1)
        (folder,) = tmp_path.iterdir()
        folder.rmdir()
        worker.join(100, 1)
        (folder,) = tmp_path.iterdir()
        worker.give(0, (0, pa.record_batch({"a": [1]})))
        assert [file.name for file in folder.iterdir()] == ["0"]
    finally:
        worker.stop()


def test_the_matcher_is_removed_if_the_end_of_a_result_is_not_read(generated, crew, monkeypatch, tmp_path):
    index, panel = generated
    monkeypatch.setattr(_worker, "_IN_MEMORY", str(tmp_path))
    matcher = PanelMatcher(index, TopK(5))
    batches = panel.to_batches(max_chunksize=40)
    with Workers(2) as workers:
        made = matcher.run(crew.awaited(batches), workers=workers)
        for _ in batches:
            made.read_next_batch()
        made.close()
        del made
        assert not [file for folder in tmp_path.iterdir() for file in folder.iterdir() if file.name == "work"]


def test_kept_processes_have_new_files_for_larger_pieces_and_none_at_the_end(
    generated, crew, monkeypatch, tmp_path
):
    index, panel = generated
    monkeypatch.setattr(_worker, "_IN_MEMORY", str(tmp_path))
    matcher = PanelMatcher(index, TopK(5))
    expected = matcher.run(panel).read_all()
    with Workers(2) as workers:
        folders = []
        for size in (20, 20, 40, 20):
            monkeypatch.setattr(_files, "ROWS", size)
            made = matcher.run(crew.awaited(panel.to_batches(max_chunksize=size)), workers=workers)
            assert made.read_all() == expected
            folders += tmp_path.iterdir()
        assert len(folders) == 4
        assert folders[0] == folders[1]
        assert folders[1] != folders[2]
        assert folders[2] == folders[3]
    assert not list(tmp_path.iterdir())


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


def test_an_idle_worker_ends_with_its_parent():
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=_worker._work, args=(theirs,))
    process.start()
    theirs.close()
    ours.close()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2", None])
def test_the_number_of_workers_is_checked(generated, wrong):
    with pytest.raises(InvalidRequestError, match="workers must be a whole number of at least 1"):
        PanelMatcher(generated[0]).run(generated[1], workers=wrong)


_UNGUARDED = """
import asyncio
import sys

import pyarrow as pa

from sampling_async import SamplingClient
from sampling_async.matching import PanelMatcher, QuotaIndex, TopK, Workers
from sampling_async.matching.panel import _files

_files.ROWS = 10
url, guid, key, quota_id = sys.argv[1:]


async def main():
    async with SamplingClient(url, panel_guid=guid, api_key=key) as client:
        await client.bulk_invite("m000001", [int(quota_id)])
        index = QuotaIndex(await client.get_quotas())
    panel = pa.table({"member_code": [f"m{number}" for number in range(200)], "1001007": [2000247] * 200})
    with Workers(2) as workers:  # which wait for a process that starts late
        PanelMatcher(index, TopK(1)).run(panel, workers=workers).read_all()


asyncio.run(main())
"""


def test_a_program_that_a_worker_would_run_again_sends_nothing_there(tmp_path):
    simulator = Simulator(5, surveys=3, members=5)
    (tmp_path / "unguarded.py").write_text(_UNGUARDED)
    quota_id = simulator.inventory.surveys[0].quotas[0].quota_id
    with simulator.serve() as url:
        arguments = [url, simulator.panel_guid, simulator.api_key, str(quota_id)]
        ran = subprocess.run(
            [sys.executable, tmp_path / "unguarded.py", *arguments], capture_output=True, text=True, check=False
        )
    assert ran.returncode == 1
    assert len(simulator.ledger.requests(endpoint="bulk_invite")) == 1
    assert "InvalidRequestError: this process is a worker" in ran.stderr
    assert "under `if __name__ == '__main__':`" in ran.stderr
    assert "ChildProcessError" in ran.stderr.splitlines()[-1]
