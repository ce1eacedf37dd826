"""What the retrieval server counts, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
BATCH_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFIX = "posttrain_search"


class Histogram:
    """Counts values by upper bound, as Prometheus' histograms do."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, about: str) -> list[str]:
        lines, seen = [f"# HELP {name} {about}", f"# TYPE {name} histogram"], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {seen}')
        return [*lines, f"{name}_sum {self.total:.6f}", f"{name}_count {seen}"]


class ServerMetrics:
    """Totals since the server started."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()  # POST /retrieve, by HTTP status
        self.queries = 0  # in requests that were well-formed
        self.passages = 0  # in answers
        self.request_seconds = Histogram(SECONDS)  # from a complete head to the answer, waiting included
        self.search_seconds = Histogram(SECONDS)  # of the retriever, one batch at a time
        self.batch_queries = Histogram(BATCH_QUERIES)

    def render(self) -> str:
        """The page of `GET /metrics`."""
        lines = [f"# HELP {PREFIX}_requests_total Requests to /retrieve.", f"# TYPE {PREFIX}_requests_total counter"]
        lines += [
            f'{PREFIX}_requests_total{{status="{status}"}} {count}' for status, count in sorted(self.requests.items())
        ]
        for name, about, value in (
            ("queries_total", "Queries in well-formed requests.", self.queries),
            ("passages_total", "Passages in answers.", self.passages),
        ):
            lines += [f"# HELP {PREFIX}_{name} {about}", f"# TYPE {PREFIX}_{name} counter", f"{PREFIX}_{name} {value}"]
        lines += self.request_seconds.lines(f"{PREFIX}_request_seconds", "Seconds from request to answer.")
        lines += self.search_seconds.lines(f"{PREFIX}_search_seconds", "Seconds of one batch in the retriever.")
        lines += self.batch_queries.lines(f"{PREFIX}_batch_queries", "Distinct queries searched at once.")
        return "\n".join(lines) + "\n"
