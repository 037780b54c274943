"""Results on disk as netCDF, each file written whole or not at all, and checked when read.

.. code-block:: text

    DIR/study.yaml                  what was asked
    DIR/results/MODEL.PROBE.nc      what was measured
    DIR/examples.nc                 a few of the images, for the report
    DIR/parts/MODEL.PROBE/000042.nc finished chunks of an unfinished result
    DIR/log.jsonl                   when, how fast, by how many processes
"""

from __future__ import annotations

import json
import re
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import xarray as xr

from spatially.errors import UserError
from spatially.files import write_whole

_COMPRESSED = 512  # values from which a variable is worth compressing


class DamagedFile(UserError):
    """A results file that cannot be read as it was written."""


def write_dataset(path: Path, dataset: xr.Dataset) -> None:
    """A Dataset as netCDF, with checksums, compressed where it pays. The same Dataset gives the same bytes."""
    encoding = {
        name: {"zlib": True, "complevel": 4, "shuffle": True, "fletcher32": True}
        for name, variable in dataset.variables.items()
        if variable.size >= _COMPRESSED and variable.dtype.kind in "biuf"
    }
    buffer = BytesIO()
    # Parts that were read remember how long their strings were, and would cut the longer ones of others.
    dataset.drop_encoding().to_netcdf(buffer, engine="h5netcdf", encoding=encoding)
    write_whole(path, buffer.getvalue())


def read_dataset(path: Path) -> xr.Dataset:
    """A Dataset read whole; a file that was cut short or altered is an error."""
    try:
        return xr.load_dataset(path, engine="h5netcdf")
    except FileNotFoundError:
        raise UserError(f"there is no results file {path}") from None
    except Exception as error:
        # h5py answers a damaged file with OSError, KeyError, RuntimeError or ValueError, as the damage falls.
        raise DamagedFile(f"{path} is damaged or was cut short; delete it and run `spatially probe` again") from error


class Store:
    """The folder of a study."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file; give a folder for the results")

    def result_path(self, model: str, probe: str) -> Path:
        """Where a result lies."""
        return self.folder / "results" / f"{slug(model)}.{probe}.nc"

    def part_path(self, model: str, probe: str, chunk: int) -> Path:
        """Where a finished chunk lies until the result is whole."""
        return self.folder / "parts" / f"{slug(model)}.{probe}" / f"{chunk:06d}.nc"

    def read_part(self, model: str, probe: str, chunk: int, *, key: str) -> xr.Dataset | None:
        """A finished chunk of the same measurement, or nothing: damaged and foreign ones are measured again."""
        path = self.part_path(model, probe, chunk)
        if not path.exists():
            return None
        try:
            part = read_dataset(path)
        except DamagedFile:
            return None
        return part if part.attrs.get("key") == key else None

    def clear_parts(self, model: str, probe: str) -> None:
        """Forget the chunks of a finished result."""
        folder = self.part_path(model, probe, 0).parent
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.exists() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()

    def clear_drafts(self) -> None:
        """Remove what processes that were killed had half written."""
        for draft in self.folder.rglob(".*.draft"):
            draft.unlink(missing_ok=True)

    def results(self) -> dict[str, dict[str, xr.Dataset]]:
        """Every result: probe → model → Dataset, in the order of the study."""
        paths = sorted((self.folder / "results").glob("*.nc"))
        if not paths:
            raise UserError(f"{self.folder} holds no results; run `spatially probe … --out {self.folder}` first")
        found: dict[str, dict[str, xr.Dataset]] = {}
        datasets = [read_dataset(path) for path in paths]
        for dataset in sorted(datasets, key=lambda one: int(one.attrs.get("position", 0))):
            found.setdefault(dataset.attrs["probe"], {})[dataset.attrs["model"]] = dataset
        return found

    def examples(self) -> xr.Dataset | None:
        """A few of the study's images."""
        path = self.folder / "examples.nc"
        return read_dataset(path) if path.exists() else None

    def keep_skipped(self, skipped: list[dict[str, str]]) -> None:
        """Remember what the study left out: model, probe and reason."""
        write_whole(self.folder / "skipped.json", json.dumps(skipped, indent=1, ensure_ascii=False) + "\n")

    def skipped(self) -> list[dict[str, str]]:
        """What the study left out, as far as it says so."""
        path = self.folder / "skipped.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def log(self, **event: Any) -> None:
        """Add a line to the log."""
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")


def slug(name: str) -> str:
    """A model's name as a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "model"
