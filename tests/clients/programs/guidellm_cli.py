import json
from pathlib import Path

import scenarios as skiff


def benchmark(path: str) -> dict[str, float]:
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": skiff.QUESTION}) for _ in range(8)))
    report = Path(f"report-{path.replace('/', '-')}.json")
    skiff.run_command(
        [
            "guidellm",
            "run",
            "--backend",
            f"kind=openai_http,target={skiff.DEMO_URL},request_format=/v1/{path}",
            "--profile",
            "kind=concurrent,streams=2",
            "--constraint",
            "kind=max_requests,count=8",
            "--data",
            "kind=json_file,path=prompts.jsonl",
            "--output",
            f"kind=json,path={report}",
            "--disable-progress",
        ]
    )
    [found] = json.loads(report.read_text())["benchmarks"]
    totals: dict[str, float] = found["metrics"]["request_totals"]
    return totals


def chat() -> None:
    totals = benchmark("chat/completions")
    skiff.check(totals["successful"] == 8 and totals["errored"] == 0, totals)


def completions() -> None:
    totals = benchmark("completions")
    skiff.check(totals["successful"] == 8 and totals["errored"] == 0, totals)


skiff.run_scenarios(chat, completions)
