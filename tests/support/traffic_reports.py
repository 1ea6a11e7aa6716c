"""Reports of the traffic driver as tests of a cluster judge and keep them."""

import contextlib
import json
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from traffic import make_table
from traffic_run import TrafficRun

LATE_SECONDS: Final = 3.0
QUIET_SECONDS: Final = 2.0
Report = dict[str, Any]


@contextlib.contextmanager
def recorded(
    run: TrafficRun, name: str, reports: dict[str, Report], directory: str, *, file_name: str = ""
) -> Iterator[TrafficRun]:
    """Add the report of a started run to `reports`, with some seconds before and after the with-block, and save it.

    `file_name`: by default the name.
    """
    stopped = False
    try:
        time.sleep(QUIET_SECONDS)
        yield run
        run.mark("after")
        time.sleep(QUIET_SECONDS)
        reports[name] = run.stop()
        stopped = True
        save(file_name or name, reports[name], directory)
    finally:
        if not stopped:
            print(json.dumps(run.stop(), indent=1))


def check_answers(report: Report, *, failures: Collection[str] = ()) -> None:
    """Fail unless every request was sent and had the right answer, except for these kinds of failures."""
    found = {kind for window in report["windows"] for kind in window["failures"]}
    problems = found - set(failures)
    assert not problems and report["not_sent"] == 0 and report["unanswered"] == 0, json.dumps(
        report, indent=1
    )


def check(report: Report, *, failures: Collection[str] = ()) -> None:
    """Do what `check_answers` does, and fail if the driver was late, or a window had no request."""
    late = report["latest_arrival_seconds"]
    assert late < LATE_SECONDS, (
        f"the driver itself was {late} s late: the machine is too slow for {report['rate']:g} requests a second"
    )
    check_answers(report, failures=failures)
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
