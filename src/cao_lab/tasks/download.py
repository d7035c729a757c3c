"""Download the official CIFAR archives, in several goes if need be, and make sure of what came."""

import hashlib
import tarfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm import tqdm

from cao_lab.tasks.cifar import CIFAR
from cao_lab.tasks.data import load
from cao_lab.tasks.pickles import DataError

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30
PARTIAL_CONTENT, RANGE_NOT_SATISFIABLE = 206, 416


@dataclass(frozen=True)
class Archive:
    """Where an archive is, what it is called there, and the checksum that its publisher gives."""

    url: str
    file: str
    md5: str


ARCHIVES = {
    "cifar10": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        file="cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
    ),
    "cifar100": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        file="cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
    ),
}


def download(dataset: str, data_dir: Path, url: str | None = None) -> Path:
    """Make sure that a dataset is whole under `data_dir`, from `url` instead of its publisher if given.

    A dataset that can be loaded is left alone, an archive that is there is not fetched again, and a transfer that
    broke off stays behind as `.part`, from which the next call goes on. Returns the dataset's folder.
    """
    if dataset not in ARCHIVES:
        raise DataError(f"{dataset} cannot be downloaded, only {' and '.join(ARCHIVES)}")
    if not _is_whole(dataset, data_dir):
        archive = data_dir / ARCHIVES[dataset].file
        if not archive.exists():
            _obtain(archive, url or ARCHIVES[dataset].url, ARCHIVES[dataset].md5)
        _require_md5(archive, ARCHIVES[dataset].md5, "remove it and try again")
        _unpack(archive)
        load(dataset, data_dir)
    return data_dir / CIFAR[dataset].folder


def _is_whole(dataset: str, data_dir: Path) -> bool:
    try:
        load(dataset, data_dir)
    except DataError:
        return False
    return True


def _obtain(archive: Path, url: str, md5: str) -> None:
    """Fetch an archive under a preliminary name and rename it when it has proved right."""
    part = archive.with_name(f"{archive.name}.part")
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, part)
    except (OSError, HTTPException, ValueError) as error:
        advice = f"try again to go on, or put {archive.name} into {archive.parent} by hand and try again"
        raise DataError(f"cannot download {url}: {error}; {advice}") from error
    try:
        _require_md5(part, md5, "it was removed, try again")
    except DataError:
        part.unlink()
        raise
    part.rename(archive)


def _fetch(url: str, part: Path) -> None:
    """Append to `part` what it lacks, or begin anew where the server cannot continue."""
    present = part.stat().st_size if part.exists() else 0
    try:
        response = urlopen(Request(url, headers={"Range": f"bytes={present}-"}), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        # Nothing is left to fetch; whether what is there is right, its checksum tells.
        if present and error.code == RANGE_NOT_SATISFIABLE:
            return
        raise
    with response:
        _receive(response, part, present if response.status == PARTIAL_CONTENT else 0)


def _receive(response: Any, part: Path, present: int) -> None:
    """Write a response behind the first `present` bytes of `part`, and show how far it is."""
    length = response.headers.get("Content-Length")
    total = None if length is None else present + int(length)
    with (
        part.open("ab" if present else "wb") as file,
        tqdm(total=total, initial=present, unit="B", unit_scale=True, desc=part.stem, disable=None) as bar,
    ):
        while chunk := response.read(CHUNK_BYTES):
            file.write(chunk)
            bar.update(len(chunk))
    if total is not None and part.stat().st_size < total:
        raise ConnectionError(f"the connection broke off after {part.stat().st_size} of {total} bytes")


def _require_md5(path: Path, expected: str, advice: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if actual != expected:
        raise DataError(f"{path} must have md5 {expected}, got {actual}; {advice}")


def _unpack(archive: Path) -> None:
    """Unpack beside the archive; the filter refuses members and links that lead elsewhere."""
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(archive.parent, filter="data")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}") from error
