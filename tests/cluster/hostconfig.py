"""Host configuration for image builds: package mirrors and certificate authorities.

They are handed to builds as secrets, which exist only while a step runs, so that none of it lands in an image.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import ssl
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from commands import ClusterError, output

SUITE = "trixie"
CA_SECRET = "/run/secrets/ca.crt"
CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
PIP_SETTINGS = (
    "index-url",
    "extra-index-url",
    "trusted-host",
    "proxy",
    "default-timeout",
    "timeout",
    "retries",
)


def debian_mirror() -> str | None:
    """Return the Debian mirror that apt uses here, or None if this is not Debian or apt has none.

    Without one, debootstrap and Debian's own images use their defaults.
    """
    if "ID=debian" not in _os_release() or shutil.which("apt-get") is None:
        return None
    mirrors = output(["apt-get", "indextargets", "--format", "$(REPO_URI)"]).splitlines()
    return mirrors[0].rstrip("/") if mirrors else None


def apt_sources() -> str:
    """Return a sources.list with this machine's mirror, or nothing where the image's own sources have to do."""
    mirror = debian_mirror()
    return f"deb {mirror} {SUITE} main\n" if mirror else ""


def _os_release() -> list[str]:
    release = Path("/etc/os-release")
    return release.read_text().splitlines() if release.exists() else []


def ca_bundle() -> Path | None:
    """Return the file of certificate authorities that programs here trust, or None when there is none."""
    named = [os.environ.get(name) for name in CA_VARIABLES]
    candidates = [*named, "/etc/ssl/certs/ca-certificates.crt", ssl.get_default_verify_paths().cafile]
    return next((Path(each) for each in candidates if each and Path(each).is_file()), None)


def pip_configuration() -> str:
    """Return a pip.conf with this machine's indexes; folders of this machine do not exist in a build and are left out."""
    settings: dict[str, str] = {}
    with contextlib.suppress(ClusterError):
        for line in output([sys.executable, "-m", "pip", "config", "list"]).splitlines():
            match = re.fullmatch(r"(?:\S+?\.)\.?(\S+?)='(.*)'", line)
            if match and match[1] in PIP_SETTINGS:
                settings[match[1]] = match[2].replace("\\n", "\n  ")
    if ca_bundle():
        settings["cert"] = CA_SECRET
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(settings.items()))


def apt_configuration() -> str:
    """Return apt's settings for a build: the certificate authorities and this machine's proxies."""
    lines = [f'Acquire::https::CAInfo "{CA_SECRET}";'] if ca_bundle() else []
    if shutil.which("apt-config"):
        proxies = output(["apt-config", "dump", "Acquire::http::Proxy", "Acquire::https::Proxy"])
        lines += [line for line in proxies.splitlines() if not line.endswith('"";')]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def secrets() -> Iterator[dict[str, Path]]:
    """Write the secrets of a build into a private folder for the length of the block; yields their files by id."""
    bundle = ca_bundle()
    texts = {
        "pip.conf": pip_configuration(),
        "apt.conf": apt_configuration(),
        "apt.list": apt_sources(),
        "ca.crt": bundle.read_text() if bundle else "",
    }
    with tempfile.TemporaryDirectory(prefix="skiff-build-") as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text)
        yield {name: Path(folder) / name for name in texts}
