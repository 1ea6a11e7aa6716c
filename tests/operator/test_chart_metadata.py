"""The chart as a package: its README, made by helm-docs from the values, and its annotations for Artifact Hub."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import CHART, Helm
from kube import tool

import skiff_runtime

pytestmark = pytest.mark.integration

METADATA = yaml.safe_load((CHART / "Chart.yaml").read_text())


@pytest.fixture(scope="module")
def bodies() -> list[Any]:
    """The chart's objects by its defaults."""
    return Helm().render()


def annotation(name: str) -> Any:
    """An annotation of Artifact Hub whose value is YAML."""
    return yaml.safe_load(METADATA["annotations"][f"artifacthub.io/{name}"])


def test_the_readme_is_what_helm_docs_makes_of_the_values() -> None:
    """`make chart-readme` writes it."""
    command = [
        tool("helm-docs-path"),
        "--chart-search-root",
        str(CHART.parent),
        "--sort-values-order",
        "file",
    ]
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True)
    assert (CHART / "README.md").read_text().strip() == done.stdout.strip()


def test_every_value_is_described() -> None:
    rows = [
        line.split("|") for line in (CHART / "README.md").read_text().splitlines() if line.startswith("| ")
    ]
    described = {row[1].strip(): row[4].strip() for row in rows}
    assert described.pop("Key") == "Description"
    assert [key for key, text in described.items() if not text.endswith(".")] == []

    def leaves(values: Any, prefix: str = "") -> list[str]:
        found: list[str] = []
        for key, value in values.items():
            path = f"{prefix}{key}"
            nested = isinstance(value, dict) and value and path not in described
            found += leaves(value, f"{path}.") if nested else [path]
        return found

    assert leaves(yaml.safe_load((CHART / "values.yaml").read_text())) == list(described)


def test_versions_are_the_packages() -> None:
    assert METADATA["version"] == METADATA["appVersion"] == skiff_runtime.__version__


def test_artifact_hub_lists_the_images_that_are_run(bodies: list[Any]) -> None:
    (deployment,) = (body for body in bodies if body["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    images = {container["image"]}
    images |= {each["value"] for each in container["env"] if "RUNTIME_IMAGE" in each["name"]}
    assert {each["image"] for each in annotation("images")} == images


def test_artifact_hub_lists_the_definitions_and_an_example_that_one_accepts() -> None:
    crds = {crd["metadata"]["name"]: crd for crd in map(yaml.safe_load, read_crds())}
    listed = {each["name"]: each for each in annotation("crds")}
    assert listed.keys() == crds.keys()
    for name, crd in crds.items():
        assert listed[name]["kind"] == crd["spec"]["names"]["kind"]
        assert listed[name]["version"] == crd["spec"]["versions"][0]["name"]
    (example,) = annotation("crdsExamples")
    crd = next(each for each in crds.values() if each["spec"]["names"]["kind"] == example["kind"])
    assert example["apiVersion"] == f"{crd['spec']['group']}/{crd['spec']['versions'][0]['name']}"
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert set(schema["required"]) <= set(example["spec"]) <= set(schema["properties"])


def read_crds() -> list[str]:
    """The definitions that the chart carries."""
    return [path.read_text() for path in sorted((CHART / "files").glob("*.yaml"))]


def test_artifact_hub_reads_the_rest() -> None:
    """Kinds of changes are from a fixed list; an unknown one hides all of them."""
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert annotation("changes") and {each["kind"] for each in annotation("changes")} <= kinds
    assert annotation("license") == "Apache-2.0"
    assert annotation("operator") is True


def test_a_package_holds_what_it_needs_and_no_more(tmp_path: Path) -> None:
    Helm().run("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.iterdir()
    command = ["tar", "--list", "--gzip", "--file", str(package)]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    top = {name.split("/")[1] for name in names}
    assert top == {
        "Chart.yaml", "README.md", "dashboards", "files", "rules", "templates", "values.schema.json", "values.yaml",
        ".helmignore",
    }  # fmt: skip
