"""Keys, certificates and kubeconfigs of a test cluster: one authority signs everything."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

from commands import output

VALIDITY = ("-days", "3650")
ELLIPTIC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    """A certificate authority whose files lie in `directory`."""

    directory: Path

    @property
    def certificate(self) -> Path:
        """The authority's own certificate, in PEM."""
        return self.directory / "ca.crt"

    @property
    def key(self) -> Path:
        """The authority's private key, in PEM."""
        return self.directory / "ca.key"

    def create(self) -> None:
        """Make the authority and the pair that signs service-account tokens."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        usage = "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"
        extensions = ["-addext", usage, "-addext", "basicConstraints=critical,CA:TRUE"]
        _openssl(
            "req",
            "-x509",
            *ELLIPTIC,
            "-keyout",
            self.key,
            "-out",
            self.certificate,
            *VALIDITY,
            "-subj",
            "/CN=skiff-test",
            *extensions,
        )
        signing = self.directory / "sa.key"
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", signing)
        _openssl("ec", "-in", signing, "-pubout", "-out", self.directory / "sa.pub")

    def issue(self, name: str, subject: str, alternative_names: str = "") -> None:
        """Sign a certificate for client and server use: NAME.crt and NAME.key.

        `alternative_names` is openssl's subjectAltName, such as `DNS:localhost,IP:127.0.0.1`.
        """
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        lines = ["basicConstraints=CA:FALSE", "extendedKeyUsage=clientAuth,serverAuth"]
        if alternative_names:
            lines.append(f"subjectAltName={alternative_names}")
        extensions.write_text("\n".join(lines) + "\n")
        _openssl(
            "req", "-new", *ELLIPTIC, "-keyout", self.path(name, "key"), "-out", request, "-subj", subject
        )
        signed = self.path(name, "crt")
        _openssl(
            "x509", "-req", "-in", request, *self._signer(), *VALIDITY, "-extfile", extensions, "-out", signed
        )
        request.unlink()
        extensions.unlink()

    def _signer(self) -> tuple[str | Path, ...]:
        return ("-CA", self.certificate, "-CAkey", self.key, "-CAcreateserial")

    def path(self, name: str, kind: str) -> Path:
        """Return the path of an issued `crt` or `key`."""
        return self.directory / f"{name}.{kind}"

    def kubeconfig(self, name: str, *, server: str) -> str:
        """Return the text of a kubeconfig for an issued certificate (JSON, which is YAML too)."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "skiff-test",
            "contexts": [{"name": "skiff-test", "context": {"cluster": "skiff-test", "user": name}}],
            "clusters": [
                {
                    "name": "skiff-test",
                    "cluster": {"server": server, "certificate-authority-data": _base64(self.certificate)},
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate-data": _base64(self.path(name, "crt")),
                        "client-key-data": _base64(self.path(name, "key")),
                    },
                }
            ],
        }
        return json.dumps(config, indent=1)


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _openssl(*arguments: str | Path) -> None:
    output(["openssl", *arguments])
