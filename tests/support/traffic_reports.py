"""Reports of the traffic driver as tests of a cluster judge and keep them."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from traffic import make_table

LATE_SECONDS: Final = 3.0
Report = dict[str, Any]


def check(report: Report, *, failures: Collection[str] = ()) -> None:
    """Fail unless every request was sent and answered rightly, except for these kinds of failures."""
    late = report["latest_arrival_seconds"]
    assert late < LATE_SECONDS, (
        f"the driver itself was {late} s late: the machine is too slow for {report['rate']:g} requests a second"
    )
    found = {kind for window in report["windows"] for kind in window["failures"]}
    problems = found - set(failures)
    assert not problems and report["not_sent"] == 0 and report["unanswered"] == 0, json.dumps(
        report, indent=1
    )
    assert all(window["requests"] for window in report["windows"]), report["windows"]


def save(name: str, report: Report, directory: str) -> None:
    """Write a report to DIRECTORY/NAME.json; nowhere without a directory."""
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / f"{name}.json").write_text(json.dumps(report, indent=1))


def publish(reports: dict[str, Report], directory: str, file_name: str) -> None:
    """Print the reports by name as a table, which DIRECTORY/FILE_NAME gets as well."""
    table = make_table(reports)
    print(f"\n{table}")
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / file_name).write_text(f"{table}\n")
