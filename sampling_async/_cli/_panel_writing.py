"""Write a simulated panel to a file that `match` reads."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sampling_async import InvalidRequestError
from sampling_async._cli._match import bands_file
from sampling_async._private_files import written_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from sampling_async.simulator import SimulatedMember

_SUFFIXES: Final = (".parquet", ".jsonl")


def check_panel_file(output: Path) -> None:
    """Refuse a file that could not be written.

    Raises:
        InvalidRequestError: It is a folder or in no folder, its name has no known ending, or it needs pyarrow.
    """
    suffix = output.suffix.lower()
    if suffix not in _SUFFIXES:
        raise InvalidRequestError(
            f"--members must be a number, or a file that ends in {' or '.join(_SUFFIXES)}, not {output}"
        )
    if output.is_dir():
        raise InvalidRequestError(f"--members {output} is a folder")
    if not output.absolute().parent.is_dir():
        raise InvalidRequestError(f"--members {output}: the folder does not exist")
    if suffix == ".parquet":
        try:
            import_module("pyarrow")
        except ModuleNotFoundError:
            raise InvalidRequestError(
                f"{output} needs pyarrow: python -m pip install 'sampling-async[panel]'; .jsonl needs nothing"
            ) from None


def write_panel(
    members: Iterable[SimulatedMember],
    questions: Iterable[int],
    bands: Mapping[int, tuple[int, int]],
    output: Path,
) -> Path:
    """Write members, one row each, and beside them a file with the age bands.

    Args:
        members: The members.
        questions: The questions that get a column, answered or not.
        bands: The first and last year of each answer ID of the age question.
        output: The panel's file.

    Returns:
        The file of the bands.

    Raises:
        InvalidRequestError: One of the files cannot be written.
    """
    columns = tuple(questions)
    rows = (_row(member, columns) for member in members)
    if output.suffix.lower() == ".parquet":
        from sampling_async._cli._panel_files import write_rows  # noqa: PLC0415  an extra

        write_rows(list(rows), output)
    else:
        with written_whole(output) as unfinished, unfinished.open("wb") as file:
            file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    beside = bands_file(output)
    with written_whole(beside) as unfinished:
        unfinished.write_text(json.dumps(dict(bands)) + "\n", encoding="utf-8")
    return beside


def _row(member: SimulatedMember, questions: tuple[int, ...]) -> dict[str, Any]:
    answers = {str(question_id): member.profile.get(question_id) for question_id in questions}
    return {
        "member_code": member.member_code,
        "device_type": member.device_type_id,
        "participations": [
            {"survey_id": one.survey_id, "wave_id": one.wave_id, "status_id": one.status_id}
            for one in member.participations
        ],
        # Sets are sorted, so that the same seed writes the same file.
        **{name: sorted(each) if isinstance(each, frozenset) else each for name, each in answers.items()},
    }
