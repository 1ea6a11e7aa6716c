"""Installation of CustomResourceDefinitions by the chart's hook: `python -m skiff_operator.install_crd FILE...`.

A definition belongs to the cluster and not to a Helm release. Server-side apply creates it, takes over an existing
one, and upgrades it; a newer one stays, so that an older release does not remove fields.
"""

import argparse
import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
import uvloop

from skiff_operator import log
from skiff_operator.client import Client, configure
from skiff_operator.errors import ApiNotFound, ApiRefused, ApiUnavailable, OperatorError

COLLECTION: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
VERSION_LABEL: Final = "app.kubernetes.io/version"
FIELD_MANAGER: Final = "skiff-crd"
TIMEOUT_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 1.0
_TRANSIENT: Final = (403, 404, 409)
"""The role of the hook is not in force yet, or the definition was deleted or changed concurrently."""
_APPLY: Final = "application/apply-patch+yaml"


def version(body: dict[str, Any]) -> tuple[int, ...]:
    """Return the release version of a definition; an unlabelled one counts as older than any."""
    label = body["metadata"].get("labels", {}).get(VERSION_LABEL, "")
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", label)
    return tuple(map(int, match.groups())) if match else ()


async def install(client: Client, body: dict[str, Any]) -> str:
    """Apply the definition, unless the cluster has a newer one, and wait until the API server serves it.

    Returns a line that describes the action taken.

    Raises:
        ApiUnavailable: the existing definition is being deleted.
        OperatorError: the API server refused it.
    """
    path = f"{COLLECTION}/{body['metadata']['name']}"
    try:
        live = await client.request("GET", path)
    except ApiNotFound:
        live = None
    if live is not None and "deletionTimestamp" in live["metadata"]:
        raise ApiUnavailable(
            "the definition is being deleted"
        )  # with all InferenceServices; it comes back afterwards
    if live is not None and version(live) > version(body):
        found = live["metadata"]["labels"][VERSION_LABEL]
        return f"the CustomResourceDefinition of version {found} is newer and stays"
    query = {"fieldManager": FIELD_MANAGER, "force": "true"}
    await client.request("PATCH", f"{path}?{urlencode(query)}", body, content_type=_APPLY)
    while True:
        conditions = (await client.request("GET", path)).get("status", {}).get("conditions") or []
        status = {each["type"]: each for each in conditions}
        if status.get("NamesAccepted", {}).get("status") == "False":
            raise OperatorError(f"its names are taken: {status['NamesAccepted'].get('message', '')}")
        if status.get("Established", {}).get("status") == "True":
            return "the CustomResourceDefinition is installed"
        await asyncio.sleep(_RETRY_SECONDS / 10)


async def install_patiently(body: dict[str, Any]) -> str:
    """Install, with retries of transient failures.

    Raises:
        OperatorError: it was refused, or did not succeed in time.
    """
    client = Client(await configure(), connections=1)
    last: OperatorError = OperatorError("the definition was not served in time")
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                try:
                    return await install(client, body)
                except (ApiUnavailable, ApiRefused) as error:
                    if isinstance(error, ApiRefused) and error.status not in _TRANSIENT:
                        raise
                    last = error
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise last from None
    finally:
        await client.close()


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: 0 installed or newer already, 1 refused."""
    parser = argparse.ArgumentParser(prog="skiff_operator.install_crd", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="file", help="a definition as JSON")
    bodies: list[dict[str, Any]] = [
        msgspec.json.decode(file.read_bytes()) for file in parser.parse_args(argv).files
    ]
    log.configure("info")
    for body in bodies:
        extra = {"definition": body["metadata"]["name"]}
        try:
            done = uvloop.run(install_patiently(body))
        except OperatorError as error:
            log.logger.error("the definition is not installed", extra={**extra, "error": str(error)})
            return 1
        log.logger.info(done, extra=extra)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
