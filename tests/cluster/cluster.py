"""A Kubernetes to test on, from the command line: `python3 tests/cluster/cluster.py up`, `... --help` for the rest.

Progress goes to stderr and answers (a path, an image's name) to stdout.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import controlplane
import debian
import delivery
import toolchain
from commands import ClusterError, locked, output, say, step
from paths import Layout, layout
from providers import choose, made

PATHS = ("kubectl", "helm", "helm-docs", "prometheus", "promtool", "prometheus-operator-crds")
SOURCES = tuple(tool.name for tool in toolchain.MODEL_SOURCES)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(
        prog="cluster.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    up = commands.add_parser(
        "up", help="bring a cluster up, building what is missing; fine when it is up already"
    )
    down = commands.add_parser("down", help="take it down and leave the machine as it was")
    for each in (up, down):
        each.add_argument(
            "--control-plane-only", action="store_true", help="no node: needs neither root nor Docker"
        )
        each.add_argument("--state", type=Path, help="with --control-plane-only: the folder of its files")
    down.add_argument(
        "--purge", action="store_true", help="also remove the cache of built binaries and images"
    )
    commands.add_parser("kubeconfig", help="print the path of the cluster's kubeconfig")
    built = commands.add_parser("images", help="build images and bring them to the cluster if it is up")
    built.add_argument("names", nargs="*", help=f"of {', '.join(delivery.NAMES)} (default: the first two)")
    image = commands.add_parser("image", help="print the name by which the cluster knows an image")
    image.add_argument("name", choices=sorted(delivery.NAMES))
    commands.add_parser(
        "tools", help="fetch or build what `make test-integration` needs: control plane, helm, prometheus"
    )
    for name in (*PATHS, *SOURCES):
        commands.add_parser(f"{name}-path", help=f"print the path of {name}, fetched or built if need be")
    return top


def up(paths: Layout) -> None:
    """Bring a cluster up and say where its kubeconfig is."""
    provider = choose(paths)
    provider.up()
    print(provider.kubeconfig)


def down(paths: Layout, *, purge: bool) -> None:
    """Take the cluster down; say what of the cache remains."""
    provider = made(paths)
    if provider is not None:
        provider.down()
    if purge:
        with step(f"removing {paths.root}"):
            shutil.rmtree(paths.root)
        return
    if paths.bin.exists():
        size = output(["du", "-sh", paths.root], timeout_seconds=300).split()[0]
        say(
            f"no cluster is left; {paths.root} keeps what was built ({size}): `cluster.py down --purge` removes it"
        )


def control_plane(arguments: argparse.Namespace) -> None:
    """Start or stop a control plane that outlives this command."""
    if arguments.state is None:
        raise ClusterError("--control-plane-only needs --state DIR, a folder for its files")
    folder = arguments.state.resolve()
    plane = controlplane.ControlPlane(folder, with_parent=False)
    plane.stop()
    if arguments.command == "down":
        return shutil.rmtree(folder, ignore_errors=True)
    plane.start()
    return print(plane.kubeconfig)


def kubeconfig(paths: Layout) -> Path:
    """Return the path of the kubeconfig of the cluster that is up; raises ClusterError when there is none."""
    provider = choose(paths)
    if not provider.kubeconfig.exists():
        raise ClusterError("no cluster is up: `make cluster` brings one up")
    return provider.kubeconfig


def program(name: str, paths: Layout) -> Path:
    """Return the path of one of PATHS or SOURCES."""
    if name in SOURCES:
        return toolchain.model_source(name, paths)
    builders = {
        "kubectl": toolchain.kubectl,
        "helm": toolchain.helm,
        "helm-docs": toolchain.helm_docs,
        "prometheus-operator-crds": toolchain.prometheus_operator_crds,
    }
    return builders[name](paths) if name in builders else debian.prometheus(paths)[name]


def tools(paths: Layout) -> None:
    """Make every program that the integration tests start ready, so that no test waits for a build."""
    debian.ensure(debian.CONTROL_PLANE_PACKAGES, paths)
    for name in controlplane.PROGRAMS:
        controlplane.binary(name)
    for name in PATHS:
        program(name, paths)


def run(arguments: argparse.Namespace) -> None:
    """Carry out one command."""
    paths = layout()
    if arguments.command == "kubeconfig":
        return print(kubeconfig(paths))
    if arguments.command == "image":
        return print(delivery.reference(arguments.name, paths, choose(paths)))
    if getattr(arguments, "control_plane_only", False):
        return control_plane(arguments)
    with locked(paths.lock):
        if arguments.command == "up":
            up(paths)
        elif arguments.command == "down":
            down(paths, purge=arguments.purge)
        elif arguments.command == "images":
            delivery.deliver(paths, choose(paths), arguments.names or delivery.PRODUCT)
        elif arguments.command == "tools":
            tools(paths)
        else:
            print(program(arguments.command.removesuffix("-path"), paths))
    return None


def main() -> int:
    """Run the command line; 1 with a message when it cannot be done."""
    try:
        run(parser().parse_args())
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
