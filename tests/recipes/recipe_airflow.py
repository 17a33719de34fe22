# dags/sampling_night.py
import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import dag, task
from night import request_invites

NIGHTS = Path(os.environ.get("NIGHTS", "/data/nights"))  # a disk that each worker sees


@dag(schedule="0 2 * * *", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False, max_active_runs=1)
def sampling_night():
    @task(retries=20, retry_delay=timedelta(minutes=10))
    def invites(ds: str) -> dict[str, int]:
        folder = NIGHTS / ds
        folder.mkdir(exist_ok=True)
        return asyncio.run(request_invites(NIGHTS / "panel.parquet", folder))

    invites()  # one task, and not one for each member


sampling_night()
