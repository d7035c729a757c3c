"""Downloads go on where they broke off, are checked, and cannot write outside their folder."""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from small_cifar import write_small_cifar

from cao_lab.tasks.data import load
from cao_lab.tasks.download import ARCHIVES, download
from cao_lab.tasks.pickles import DataError


@dataclass
class Server:
    """What the local server sends, how much of it at a time, and which ranges it was asked for."""

    content: bytes = b""
    most_bytes: int = 1 << 30
    knows_ranges: bool = True
    status: int | None = None
    ranges: list[int] = field(default_factory=list)
    url: str = ""

    def publish(self, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        """Serve an archive as CIFAR-100 with its own checksum."""
        self.content = content
        md5 = hashlib.md5(content).hexdigest()
        monkeypatch.setitem(ARCHIVES, "cifar100", replace(ARCHIVES["cifar100"], url=self.url, md5=md5))

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.ranges.append(start)
        start = start if self.knows_ranges else 0
        if self.status or start >= len(self.content):
            request.send_error(self.status or 416)
            return
        request.send_response(206 if self.knows_ranges else 200)
        request.send_header("Content-Length", str(len(self.content) - start))
        request.end_headers()
        request.wfile.write(self.content[start : start + self.most_bytes])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve on a free port of this machine, whatever proxy the environment names."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        served.url = f"http://127.0.0.1:{http.server_port}/cifar-100-python.tar.gz"
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        http.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a small CIFAR-100 packed as the official one."""
    directory = tmp_path_factory.mktemp("archive")
    folder = write_small_cifar(directory, "cifar100")
    with tarfile.open(directory / "packed.tar.gz", "w:gz") as tar:
        tar.add(folder, "cifar-100-python")
    return (directory / "packed.tar.gz").read_bytes()


def packed(member: tarfile.TarInfo) -> bytes:
    stream = io.BytesIO()
    member.size = 4 if member.isfile() else 0
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.addfile(member, io.BytesIO(b"evil"))
    return stream.getvalue()


def test_a_dataset_is_fetched_unpacked_and_loaded(
    server: Server, archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(archive, monkeypatch)
    folder = download("cifar100", tmp_path / "new")
    assert folder == tmp_path / "new" / "cifar-100-python"
    assert len(load("cifar100", tmp_path / "new").train_targets) == 200
    assert sorted(path.name for path in folder.parent.iterdir()) == ["cifar-100-python", "cifar-100-python.tar.gz"]


def test_a_dataset_that_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    write_small_cifar(tmp_path, "cifar100")
    assert download("cifar100", tmp_path, server.url) == tmp_path / "cifar-100-python"
    assert server.ranges == []


def test_a_damaged_dataset_is_replaced_from_the_archive_without_a_network(
    server: Server, archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(archive, monkeypatch)
    folder = write_small_cifar(tmp_path, "cifar100")
    (folder / "train").write_bytes(b"damaged")
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(archive)
    download("cifar100", tmp_path)
    assert len(load("cifar100", tmp_path).train_targets) == 200
    assert server.ranges == []


def test_a_transfer_that_broke_off_goes_on_where_it_stopped(
    server: Server, archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(archive, monkeypatch)
    server.most_bytes = len(archive) * 2 // 5
    for goes in (1, 2):
        broken = f"broke off after {goes * server.most_bytes} of {len(archive)} bytes; try again to go on"
        with pytest.raises(DataError, match=broken):
            download("cifar100", tmp_path)
    download("cifar100", tmp_path)
    assert server.ranges == [0, server.most_bytes, 2 * server.most_bytes]
    assert len(load("cifar100", tmp_path).test_targets) == 100


def test_a_server_that_cannot_continue_is_asked_for_everything_anew(
    server: Server, archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(archive, monkeypatch)
    server.knows_ranges = False
    (tmp_path / "cifar-100-python.tar.gz.part").write_bytes(archive[:1000])
    download("cifar100", tmp_path)
    assert server.ranges == [1000]
    assert (tmp_path / "cifar-100-python.tar.gz").read_bytes() == archive


def test_a_part_that_is_already_complete_is_taken(
    server: Server, archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(archive, monkeypatch)
    (tmp_path / "cifar-100-python.tar.gz.part").write_bytes(archive)
    download("cifar100", tmp_path)
    assert len(load("cifar100", tmp_path).train_targets) == 200


def test_a_wrong_checksum_is_shown_and_nothing_is_unpacked_or_kept(
    server: Server, archive: bytes, tmp_path: Path
) -> None:
    server.content = archive
    got = hashlib.md5(archive).hexdigest()
    with pytest.raises(DataError, match=f"must have md5 eb9058c3a382ffc7106e4002c42a8d85, got {got}; it was removed"):
        download("cifar100", tmp_path, server.url)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_archive_that_a_user_put_there_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(b"something")
    with pytest.raises(DataError, match=r"must have md5 .+; remove it and try again"):
        download("cifar100", tmp_path)
    assert (tmp_path / "cifar-100-python.tar.gz").exists()


def symbolic_link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.mark.parametrize(
    "member", [tarfile.TarInfo("../evil"), symbolic_link("cifar-100-python", "../outside")], ids=["path", "link"]
)
def test_an_archive_cannot_write_outside_its_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: tarfile.TarInfo
) -> None:
    server.publish(packed(member), monkeypatch)
    with pytest.raises(DataError, match=r"cifar-100-python\.tar\.gz cannot be unpacked: .*outside the destination"):
        download("cifar100", tmp_path / "data")
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "cifar-100-python.tar.gz"]


def test_an_archive_of_something_else_is_reported(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(b"no archive at all", monkeypatch)
    with pytest.raises(DataError, match="cannot be unpacked"):
        download("cifar100", tmp_path)
    server.publish(packed(tarfile.TarInfo("harmless")), monkeypatch)
    (tmp_path / "cifar-100-python.tar.gz").unlink()
    with pytest.raises(DataError, match="train is missing"):
        download("cifar100", tmp_path)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x.tar.gz", "no url"])
def test_without_a_network_the_error_says_what_to_do_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(DataError, match=rf"cannot download {url}: .+ put cifar-10-python\.tar\.gz into") as caught:
        download("cifar10", tmp_path, url)
    assert "\n" not in str(caught.value)


def test_an_error_of_the_server_is_passed_on(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(DataError, match="HTTP Error 404: Not Found"):
        download("cifar100", tmp_path, server.url)


def test_only_cifar_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="digits cannot be downloaded, only cifar10 and cifar100"):
        download("digits", tmp_path)
