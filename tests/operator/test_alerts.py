"""The chart's alert rules, evaluated by promtool over the series of tests/operator/alerts; the tests there can fail."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import CHART, ROOT, HelmError, alert_rules
from kube import tool

from skiff_runtime.metrics.definitions import ITL_BUCKETS, TTFT_BUCKETS

TESTS = sorted((ROOT / "tests/operator/alerts").glob("*.yaml"))
Rule = dict[str, Any]


def rules(groups: Any) -> dict[str, Rule]:
    """Rules by the name of their alert; a change of one changes `groups`."""
    return {rule["alert"]: rule for group in groups["groups"] for rule in group["rules"] if "alert" in rule}


ALERTS = rules(yaml.safe_load((CHART / "rules/skiff.yaml").read_text()))


@pytest.fixture(scope="module")
def promtool() -> str:
    """The promtool program."""
    return tool("promtool-path")


def run(promtool: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool."""
    return subprocess.run([promtool, *words], capture_output=True, text=True, check=False, timeout=60)


def run_tests(promtool: str, groups: Any, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run every test of TESTS with other rules than those that it names: of the groups that it tests, to save time."""
    copies = []
    for path in TESTS:
        case = yaml.safe_load(path.read_text())
        tested = {each["alertname"] for test in case["tests"] for each in test["alert_rule_test"]}
        needed = [group for group in groups["groups"] if rules({"groups": [group]}).keys() & tested]
        case["rule_files"] = [f"rules-{path.name}"]
        (folder / f"rules-{path.name}").write_text(yaml.safe_dump({"groups": needed}))
        copies.append(folder / f"test-{path.name}")
        copies[-1].write_text(yaml.safe_dump(case))
    return run(promtool, "test", "rules", *copies)


def test_promtool_accepts_the_rules(promtool: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(alert_rules()))
    done = run(promtool, "check", "rules", tmp_path / "rules.yaml")
    assert done.returncode == 0 and "${" not in (tmp_path / "rules.yaml").read_text(), done.stderr


def test_each_alert_fires_when_it_should_and_only_then(promtool: str, tmp_path: Path) -> None:
    done = run_tests(promtool, alert_rules(), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_objectives_are_values_of_the_chart(promtool: str, tmp_path: Path) -> None:
    """With these, the alerts on slow first tokens and on failing requests do not fire where their tests want them to."""
    lenient = [
        "monitoring.objectives.errors.objective:=0.95",
        "monitoring.objectives.ttft.thresholdSeconds:=60",
    ]
    done = run_tests(promtool, alert_rules(*lenient), tmp_path)
    failed = set(re.findall(r"alertname: (\w+), time: \S+,", done.stdout + done.stderr))
    assert failed == {
        f"Skiff{name}BudgetBurn{speed}" for name in ("Error", "TTFT") for speed in ("Fast", "Slow")
    }
    with pytest.raises(HelmError, match="thresholdSeconds"):
        alert_rules("monitoring.objectives.itl.thresholdSeconds:=0.3")


def test_thresholds_are_bounds_of_the_histograms() -> None:
    values = json.loads((CHART / "values.schema.json").read_text())["properties"]["monitoring"]["properties"]
    for name, buckets in (("ttft", TTFT_BUCKETS), ("itl", ITL_BUCKETS)):
        allowed = values["objectives"]["properties"][name]["properties"]["thresholdSeconds"]["enum"]
        assert tuple(allowed) == buckets


def test_each_alert_is_tested_both_ways() -> None:
    firing: set[str] = set()
    silent: set[str] = set()
    for path in TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for each in case["alert_rule_test"]:
                (firing if each["exp_alerts"] else silent).add(each["alertname"])
    assert firing == silent == set(ALERTS)


def never(rule: Rule) -> None:
    rule["expr"] = "vector(0) > 1"


def inverted(rule: Rule) -> None:
    """Compare the other way round."""
    operators = {">": "<=", "==": "!="}
    rule["expr"], count = re.subn(
        r" (>|==) (?=[\d.]+)", lambda found: f" {operators[found[1]]} ", rule["expr"]
    )
    assert count


def at_once(rule: Rule) -> None:
    rule["for"] = "0s"


def later(rule: Rule) -> None:
    rule["for"] = "2h"


def for_everything(rule: Rule) -> None:
    """Lose the labels that say of what it speaks."""
    rule["expr"] = f"max({rule['expr']})"


@pytest.mark.parametrize("change", [never, inverted, at_once, later, for_everything])
def test_wrong_rules_are_found(promtool: str, tmp_path: Path, change: Callable[[Rule], None]) -> None:
    groups = alert_rules()
    for rule in rules(groups).values():
        change(rule)
    done = run_tests(promtool, groups, tmp_path)
    failed = set(re.findall(r"alertname: (\w+), time: \S+,", done.stdout + done.stderr))
    assert done.returncode != 0 and failed == set(ALERTS), done.stdout + done.stderr


def test_each_alert_is_documented() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    assert [alert for alert in ALERTS if f"`{alert}`" not in text] == []
