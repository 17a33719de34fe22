# read_from_redis.py
import sqlite3
from collections.abc import Callable

from redis import Redis


def read(redis: Redis, book: sqlite3.Connection, work: Callable[[str, str], None], worker: str) -> None:
    """Do the work of each fact in the stream once; several workers share the stream."""
    book.execute("CREATE TABLE IF NOT EXISTS done (key TEXT PRIMARY KEY)")
    while batches := redis.xreadgroup("credits", worker, {"sampling": ">"}, count=100, block=1000):
        for number, fields in batches[0][1]:
            with book:  # the key and the work, in one transaction
                if book.execute("INSERT OR IGNORE INTO done VALUES (?)", [fields[b"key"]]).rowcount:
                    work(fields[b"kind"].decode(), fields[b"fact"].decode())
            redis.xack("sampling", "credits", number)
