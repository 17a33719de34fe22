"""A generated client: openapi-python-client with the OpenAPI document of the simulator.

The generated code is not stored here. The installed version generates it in a temporary folder. Around it is
what its users write by hand: a semaphore, chunks of 100 IDs, gather. Errors are raised.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import subprocess
import sys
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

import httpx

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

CHUNK = 100
PACKAGE = "generated_sampling_client"
DOCUMENT = files("sampling_async.simulator") / "openapi.json"


def generate(folder: Path) -> None:
    """Write the package `generated_sampling_client` into a folder.

    Raises:
        RuntimeError: The generator is missing, or could not process the whole document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{PACKAGE}.json"
    # The hooks would only format the code, and need a formatter.
    config.write_text(json.dumps({"package_name_override": PACKAGE, "post_hooks": []}))
    with as_file(DOCUMENT) as document:
        places = [f"--path={document}", f"--config={config}", f"--output-path={folder / PACKAGE}"]
        options = ["--meta=none", "--overwrite", "--fail-on-warning"]
        done = subprocess.run(
            [sys.executable, "-m", "openapi_python_client", "generate", *places, *options],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"openapi-python-client ended with {done.returncode}:\n{done.stdout}{done.stderr}")


@cache
def generated() -> ModuleType:
    """Return the generated package. It is made on first use and kept until the process ends."""
    folder = TemporaryDirectory(prefix=f"{PACKAGE}-")
    atexit.register(folder.cleanup)
    generate(Path(folder.name))
    sys.path.insert(0, folder.name)
    try:
        for module in ("models", "api.invites.bulk_invite"):
            importlib.import_module(f"{PACKAGE}.{module}")
        return importlib.import_module(PACKAGE)
    finally:
        sys.path.remove(folder.name)


class GeneratedClient:
    """Bulk invites by generated code."""

    name = "openapi-python-client"

    def __init__(self, url: str, panel_guid: str, api_key: str, width: int) -> None:
        package = generated()
        self._models = package.models
        self._bulk_invite = package.api.invites.bulk_invite
        self._panel_guid = UUID(panel_guid)
        self._width = width
        self._client = package.AuthenticatedClient(
            url,
            token=api_key,
            prefix="",
            auth_header_name="API_AUTH_KEY",
            timeout=httpx.Timeout(60),
            raise_on_unexpected_status=True,
            # By default httpx opens at most 100 connections and keeps 20 of them.
            httpx_args={"limits": httpx.Limits(max_connections=width, max_keepalive_connections=width)},
        )

    async def __aenter__(self) -> Self:
        self._semaphore = asyncio.Semaphore(self._width)
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.__aexit__(*exc_info)

    async def bulk(self, member_code: str, quota_ids: Sequence[int]) -> int:
        """Request invites for all quota IDs and return the number of invites."""
        chunks = [quota_ids[start : start + CHUNK] for start in range(0, len(quota_ids), CHUNK)]
        answers = await asyncio.gather(*(self._ask(member_code, chunk) for chunk in chunks))
        invite = self._models.Invite
        return sum(isinstance(item.invite, invite) for answer in answers for item in answer.values())

    async def _ask(self, member_code: str, chunk: Sequence[int]) -> dict[int, Any]:
        body = self._models.BulkInviteRequest(quota_i_ds=list(chunk))
        async with self._semaphore:
            answer = await self._bulk_invite.asyncio(
                self._panel_guid, member_code, client=self._client, body=body
            )
        if not isinstance(answer, self._models.BulkInviteResponse):
            raise TypeError(f"a refusal: {answer}")
        items = {item.quota_id: item for item in answer.invites}
        missing = [quota_id for quota_id in chunk if quota_id not in items]
        if missing:
            raise ValueError(f"{len(missing)} quota IDs were not answered")
        return items

    def decode_quotas(self, body: bytes) -> object:
        """Get and decode an inventory."""
        return self._models.Quotas.from_dict(json.loads(body))
