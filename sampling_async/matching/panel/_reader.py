"""The type of a panel match's result, for type checkers: pyarrow has no types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class BatchReader(Protocol):
    """The result of `PanelMatcher.run`: a `pyarrow.RecordBatchReader`, described for type checkers.

    It can be read only once: batch by batch, as a whole, or by any library that reads an Arrow stream.
    """

    @property
    def schema(self) -> Any:
        """The names and types of the columns: a `pyarrow.Schema`."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, each a `pyarrow.RecordBatch`."""
        ...

    def read_next_batch(self) -> Any:
        """Return the next batch; raise StopIteration after the last one."""
        ...

    def read_all(self) -> Any:
        """Return all batches not yet read as a `pyarrow.Table`."""
        ...

    def read_pandas(self, **options: Any) -> Any:
        """Return all batches not yet read as a `pandas.DataFrame`."""
        ...

    def close(self) -> None:
        """Discard the batches not yet read."""
        ...

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export the stream to another library, by the Arrow C stream interface."""
        ...
