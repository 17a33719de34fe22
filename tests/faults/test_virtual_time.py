"""The clock and the model service of the kit, on which simulations depend."""

from __future__ import annotations

import anyio
import pytest
import virtual_time
from kit import client_of

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@BACKENDS
def test_a_day_of_virtual_time_takes_no_time(backend):
    async def main() -> float:
        await anyio.sleep(86_400)
        return anyio.current_time()

    assert virtual_time.run(main, backend=backend) == pytest.approx(86_400)


def test_waiting_for_nothing_is_an_error_instead_of_a_hang():
    with pytest.raises(RuntimeError, match="would wait for ever"):
        virtual_time.run(anyio.sleep_forever, backend="asyncio")


@BACKENDS
def test_each_worker_takes_one_request_at_a_time_in_order(backend):
    service = virtual_time.ModelService(workers=((0, 2), (30, 1)), base=10, per_id=0)

    async def main() -> list[float]:
        ends = []

        async def one() -> None:
            async with client_of("https://service.example", transport=service) as client:
                await client.get_quotas()
            ends.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)
            await anyio.sleep(25)
            for _ in range(3):
                tasks.start_soon(one)
        return ends

    assert virtual_time.run(main, backend=backend) == pytest.approx([10, 10, 20, 35, 35, 45])
