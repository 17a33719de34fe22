"""One of the processes that match a panel: how this process controls it, and what runs in it.

A piece is sent as a file mapped into memory, in a memory file system if there is one: to send it through a pipe
would cost a good part of the time gained. A worker has one piece to work on and one waiting. It keeps its
matcher and its files from run to run: to send the one and to write the others for the first time costs as much
as some pieces.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sampling_async.matching.panel._arrow import pa

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from weakref import WeakMethod, ref

Piece: TypeAlias = "tuple[int, Any]"
"""The place in the panel of a batch's first member, and the batch."""

Matches: TypeAlias = "Callable[[Iterable[Piece]], Iterator[Any]]"
"""A method that makes record batches from pieces."""

Work: TypeAlias = "tuple[WeakMethod[Matches], ref[object]]"
"""What a worker matches with: the method, and the plan that it was sent with."""

_WORK: Final = "work"
_IN_MEMORY: Final = "/dev/shm"  # noqa: S108  the memory file system of Linux

_PIECES: Final = 2


class _File:
    """A file for one piece at a time, reused: to overwrite a piece is twice as fast as to write a new file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: Any = None

    def write(self, batch: Any) -> None:
        """Write a piece over the previous one, which must not be in use any more."""
        # Measure the size first, by writing to nowhere.
        size = pa.MockOutputStream()
        _write(size, [batch])
        if self._mapped is not None and self._mapped.size() >= size.size():
            self._mapped.seek(0)
            _write(self._mapped, [batch])
            return
        if self._mapped is not None:
            self.close()
            # The worker has it mapped: do not change its size, but write another one. Windows removes no file
            # that is mapped; there it goes with its folder.
            with suppress(PermissionError):
                self.path.unlink()
            self.path = self.path.with_name(f"{self.path.stem}.{size.size()}")
        # If there is no space left, this write raises an error. A write to mapped memory would kill the
        # process.
        with pa.OSFile(str(self.path), "wb") as file:
            _write(file, [batch])
        self._mapped = pa.memory_map(str(self.path), "r+")

    @property
    def is_gone(self) -> bool:
        """Whether the file was written, and somebody has removed it."""
        return self._mapped is not None and not self.path.exists()

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()


class Worker:
    """A worker process, seen from this one.

    Attributes:
        connection: This process's end of the pipe.
        pieces: The numbers of the pieces that the worker has; it works on the first one.
        work: What it matches with, since it was sent; kept when the run has ended.
        is_free: Whether the worker takes part in no run.
        is_ready: Whether the worker can take pieces of the current run.
    """

    def __init__(self) -> None:
        # Not "fork": the threads of pyarrow do not survive a fork.
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _interrupts_deferred():
            self._process.start()
        # Close this copy of the worker's end: otherwise `recv` would not raise EOFError when the worker ends.
        theirs.close()
        self._folder: TemporaryDirectory[str] | None = None
        self._size = 0  # of the pieces that the folder was made for
        self._files: deque[_File] = deque()
        self.pieces: deque[int] = deque()
        self.work: Work | None = None
        self.is_free = True
        self.is_ready = self._is_told = False

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.is_alive()

    def join(self, size: int, workers: int) -> None:
        """Make the worker take part in a run of so many workers, whose pieces have up to `size` bytes."""
        self.is_free = False
        # If a day has passed since the last run, a cleanup of temporary files may have removed the folder.
        if self._folder is None or size > self._size or self._is_incomplete(self._folder):
            self._remove_folder()
            place = _place(_PIECES * workers * size)
            # Each worker has a separate folder, because it may be kept longer than the others.
            folder = TemporaryDirectory(prefix="sampling-async-", dir=place, ignore_cleanup_errors=True)
            self._folder, self._size = folder, size
            self._files.extend(_File(Path(folder.name, str(at))) for at in range(_PIECES))
        self._send(Path(self._folder.name))

    def _is_incomplete(self, folder: TemporaryDirectory[str]) -> bool:
        return not Path(folder.name).is_dir() or any(file.is_gone for file in self._files)

    @property
    def work_file(self) -> Path:
        """Where the work may be written for a run in which the worker takes part."""
        assert self._folder is not None
        return Path(self._folder.name, _WORK)

    def begin(self, work: Work, written: Path | None) -> None:
        """Send the worker the matcher, or the file to read it from, unless the worker has it."""
        self._send(written)
        self.work = work
        # One that has the work takes pieces at once, while this process matches its first one.
        self.is_ready = written is None

    @property
    def has_room(self) -> bool:
        """Whether the worker can take one more piece."""
        return self.is_ready and len(self.pieces) < _PIECES

    def give(self, number: int, piece: Piece) -> None:
        """Send the worker a piece, which it matches after those it has."""
        first, batch = piece
        # There are as many files as pieces at a time, used in turn: the first is that of a finished piece.
        file = self._files[0]
        self._files.rotate(-1)
        file.write(batch)
        self._send((file.path, first))
        self.pieces.append(number)

    def finish(self) -> None:
        """Notify the worker, once, that no more pieces follow those it has."""
        if not self._is_told:
            self._is_told = True
            self._send(None)

    def receive(self) -> tuple[str, list[Any]]:
        """Return the worker's next message: its kind, and the output that it has made since the last one.

        Raises:
            ChildProcessError: The process ended.
            Exception: What was raised there.
        """
        try:
            kind, what = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        if kind == "error":
            raise what
        return kind, _read(what)

    def _send(self, what: object) -> None:
        try:
            self.connection.send(what)
        except ConnectionError:
            raise self._ended() from None

    def _ended(self) -> ChildProcessError:
        self._process.join()
        return ChildProcessError(
            f"a process that matched the panel ended with exit code {self._process.exitcode}: it may have run "
            "out of memory; or the main module has no `if __name__ == '__main__':` and starts workers again"
        )

    def leave(self) -> None:
        """Release the worker from a run, after its last message."""
        self.is_ready = self._is_told = False
        self.is_free = True  # last: a signal handler may raise before

    def stop(self) -> None:
        """Kill the process, in whatever state it is, and release its resources."""
        # SIGKILL, because a process can ignore SIGTERM, and a stopped one does not react to it.
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        while self._files:
            self._files.pop().close()
        if self._folder is not None:
            self._folder.cleanup()


def _place(room: int) -> str | None:
    """Return a folder in memory, or None if less than twice `room` bytes are free, as often in containers."""
    try:
        memory = os.statvfs(_IN_MEMORY)
    except (AttributeError, OSError):
        return None
    return _IN_MEMORY if memory.f_bavail * memory.f_frsize > 2 * room else None


@contextmanager
def _interrupts_deferred() -> Generator[None]:
    """Block Ctrl-C while a process starts, so that it cannot be interrupted before it ignores the signal."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Start the resource tracker before: its start unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write(sink: Any, batches: Sequence[Any]) -> None:
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _written(batches: Sequence[Any]) -> bytes:
    if not batches:
        return b""
    sink = pa.BufferOutputStream()
    _write(sink, batches)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _read(written: bytes) -> list[Any]:
    return list(pa.ipc.open_stream(written)) if written else []


