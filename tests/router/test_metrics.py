"""The router's metrics: each is documented with its type and labels."""

import re
from pathlib import Path

from skiff_router.endpoints import Registry
from skiff_router.metrics import RouterMetrics
from skiff_router.token_usage import TokenUsage
from skiff_router.upstream import Failure


def test_documentation_has_type_and_labels_of_each_metric() -> None:
    metrics = RouterMetrics(
        Registry(),
        lambda: 1,
        in_flight_by_key=lambda: {"team": 1},
        lost_usage_lines=lambda: 2,
        peers=lambda: 1,
    )
    metrics.record_response("m", 200)
    metrics.record_retry("m")
    metrics.record_failure("m", Failure.RESET)
    metrics.record_first_byte("m", 0.1)
    metrics.record_waiting("m", 1)
    metrics.record_wait("m", "released")
    metrics.record_scale_request("m", "accepted")
    metrics.record_first_pod_request("m", 0.03)
    metrics.record_usage("team", "m", TokenUsage(3, 2, 1, estimated=True))
    metrics.record_prefix_hit("m", expected=3, actual=2)
    metrics.record_limited("team", "concurrency")
    metrics.record_reload("--limits-file", success=True)
    page = metrics.page().decode()
    kinds = {name: kind for name, kind in re.findall(r"# TYPE (\S+) (\S+)", page) if "_created" not in name}
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(skiff_router_\w+)` \| (\w+) \|([^|]*)\|", text, re.MULTILINE)
    assert {name: kind for name, kind, _ in rows} == kinds
    for name, _, labels in rows:
        documented = set(re.findall(r"`(\w+)`", labels))
        for sample in re.findall(rf"^{name}(?:_sum)?\{{(.*?)\}} ", page, re.MULTILINE):
            assert set(re.findall(r"(\w+)=", sample)) == documented, name
