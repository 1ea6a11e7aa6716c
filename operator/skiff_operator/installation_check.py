"""Check of an installation, which `helm test` runs in a pod: `python -m skiff_operator.installation_check`.

It runs as the operator's ServiceAccount and checks two things: the API server serves InferenceServices to that
account, and an operator behind the metrics Service is the leader and resyncs.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Final

import aiohttp
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from skiff_operator.client import Client, configure
from skiff_operator.errors import OperatorError
from skiff_operator.kinds import INFERENCE_SERVICE
from skiff_runtime import contract

TIMEOUT_SECONDS: Final = 60.0
"""Longer than the start of an operator. The Service picks one of several replicas, so several requests may be needed."""
_RETRY_SECONDS: Final = 0.5
_REQUEST: Final = aiohttp.ClientTimeout(total=5)


async def check_api(namespaces: Sequence[str]) -> None:
    """List InferenceServices where the operator does.

    Raises:
        OperatorError: the definition is missing, or the operator's role does not allow it.
    """
    client = Client(await configure(), connections=1)
    try:
        paths = [INFERENCE_SERVICE.path(namespace) for namespace in namespaces] or [INFERENCE_SERVICE.path()]
        for path in paths:
            await client.request("GET", path, query={"limit": "1"})
    finally:
        await client.close()


async def check_leader(url: str) -> None:
    """Wait until an operator leads and has finished a resync.

    Raises:
        OperatorError: none did in time; the message contains the last observation.
    """
    seen = "nothing"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            # A connection of its own for each request, so that the Service chooses among the replicas anew.
            async with aiohttp.ClientSession(timeout=_REQUEST) as session, session.get(url) as reply:
                reply.raise_for_status()
                values = gauges(await reply.text())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            seen = repr(error)
        else:
            wanted = (contract.OPERATOR_LEADER, contract.OPERATOR_LAST_RESYNC)
            if all(values.get(name, 0) > 0 for name in wanted):
                return
            seen = ", ".join(f"{name} {values.get(name, 'absent')}" for name in wanted)
        await asyncio.sleep(_RETRY_SECONDS)
    raise OperatorError(f"no operator leads at {url}; last seen: {seen}")


def gauges(page: str) -> dict[str, float]:
    """Return the samples without labels of a page of metrics."""
    families = text_string_to_metric_families(page)
    return {each.name: each.value for family in families for each in family.samples if not each.labels}


async def check(namespaces: Sequence[str], metrics_url: str) -> None:
    """Run both checks and print a line for each. Raises OperatorError."""
    await check_api(namespaces)
    print("ok: the API server serves InferenceServices to the operator's account")
    await check_leader(metrics_url)
    print("ok: an operator leads and works")


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: 0 success, 1 failure."""
    parser = argparse.ArgumentParser(prog="skiff_operator.installation_check", description=__doc__)
    parser.add_argument("--metrics-url", required=True, help="page of metrics of the operator's Service")
    parser.add_argument("--namespaces", default="", help="those that it serves, separated by commas (all)")
    arguments = parser.parse_args(argv)
    namespaces = [each for each in arguments.namespaces.split(",") if each]
    try:
        uvloop.run(check(namespaces, arguments.metrics_url))
    except OperatorError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
