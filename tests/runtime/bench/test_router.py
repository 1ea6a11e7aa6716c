"""`skiff bench router`: a whole run with Skiff's router and with a router that fails requests, and its flags."""

import json
import sys
from pathlib import Path

import pytest

from skiff_runtime.bench.router.processes import expand
from skiff_runtime.errors import ConfigError

FORWARDER = """
import asyncio, itertools, sys

async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
    except OSError:
        pass
    writer.close()

async def main(port, *urls):
    pods = itertools.cycle(int(url.rpartition(":")[2]) for url in urls)
    async def serve(reader, writer):
        try:
            upstream = await asyncio.open_connection("127.0.0.1", next(pods))
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, upstream[1]), copy(upstream[0], writer))
    async with await asyncio.start_server(serve, "127.0.0.1", int(port)) as server:
        await server.serve_forever()

asyncio.run(main(*sys.argv[1:]))
"""
"""It passes connections on in turns, and neither retries nor tells a client anything."""


def run(*flags: str) -> int:
    from skiff_runtime.__main__ import main

    return main(["bench", "router", *flags])


def test_table_of_two_routers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, output = tmp_path / "forwarder.py", tmp_path / "out.json"
    script.write_text(FORWARDER)
    peer = f"forwarder={sys.executable} {script} {{port}} {{urls}}"
    flags = ["--seconds", "0.3", "--first-bytes", "20", "--output-json", str(output)]
    assert run("--router", "skiff,forwarder", "--peer", peer, *flags) == 0
    shown = capsys.readouterr().out
    assert "forwarder" in shown and "us/request" in shown
    skiff, forwarder = (json.loads(output.read_text())[name] for name in ("skiff", "forwarder"))
    for found in (skiff, forwarder):
        assert found["request_us"] > 0 and all(each > 0 for each in found["event_us"].values())
        assert found["memory_bytes"] > 1e6
        assert sum(found["faults"]["endings"].values()) == 40
        assert 0 <= found["routing"]["hits"] <= 1 and found["routing"]["imbalance"] >= 1
    assert skiff["faults"]["failed"] == skiff["faults"]["unanswered"] == 0
    assert skiff["faults"]["endings"].keys() == {"complete", "error event"}
    assert skiff["faults"]["revival_seconds"] is not None
    assert skiff["routing"]["hits"] > 0.6, "a prefix goes to the pod that has it"
    assert forwarder["faults"]["endings"].keys() == {"complete", "cut"}
    assert forwarder["faults"]["failed"] > 0


def test_router_that_does_not_start_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        run("--router", "dead", "--peer", f"dead={sys.executable} -c 'raise SystemExit(\"no licence\")'") == 1
    )
    shown = capsys.readouterr().out
    assert "dead did not serve a request" in shown and "no licence" in shown


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--router", "envoy"], "--router envoy is not known"),
        (["--router", "a", "--peer", "a=/no/such/file {port}"], "--router a is not installed"),
        (["--peer", "a="], "must be NAME=COMMAND"),
    ],
)
def test_bad_flags(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*flags) == 2
    captured = capsys.readouterr()
    assert says in captured.out + captured.err


def test_names_in_a_command(tmp_path: Path) -> None:
    words = expand("r --port {port} --urls {urls}", port=1, backends=[2, 3], directory=tmp_path)
    assert words == ["r", "--port", "1", "--urls", "http://127.0.0.1:2", "http://127.0.0.1:3"]
    with pytest.raises(ConfigError, match=r"none of port, metrics_port, urls"):
        expand("r {ports}", port=1, backends=[2], directory=tmp_path)
