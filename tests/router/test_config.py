"""The command line of the router: an option that cannot be used is refused by its name."""

import argparse
from pathlib import Path

import pytest

from skiff_router.config import RouterConfig, add_arguments, from_arguments
from skiff_router.server import RouterServer
from skiff_runtime.errors import ConfigError

BACKEND = "--backend=a=http://127.0.0.1:1"
LIMITED = (BACKEND, "--api-key-file=/keys", "--limits-file=/limits")


def parse(*words: str) -> RouterConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either --kubernetes, or at least one --backend"),
        (("--kubernetes", BACKEND), "either --kubernetes, or at least one --backend"),
        (("--backend=a=https://x",), "--backend 'a=https://x' is not"),
        ((BACKEND, "--namespace=shop"), "--namespace without --kubernetes"),
        (("--kubernetes", "--namespace=a/b"), "--namespace 'a/b' is not"),
        (("--kubernetes", *(f"--namespace=n{each}" for each in range(65))), "--namespace is given 65 times"),
        ((BACKEND, "--port=65536"), "--port 65536"),
        ((BACKEND, "--max-connections=0"), "--max-connections must be at least 1"),
        ((BACKEND, "--limits-file=/limits"), "--limits-file without --api-key-file"),
        ((BACKEND, "--peers=a:1"), "--peers without --limits-file"),
        ((*LIMITED, "--peers=http://a:1"), "--peers 'http://a:1' is not HOST:PORT"),
        ((*LIMITED, "--peers=a:0"), "--peers 'a:0' is not HOST:PORT"),
        ((*LIMITED, *(f"--peers=a:{port + 1}" for port in range(17))), "--peers is given 17 times"),
        ((BACKEND, "--backend-api-key-file=/key"), "--backend-api-key-file without --api-key-file"),
        ((BACKEND, "--api-key-file=/keys", "--backend-api-key-file=/none"), "/none cannot be read"),
    ],
)
def test_unusable_option_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words)


def test_options_are_kept() -> None:
    config = parse(*LIMITED, "--usage-log=-", "--peers=routers:8080", "--peers=[::1]:8081")
    assert config.peers == (("routers", 8080), ("::1", 8081))
    assert (config.api_key_file, config.limits_file, config.usage_log) == ("/keys", "/limits", "-")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--limits-file={0}/none",), "--limits-file .*none cannot be read"),
        (("--limits-file={0}/keys",), "--limits-file .*keys: "),
        (("--usage-log={0}/none/usage",), "--usage-log .*none/usage cannot be written"),
    ],
)
def test_unusable_file_is_refused_at_the_start(
    tmp_path: Path, changes: tuple[str, ...], message: str
) -> None:
    (tmp_path / "keys").write_text("team: key\n")
    words = [word.format(tmp_path) for word in changes]
    with pytest.raises(ConfigError, match=message):
        RouterServer(parse(BACKEND, f"--api-key-file={tmp_path}/keys", *words))
