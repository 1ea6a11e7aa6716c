"""The chart's alert rules, evaluated by promtool over the series of tests/operator/alerts; the tests there can fail."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import CHART, ROOT
from kube import tool

RULES = CHART / "rules/skiff.yaml"
TESTS = sorted((ROOT / "tests/operator/alerts").glob("*.yaml"))
Rule = dict[str, Any]


def rules(groups: Any) -> dict[str, Rule]:
    """Rules by the name of their alert; a change of one changes `groups`."""
    return {rule["alert"]: rule for group in groups["groups"] for rule in group["rules"]}


ALERTS = rules(yaml.safe_load(RULES.read_text()))


@pytest.fixture(scope="module")
def promtool() -> str:
    """The promtool program."""
    return tool("promtool-path")


def run(promtool: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool."""
    return subprocess.run([promtool, *words], capture_output=True, text=True, check=False, timeout=60)


def test_promtool_accepts_the_rules(promtool: str) -> None:
    done = run(promtool, "check", "rules", RULES)
    assert done.returncode == 0, done.stderr


def test_each_alert_fires_when_it_should_and_only_then(promtool: str) -> None:
    done = run(promtool, "test", "rules", *TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


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
    assert count == 1


def at_once(rule: Rule) -> None:
    rule["for"] = "0s"


def later(rule: Rule) -> None:
    rule["for"] = "2h"


def for_everything(rule: Rule) -> None:
    """Lose the labels that say of what it speaks."""
    rule["expr"] = f"max({rule['expr']})"


@pytest.mark.parametrize("change", [never, inverted, at_once, later, for_everything])
def test_wrong_rules_are_found(promtool: str, tmp_path: Path, change: Callable[[Rule], None]) -> None:
    groups = yaml.safe_load(RULES.read_text())
    for rule in rules(groups).values():
        change(rule)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(groups))
    copies = []
    for path in TESTS:
        case = yaml.safe_load(path.read_text())
        case["rule_files"] = ["rules.yaml"]
        copies.append(tmp_path / f"test-{path.name}")
        copies[-1].write_text(yaml.safe_dump(case))
    done = run(promtool, "test", "rules", *copies)
    failed = set(re.findall(r"alertname: (\w+), time: \S+,", done.stdout + done.stderr))
    assert done.returncode != 0 and failed == set(ALERTS), done.stdout + done.stderr


def test_each_alert_is_documented() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    assert [alert for alert in ALERTS if f"`{alert}`" not in text] == []
