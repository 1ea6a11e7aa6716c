"""One run of load against a server: encodes the requests, sends them, and shows the progress."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import httpx
import uvloop

from skiff_runtime.bench.online.http_client import HttpClient
from skiff_runtime.bench.online.load_generator import LoadGenerator, LoadLimits, ScheduledRequest
from skiff_runtime.bench.online.request_record import RequestRecord
from skiff_runtime.bench.workload import SampleRequest, encode_body
from skiff_runtime.contract import PATH_CHAT_COMPLETIONS, PATH_COMPLETIONS, PATH_MODELS
from skiff_runtime.errors import SkiffError
from skiff_runtime.progress import ProgressBar

CHAT: Final = "openai-chat"
COMPLETIONS: Final = "openai"
PATHS: Final = {COMPLETIONS: PATH_COMPLETIONS, CHAT: PATH_CHAT_COMPLETIONS}
"""Path of each ``--backend``, by vLLM's names for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The requests of a run, and the server. ``arrivals`` are seconds after the start, one for each sample."""

    url: str
    model: str
    backend: str
    samples: Sequence[SampleRequest]
    arrivals: Sequence[float]
    temperature: float
    seed: int
    ignore_eos: bool
    limits: LoadLimits
    key: str | None = None

    def encode(self) -> list[ScheduledRequest]:
        """Encode all requests, before the run, so that sending one costs no more than a write."""
        return [
            ScheduledRequest(
                at,
                encode_body(
                    sample,
                    model=self.model,
                    temperature=self.temperature,
                    seed=self.seed + index,
                    ignore_eos=self.ignore_eos,
                ),
                sample.output_tokens if self.ignore_eos else None,
            )
            for index, (at, sample) in enumerate(zip(self.arrivals, self.samples, strict=True))
        ]


def fetch_served_model(url: str, *, key: str | None = None, timeout_seconds: float = 10.0) -> str:
    """Return the name of the first model that the server lists. Raises SkiffError if it lists none."""
    address = url.rstrip("/") + PATH_MODELS
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        response = httpx.get(address, headers=headers, timeout=timeout_seconds, trust_env=False)
        response.raise_for_status()
        return str(json.loads(response.content)["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = "; give its --api-key" if status == httpx.codes.UNAUTHORIZED else "; correct --base-url"
        raise SkiffError(f"{address} answers {status}{hint}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SkiffError(
            f"{address} does not answer ({error}); start a server, or correct --base-url"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise SkiffError(f"{address} lists no model; give --model") from error


def run_load(plan: LoadPlan, *, title: str) -> tuple[LoadGenerator, float]:
    """Run a plan. Returns the load generator, with its records, and the duration in seconds."""
    return uvloop.run(_run_load(plan, title))


async def _run_load(plan: LoadPlan, title: str) -> tuple[LoadGenerator, float]:
    client = HttpClient(plan.url, PATHS[plan.backend], key=plan.key)
    requests = plan.encode()
    with ProgressBar(title, len(requests)) as counter:

        def count(record: RequestRecord) -> None:
            counter.advance(tokens=record.output_tokens, failed=bool(record.failure))

        generator = LoadGenerator(client, plan.limits, on_end=count)
        try:
            seconds = await generator.run(requests)
        finally:
            client.close()
    return generator, seconds
