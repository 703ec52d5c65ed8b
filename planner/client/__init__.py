"""A typed client of the planner's HTTP service, synchronous and asynchronous.

>>> from planner.client import Client
>>> from planner.spec import ShortForm
>>> wanted = ShortForm(
...     model="llama-3.1-8b", devices="8xh100-sxm5-80gb", batch=64, sequence=4096
... )
>>> with Client("http://localhost:8000") as client:  # doctest: +SKIP
...     plan = client.plan(wanted, timeout_seconds=60)

Documents of `planner.spec` go in and come out; those of `planner.spec.answers` describe
jobs and what is stored. Failures are exceptions of
`planner.errors` with field, message and hint; see `planner.client.errors`.
"""

from planner.client.client import AsyncClient, Client
from planner.client.documents import JobEvent
from planner.client.errors import (
    BusyError,
    ClientError,
    JobError,
    RefusedError,
    ResponseError,
    UnreachableError,
)
from planner.client.flows import KEY_VARIABLE, SCHEMES, Retries, check_address

__all__ = [
    "KEY_VARIABLE",
    "SCHEMES",
    "AsyncClient",
    "BusyError",
    "Client",
    "ClientError",
    "JobError",
    "JobEvent",
    "RefusedError",
    "ResponseError",
    "Retries",
    "UnreachableError",
    "check_address",
]
