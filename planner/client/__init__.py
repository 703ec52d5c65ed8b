"""A client of the planner's own HTTP service.

The commands that ask a service for plans, or send measurements to one, use this client.
Needs nothing but the standard library, `planner.spec` and `planner.errors`.
"""

from planner.client.http import (
    KEY_VARIABLE,
    SCHEMES,
    WAIT_SECONDS,
    Response,
    check_address,
    exchange,
)
from planner.client.measurements import StoredMeasurement, post_measurement
from planner.client.plans import request_plan

__all__ = [
    "KEY_VARIABLE",
    "SCHEMES",
    "WAIT_SECONDS",
    "Response",
    "StoredMeasurement",
    "check_address",
    "exchange",
    "post_measurement",
    "request_plan",
]
