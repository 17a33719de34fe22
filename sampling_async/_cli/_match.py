"""The command `match`."""

from __future__ import annotations

from typing import Annotated

from sampling_async._cli._connection import ServiceOptions, fail
from sampling_async._cli._match_options import MatchOptions
from sampling_async._cli._options import argument, takes
from sampling_async._cli._tally import USAGE
from sampling_async._contract.extras import install


@takes(options=MatchOptions, service=ServiceOptions, csv=True, quiet=True)
def match(
    service: ServiceOptions,
    options: MatchOptions,
    members: Annotated[
        str,
        argument(
            "PANEL",
            "A file (.parquet, .csv, .jsonl or .ndjson) or a DuckDB query (SELECT ...) with one row per "
            "member. The names of its columns are question IDs.",
        ),
    ],
) -> None:
    """Match a whole panel with the open quotas: count the members of each quota, or list their best quotas.

    Without --top, --requests, --allocate or --sample, the output has one row
    per quota: the members that match certainly and possibly, the completes
    still needed, and the shortfall (needed completes minus certain members).
    The panel may also have the columns member_code, device_type,
    exclude_surveys, participations and, for --allocate, invites_left. An
    unanswered question is empty or null.
    """
    try:
        from sampling_async._cli._match_run import MatchRun  # noqa: PLC0415  numpy, pyarrow: an extra
    except ModuleNotFoundError as exc:
        fail(f"match needs {exc.name}: {install('panel')}", USAGE)
    MatchRun(service, members, options).run()
