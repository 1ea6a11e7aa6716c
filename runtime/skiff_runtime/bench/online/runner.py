"""One measured run against a server: from a plan to its records, with progress while it lasts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import httpx
import uvloop

from skiff_runtime.bench.online.http_client import Target
from skiff_runtime.bench.online.load_generator import Due, Limits, Load
from skiff_runtime.bench.online.request_record import Exchange
from skiff_runtime.bench.workload import Sample, body
from skiff_runtime.contract import PATH_CHAT_COMPLETIONS, PATH_COMPLETIONS, PATH_MODELS
from skiff_runtime.errors import SkiffError
from skiff_runtime.progress import ProgressBar

PATHS: Final = {"chat": PATH_CHAT_COMPLETIONS, "completions": PATH_COMPLETIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is sent where. ``arrivals`` are seconds after the start, one for each sample."""

    url: str
    model: str
    endpoint: str
    samples: Sequence[Sample]
    arrivals: Sequence[float]
    temperature: float
    seed: int
    ignore_eos: bool
    limits: Limits
    key: str | None = None

    def dues(self) -> list[Due]:
        """The requests, encoded beforehand, so that sending costs no more than a write."""
        return [
            Due(
                at,
                body(
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


def served_model(url: str, *, key: str | None = None, timeout_seconds: float = 10.0) -> str:
    """The first model that the server lists; SkiffError where none answers."""
    address = url.rstrip("/") + PATH_MODELS
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        response = httpx.get(address, headers=headers, timeout=timeout_seconds, trust_env=False)
        response.raise_for_status()
        return str(json.loads(response.content)["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = "; give its --api-key" if status == httpx.codes.UNAUTHORIZED else "; correct --url"
        raise SkiffError(f"{address} answers {status}{hint}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SkiffError(f"{address} does not answer ({error}); start a server, or correct --url") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise SkiffError(f"{address} lists no model; give --model") from error


def measure(plan: Plan, *, title: str) -> tuple[Load, float]:
    """Run the plan; its records and the seconds that it took."""
    return uvloop.run(_measure(plan, title))


async def _measure(plan: Plan, title: str) -> tuple[Load, float]:
    target = Target(plan.url, PATHS[plan.endpoint], key=plan.key)
    dues = plan.dues()
    with ProgressBar(title, len(dues)) as counter:

        def note(exchange: Exchange) -> None:
            counter.advance(tokens=exchange.output_tokens, failed=bool(exchange.failure))

        load = Load(target, plan.limits, on_end=note)
        try:
            seconds = await load.run(dues)
        finally:
            target.close()
    return load, seconds
