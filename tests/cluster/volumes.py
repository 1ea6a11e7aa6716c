"""Volumes for claims: a few folders of the node, since nothing in a one-node cluster provisions them on demand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from apiclient import ApiClient

STORAGE_CLASS = "skiff-test"
COUNT = 16
SIZE = "20Gi"
MOUNTED_AT = "/run/volumes"


def names() -> list[str]:
    """Return the volumes' names."""
    return [f"{STORAGE_CLASS}-{number:02}" for number in range(COUNT)]


def make_folders(parent: Path) -> None:
    """Make the folders, writable for every user as a provisioner's volume with an fsGroup would be."""
    for name in names():
        make_folder(parent / name)


def make_folder(folder: Path) -> None:
    """Make one empty folder that every user may write to."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def storage_class() -> dict[str, Any]:
    """Return the default storage class; a claim binds once a pod that uses it is scheduled, as in most clusters."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def volume(name: str) -> dict[str, Any]:
    """Return one volume."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": STORAGE_CLASS,
            "capacity": {"storage": SIZE},
            "accessModes": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"{MOUNTED_AT}/{name}", "type": "Directory"},
        },
    }


def create(client: ApiClient) -> None:
    """Create the storage class and its volumes."""
    client.apply(f"/apis/storage.k8s.io/v1/storageclasses/{STORAGE_CLASS}", storage_class())
    for name in names():
        client.apply(f"/api/v1/persistentvolumes/{name}", volume(name))


def recycle(client: ApiClient, parent: Path) -> None:
    """Make volumes whose claim was deleted available again, empty."""
    for found in client.get("/api/v1/persistentvolumes")["items"]:
        name = found["metadata"]["name"]
        if name in names() and found["status"].get("phase") == "Released":
            make_folder(parent / name)
            client.request(
                "PATCH",
                f"/api/v1/persistentvolumes/{name}",
                {"spec": {"claimRef": None}},
                "application/merge-patch+json",
            )
