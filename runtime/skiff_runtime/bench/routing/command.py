"""The command ``skiff bench routing``: its flags, and the tables that it prints."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from skiff_runtime.bench.flag_types import positive_float, positive_int
from skiff_runtime.bench.report import make_table, write_json
from skiff_runtime.bench.routing.sessions import WORKLOADS
from skiff_runtime.bench.routing.simulation import POLICIES, Cluster, ClusterSpec, Outcome
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import ConfigError

MAX_PODS: Final = 1024
MAX_ROUTERS: Final = 16
DESCRIPTION: Final = """\
Simulate a cluster, and compare the router's policies with those of others.

Everything that decides is real: the router's own policy code and its view of the pods,
which is as old as their events are; and in each pod the radix cache with as many pages as
an H200 has for Llama-3.1-8B. Only the time of a step is a formula, fitted to measurements
on an H200, and the scheduler is reduced to first come, first served with chunked prefill.
Nothing waits: a simulated minute of 16 pods takes about half a minute. Equal flags give
equal figures."""
EPILOG: Final = f"""\
workloads (--workload):
{chr(10).join(f"  {name:<16}{kind.text}; {kind.requests_per_second:g} requests/s a pod" for name, kind in WORKLOADS.items())}

policies (--policy):
  prefix          Skiff's default: least expected seconds to the first token
  random, round-robin
  least-request   fewest requests in flight (Skiff's least-load)
  consistent-hash with bounded loads, by the first 100 characters (KubeAI)
  endpoint-picker Gateway API's default weights: queue 2, KV cache 2, prefix 3
  oracle          exact and immediate knowledge of every pod; no router can have it

columns:
  TTFT            time from a request's arrival to its first token, after the warm-up
  hits            prompt tokens that were cached, of all
  tokens/s        output tokens of requests that arrived after the warm-up and ended in time
  imbalance       requests that the busiest pod served, divided by the mean

examples:
  skiff bench routing                                      16 pods, all workloads
  skiff bench routing --pods 64 --workload agents --policy prefix,oracle
  skiff bench routing --pods 4 --rate 1.3                  more than such a cluster can take
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench routing``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pods", type=positive_int, default=16, metavar="N", help="1 to 1024 (default: 16)")
    parser.add_argument(
        "--routers",
        type=positive_int,
        default=2,
        metavar="N",
        help="routers that share the requests and do not talk to each other, 1 to 16 (default: 2)",
    )
    parser.add_argument(
        "--workload",
        default=",".join(WORKLOADS),
        metavar="NAME,...",
        help="(default: all)",
    )
    parser.add_argument("--policy", default=",".join(POLICIES), metavar="NAME,...", help="(default: all)")
    parser.add_argument(
        "--rate",
        type=positive_float,
        default=1.0,
        metavar="FACTOR",
        help="factor on the workload's requests a second (default: 1)",
    )
    parser.add_argument(
        "--seconds",
        type=positive_float,
        default=60.0,
        metavar="SECONDS",
        help="simulated time in which requests arrive; the first half is the warm-up, 20 or more for a warm cluster (default: 60)",
    )
    parser.add_argument(
        "--kv-tokens",
        type=positive_int,
        default=800_000,
        metavar="N",
        help="tokens in the KV cache of a pod (default: 800000)",
    )
    parser.add_argument("--seed", type=positive_int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="also write the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the simulations and print their figures. Raises ConfigError for a flag that is out of range."""
    workloads = _parse_names(arguments.workload, "--workload", tuple(WORKLOADS))
    policies = _parse_names(arguments.policy, "--policy", POLICIES)
    for flag, value, limit in (
        ("--pods", arguments.pods, MAX_PODS),
        ("--routers", arguments.routers, MAX_ROUTERS),
    ):
        if value > limit:
            raise ConfigError(f"{flag} {value} is more than {limit}")
    console = Console(highlight=False)
    runs: list[dict[str, Any]] = []
    for workload in workloads:
        spec = ClusterSpec(
            pods=arguments.pods,
            routers=arguments.routers,
            workload=workload,
            rate=WORKLOADS[workload].requests_per_second * arguments.rate,
            seconds=arguments.seconds,
            seed=arguments.seed,
            kv_tokens=arguments.kv_tokens,
        )
        console.print(
            f"\n{workload}: {WORKLOADS[workload].text}; {spec.pods} pods, {spec.rate:g} requests/s each"
        )
        rows = []
        for policy in policies:
            figures = summarize(Cluster(spec, policy).run())
            runs.append({"policy": policy, "spec": asdict(spec), **figures})
            rows.append(
                (
                    policy,
                    f"{figures['ttft_ms']['p50']:.1f}",
                    f"{figures['ttft_ms']['p99']:.1f}",
                    f"{figures['hit_rate']:.1%}",
                    f"{figures['output_tokens_per_second']:,.0f}",
                    f"{figures['imbalance']:.2f}",
                )
            )
        heads = ("", "TTFT p50, ms", "p99", "hits", "tokens/s", "imbalance")
        console.print(make_table(heads, rows))
    if arguments.output_json is not None:
        write_json(arguments.output_json, {"benchmark": "routing", "runs": runs})
    return EXIT_OK


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of one simulation. Raises ConfigError if no request came after the warm-up."""
    if not outcome.ttft_seconds:
        raise ConfigError("no request came after the warm-up; set a longer --seconds or a larger --rate")
    milliseconds = np.array(outcome.ttft_seconds) * 1e3
    return {
        "requests": outcome.requests,
        "ttft_ms": {f"p{point}": float(np.percentile(milliseconds, point)) for point in (50, 90, 99)},
        "hit_rate": outcome.hit_rate,
        "output_tokens_per_second": outcome.output_tokens / outcome.seconds,
        "imbalance": outcome.imbalance,
    }


def _parse_names(text: str, flag: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} {name!r} is not one of {', '.join(known)}")
    return names
