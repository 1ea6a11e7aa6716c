"""OCI archives that carry an image into the node without the layers that are there already."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

CONTAINERD_NAME = "io.containerd.image.name"


def pack(folder: Path, reference: str, archive: Path, *, held: set[str]) -> None:
    """Write an OCI archive of one image, without the blobs whose digests its reader holds.

    `folder` holds the image as Buildah's `dir:` transport writes it: manifest.json, and each blob named by its SHA-256.
    `held` is digests such as `sha256:…`; containerd accepts an archive that lacks content of its store.
    """
    manifest = (folder / "manifest.json").read_bytes()
    content = json.loads(manifest)
    digest = hashlib.sha256(manifest).hexdigest()
    descriptor = {
        "mediaType": content["mediaType"],
        "digest": f"sha256:{digest}",
        "size": len(manifest),
        "annotations": {CONTAINERD_NAME: reference},
    }
    with tarfile.open(archive, "w") as packed:
        _add(packed, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(packed, "index.json", json.dumps({"schemaVersion": 2, "manifests": [descriptor]}).encode())
        _add(packed, f"blobs/sha256/{digest}", manifest)
        for part in dict.fromkeys(part["digest"] for part in (content["config"], *content["layers"])):
            if part not in held:
                name = part.removeprefix("sha256:")
                packed.add(folder / name, f"blobs/sha256/{name}")


def _add(packed: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    packed.addfile(entry, io.BytesIO(data))
