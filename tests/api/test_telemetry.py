"""OpenTelemetry: requests leave spans, probes do not."""

from __future__ import annotations

from pathlib import Path

from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from planner.api.app import create_app
from planner.api.settings import Settings
from tests.api.fakes import Instant


def test_requests_leave_spans_and_probes_do_not(
    settings: Settings, journal: Path
) -> None:
    """The span of a request has the path of its route, not that of one plan."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(
        settings, work=Instant(journal), telemetry={"tracer_provider": provider}
    )
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/metrics").status_code == 200
        assert client.get("/v1/plans/none").status_code == 404
    routes = {
        (span.attributes or {}).get("http.route")
        for span in exporter.get_finished_spans()
    }
    assert "/v1/plans/{plan_id}" in routes
    assert not {"/healthz", "/metrics"} & routes
