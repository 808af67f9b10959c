#!/usr/bin/env bash
# prometheus_client 0.26.0: one NaN observed by a histogram makes its sum NaN for the life of the process, and is in no
# bucket, so the count does not have it. A rate of 0 of 0 pages, or a time divided by nothing, is enough: from then on
# every average (`rate(..._sum) / rate(..._count)`) of this series is NaN, and the count looks as if nothing had come.
# Summaries count it, counters and gauges take it as well. OpenTelemetry 1.45.2 is told the same and leaves it out, with
# a line in the log. So the same cache has good averages through one of them and none through the other.
#
# Seen with prometheus_client 0.26.0 and opentelemetry-sdk 1.45.2, 1.5, NaN and 0.5 observed: a histogram of
# prometheus_client with count 2 and sum NaN, a summary with count 3 and sum NaN, a histogram of OpenTelemetry with
# count 2 and sum 2.0. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "prometheus_client==0.26.0" \
    "opentelemetry-api==1.45.2" "opentelemetry-sdk==1.45.2" "opentelemetry-semantic-conventions==0.66b2" \
    "typing_extensions==4.16.0"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import math
import sys

import prometheus_client
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

for name in ("prometheus_client", "opentelemetry-sdk"):
    print(name, importlib.metadata.version(name))
VALUES = (1.5, math.nan, 0.5)
registry = prometheus_client.CollectorRegistry()
histogram = prometheus_client.Histogram("load", "seconds", registry=registry, buckets=(1, 2))
summary = prometheus_client.Summary("wait", "seconds", registry=registry)
reader = InMemoryMetricReader()
recorded = MeterProvider([reader]).get_meter("cache").create_histogram("load")
for value in VALUES:
    histogram.observe(value)
    summary.observe(value)
    recorded.record(value)
histogram.observe(0.25)  # a good value does not mend it
recorded.record(0.25)
of = registry.get_sample_value
point = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics[0].data.data_points[0]
seen = {
    "prometheus_client histogram": (of("load_count"), of("load_sum")),
    "prometheus_client summary": (of("wait_count"), of("wait_sum")),
    "OpenTelemetry histogram": (point.count, point.sum),
}
for name, (count, total) in seen.items():
    print(f"{name:28} count {count}, sum {total}")
print("buckets", {le: of("load_bucket", {"le": le}) for le in ("1.0", "2.0", "+Inf")})
sys.exit(str(seen) != str({
    "prometheus_client histogram": (3.0, math.nan), "prometheus_client summary": (3.0, math.nan),
    "OpenTelemetry histogram": (3, 2.25),
}))
PY
