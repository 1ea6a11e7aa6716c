"""A folder that changes as the kubelet changes a mounted Secret: by the swap of one symbolic link."""

import itertools
import os
import shutil
from pathlib import Path


class SecretVolume:
    """One mounted Secret. Its keys are links to `..data/KEY`, and `..data` is a link to the current version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions = itertools.count()
        self._current: Path | None = None

    def path(self, key: str) -> Path:
        """Return the path at which programs read a key."""
        return self._folder / key

    def write(self, **data: str) -> None:
        """Replace the Secret's data, all keys at once."""
        version = self._folder / f"..version-{next(self._versions)}"
        version.mkdir()
        for key, text in data.items():
            (version / key).write_text(text)
        link = self._folder / "..data_tmp"
        link.symlink_to(version.name)
        link.replace(self._folder / "..data")
        for path in self._folder.iterdir():
            if not path.name.startswith("..") and path.name not in data:
                path.unlink()
        for key in data:
            if not os.path.lexists(self.path(key)):
                self.path(key).symlink_to(f"..data/{key}")
        if self._current is not None:
            shutil.rmtree(self._current)
        self._current = version