def _work(connection: Connection) -> None:
    """Run a worker: take part in runs until the parent kills this process, or the parent is gone."""
    # On Ctrl-C, the parent kills this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = None
    held: list[Matches] = []
    # These errors mean that the parent is gone.
    with suppress(EOFError, ConnectionError):
        try:
            while True:
                folder = connection.recv()
                _take_part(connection, held)
        except Exception as exc:  # noqa: BLE001  sent to the parent, which raises it and kills this process
            connection.send(("error", _sendable(exc)))
            while True:
                connection.recv()
    if folder is not None:
        # A parent that was killed has not removed it.
        rmtree(folder, ignore_errors=True)


def _sendable(exc: Exception) -> Exception:
    """Return the exception, or a RuntimeError with its type and text if it does not survive pickling."""
    try:
        # Some exceptions can be pickled but not be read again: their class needs other arguments.
        again = pickle.loads(pickle.dumps(exc))  # noqa: S301  made here
    except Exception:  # noqa: BLE001  any of them: classes may define how they are pickled
        again = None
    if type(again) is type(exc):
        return exc
    return RuntimeError(f"a process that matched the panel failed: {type(exc).__name__}: {exc}")


def _take_part(connection: Connection, held: list[Matches]) -> None:
    """Take part in a run with the matcher that the worker holds, or with a new one that it is sent."""
    made: list[Any] = []

    @lru_cache(maxsize=_PIECES)  # to map a file anew for each piece costs 2 % of matching it
    def mapped(path: Path) -> Any:
        return pa.memory_map(str(path)).read_buffer()

    def say(kind: str) -> None:
        connection.send((kind, _written(made)))
        made.clear()

    def pieces() -> Iterator[Piece]:
        say("ready")
        while True:
            given = connection.recv()
            if given is None:
                return
            path, first = given
            yield first, pa.ipc.open_stream(mapped(path)).read_next_batch()
            # `match` has yielded all the output of this piece, so the parent may overwrite the file.
            say("done")

    written = connection.recv()
    if written is not None:
        held.clear()  # before the next one is read: with its rows it is large
        held.append(pickle.loads(written.read_bytes()))  # noqa: S301  from the parent process
    for batch in held[0](pieces()):
        made.append(batch)  # noqa: PERF402  `say` empties it in between
    say("end")
