"""Prometheus metrics of one router, in a registry of its own: several routers fit one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.errors import RetryableError
from core.lifetime import Lifetime
from core.worker import WorkerReport
from router.choice import LifetimeObserver
from router.registry import WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_PREFIX = "twostroke_"


class RouterMetrics(LifetimeObserver):
    """Labels are bounded: outcomes, error codes, stages and worker names, never a client's text."""

    def __init__(self, statuses: Callable[[], Iterable[WorkerStatus]]) -> None:
        self._registry = CollectorRegistry()
        self._failed_replies = self._counter(
            "failed_replies", "Replies that are an error, or that broke off with one", "code"
        )
        self._requests = self._counter("requests", "Ended generations by outcome", "outcome")
        self._retries = self._counter("retries", "Generations routed again", "reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended generations")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Found in a prefix cache")
        self._predicted_tokens = self._counter(
            "predicted_cached_prompt_tokens", "Expected in a prefix cache by the router"
        )
        self._output_tokens = self._counter("generation_tokens", "Output tokens")
        self._kv_bytes = self._counter("kv_transfer_bytes", "KV moved from prefill to decode")
        self._kv_seconds = self._counter("kv_transfer_seconds", "Time spent moving KV")
        self._ttft = self._histogram("ttft_seconds", "Arrival to first token")
        self._itl = self._histogram("itl_seconds", "Between two chunks of tokens of a stream")
        self._tpot = self._histogram("tpot_seconds", "Mean time per output token after the first")
        self._stages = self._histogram("stage_seconds", "Time in each stage of a request", "stage")
        self._running = Gauge(
            _PREFIX + "requests_in_flight", "Generations running now", registry=self._registry
        )
        self._registry.register(_WorkerCollector(statuses))

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def failed_reply(self, code: str) -> None:
        """A client was told of an error, by the status or, after the headers, in mid-stream."""
        self._failed_replies.labels(code).inc()

    def retried(self, error: RetryableError) -> None:
        self._retries.labels(error.code).inc()

    def began(self, life: Lifetime) -> None:
        self._running.inc()

    def tokens(self, life: Lifetime, num_tokens: int, gap_s: float | None) -> None:
        self._output_tokens.inc(num_tokens)
        if gap_s is not None:
            self._itl.observe(gap_s)

    def ended(self, life: Lifetime) -> None:
        self._running.dec()
        self._requests.labels(life.outcome).inc()
        self._prompt_tokens.inc(life.num_prompt_tokens)
        self._predicted_tokens.inc(life.predicted_cached_tokens)
        if life.ttft_s is not None:
            self._ttft.observe(life.ttft_s)
        if life.tpot_s is not None:
            self._tpot.observe(life.tpot_s)
        self._observe_stages(life)

    def _observe_stages(self, life: Lifetime) -> None:
        stage = self._stages.labels
        if life.tokenized is not None:
            stage("tokenize").observe(max(0.0, life.tokenized - life.arrived))
        if life.prefill is not None:
            self._cached_tokens.inc(life.prefill.num_cached_tokens)
            stage("prefill_queue").observe(max(0.0, life.prefill.queue_s))
            stage("prefill").observe(max(0.0, life.prefill.prefill_s))
        if life.decode is not None:
            self._kv_bytes.inc(life.decode.num_pulled_bytes)
            self._kv_seconds.inc(max(0.0, life.decode.transfer_s))
            stage("decode_queue").observe(max(0.0, life.decode.queue_s))
            stage("transfer").observe(max(0.0, life.decode.transfer_s))
            stage("decode").observe(max(0.0, life.decode.decode_s))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(_PREFIX + name, text, labels, registry=self._registry, buckets=_SECONDS)


_STATUS_GAUGES: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    ("connected", "1 while its stream is open", lambda status: status.usable),
    ("suspect", "1 while it is silent although it has work", lambda status: status.suspect),
    ("in_flight", "Requests of this router on it", lambda status: status.num_in_flight),
    ("unknown_outputs", "Outputs of ended attempts", lambda status: status.num_unknown_outputs),
)
_REPORT_GAUGES: tuple[tuple[str, str, Callable[[WorkerReport], float]], ...] = (
    ("waiting", "Waiting sequences", lambda report: report.num_waiting),
    ("running", "Running sequences", lambda report: report.num_running),
    ("queued_tokens", "Prompt tokens to compute", lambda report: report.num_queued_tokens),
    ("blocks", "KV blocks", lambda report: report.num_blocks),
    ("free_blocks", "Free or cached KV blocks", lambda report: report.num_free_blocks),
    ("cached_blocks", "Cached KV blocks", lambda report: report.num_cached_blocks),
    ("leased_blocks", "KV blocks under a lease", lambda report: report.num_leased_blocks),
    ("rss_bytes", "Resident memory", lambda report: report.rss_bytes),
)


class _WorkerCollector(Collector):
    """Reads the registry when scraped: nothing to keep in step, and a gone worker is gone."""

    def __init__(self, statuses: Callable[[], Iterable[WorkerStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[Metric]:
        statuses = list(self._statuses())
        for name, text, of_status in _STATUS_GAUGES:
            rows = [(status, of_status(status)) for status in statuses]
            yield _family(name, text, rows)
        for name, text, of_report in _REPORT_GAUGES:
            rows = [(status, of_report(status.report)) for status in statuses if status.report]
            yield _family(name, text, rows)


def _family(name: str, text: str, rows: Iterable[tuple[WorkerStatus, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        f"{_PREFIX}worker_{name}", text, labels=("role", "worker", "address")
    )
    for status, value in rows:
        worker = status.info.worker_id.name if status.info else ""
        endpoint = status.endpoint
        family.add_metric((endpoint.role.value, worker, endpoint.address), value)
    return family
