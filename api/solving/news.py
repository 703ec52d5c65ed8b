"""Wakes clients of this process that wait for events of jobs."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable

from planner.api.storage.store import CHANNEL, Store

logger = logging.getLogger("planner.api")

SECONDS_BETWEEN_CONNECTIONS = 1.0


class News:
    """Events of jobs, as they happen. Belongs to one event loop.

    Args:
        on_done: is called with the id of every job that has finished.
    """

    def __init__(self, on_done: Callable[[str], None] = lambda job_id: None) -> None:
        self._on_done = on_done
        self._waiting = weakref.WeakValueDictionary[str, asyncio.Event]()

    def next_of(self, job_id: str) -> asyncio.Event:
        """What the next event of the job sets.

        Ask for it before reading the job, so that no event is missed in between.
        """
        news = self._waiting.get(job_id)
        if news is None:
            self._waiting[job_id] = news = asyncio.Event()
        return news

    def tell(self, job_id: str, event: str) -> None:
        """Wake all who wait for the job."""
        waiting = self._waiting.pop(job_id, None)
        if waiting is not None:
            waiting.set()
        if event == "done":
            self._on_done(job_id)

    def wake_all(self) -> None:
        """Wake everyone, because events may have been missed."""
        for job_id in tuple(self._waiting):
            self.tell(job_id, "")


def follow_store(news: News, store: Store) -> None:
    """Tell the events of a SQLite file, which only this process writes."""
    loop = asyncio.get_running_loop()

    def tell(job_id: str, event: str) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(news.tell, job_id, event)

    store.on_event = tell


async def listen(news: News, url: str) -> None:
    """Tell the events of all processes that share a PostgreSQL database, until cancelled."""
    import psycopg

    while True:
        try:
            connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
            async with connection:
                await connection.execute(f"LISTEN {CHANNEL}")
                news.wake_all()
                async for note in connection.notifies():
                    job_id, _, event = note.payload.partition(" ")
                    news.tell(job_id, event)
        except psycopg.OperationalError as error:
            logger.warning("notifications of the database stopped: %s", error)
        await asyncio.sleep(SECONDS_BETWEEN_CONNECTIONS)
