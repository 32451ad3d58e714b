"""A store in a folder gives back what was stored under a key, or nothing, whatever happens to its files."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcompile.errors import InputError
from kvcompile.serve import Sampling
from kvcompile.serve.disk import Disk
from kvcompile.serve.reading import Reading
from kvcompile.serve.store import Host, Item, pack, unpack
from tests.serve.test_numerics import module
from tests.support.serving import Stepped

KEYS = [bytes([number]) * 32 for number in range(40)]


def item(number: int, size: int = 64) -> Item:
    return Item(torch.full((size,), number, dtype=torch.uint8))


def is_item(found: Item | None, number: int) -> bool:
    return found is not None and found.data.unique().tolist() == [number]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "store", 1 << 20)
    yield made
    made.close()


def stored(disk: Disk, count: int = 1) -> list[Path]:
    for number in range(count):
        disk.store(KEYS[number], item(number))
    disk.drain()
    return [disk._path(KEYS[number]) for number in range(count)]


def test_what_is_stored_is_found_by_the_next_one(disk: Disk) -> None:
    stored(disk, 3)
    assert all(disk.lookup(key) and is_item(disk.load(key), n) for n, key in enumerate(KEYS[:3]))
    assert not disk.lookup(KEYS[3]) and disk.load(KEYS[3]) is None
    disk.close()
    again = Disk(disk.folder, 1 << 20)
    assert again.secret == disk.secret and is_item(again.load(KEYS[2]), 2) and again.nbytes == disk.nbytes
    again.close()


def test_a_process_without_threads_keeps_nothing_and_reads_by_itself(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither fails a step, nor waits for a thread that never started."""
    stored(disk, 1)
    again, reading = Disk(disk.folder, 1 << 20), Reading(disk)

    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        again.store(KEYS[1], item(1))
        assert not again.lookup(KEYS[1]) and "can't start new thread" in caplog.text
        again.drain()
        assert reading.ask([KEYS[0]]) and is_item(reading.take(KEYS[0]), 0)
    reading.close()
    again.store(KEYS[1], item(1))
    again.close()
    assert again.lookup(KEYS[1]) and is_item(again.load(KEYS[1]), 1)


def test_what_waits_is_found(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    inner = disk._write
    monkeypatch.setattr(disk, "_write", lambda *args: (go.wait(10), inner(*args)))
    disk.store(KEYS[0], item(0))
    assert disk.lookup(KEYS[0]) and is_item(disk.load(KEYS[0]), 0) and not disk._path(KEYS[0]).exists()
    go.set()
    disk.drain()
    assert disk._path(KEYS[0]).exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damaged_file_is_taken(disk: Disk, data: st.DataObject) -> None:
    """Bits turned, bytes cut off, put in or moved, wherever."""
    (path,) = stored(disk)
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    match data.draw(st.sampled_from(["bit", "cut", "more", "swap"])):
        case "bit":
            turned = whole[place] ^ (1 << data.draw(st.integers(0, 7)))
            broken = whole[:place] + bytes([turned]) + whole[place + 1 :]
        case "cut":
            broken = whole[:place]
        case "more":
            broken = whole[:place] + data.draw(st.binary(min_size=1, max_size=9)) + whole[place:]
        case _:
            broken = whole[place:] + whole[:place]
    path.write_bytes(broken)
    found = disk.load(KEYS[0])
    assert found is None or is_item(found, 0), "its bytes, or nothing"
    assert found is not None or not path.exists()


def test_files_of_others_are_not_taken(disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under another name; of another folder; of another format."""
    first, second = stored(disk, 2)
    second.write_bytes(first.read_bytes())
    other = Disk(tmp_path / "other", 1 << 20)
    (foreign,) = stored(other)
    other.close()
    with caplog.at_level(logging.WARNING):
        assert disk.load(KEYS[1]) is None and not second.exists()
        first.write_bytes(foreign.read_bytes())
        assert disk.load(KEYS[0]) is None and not disk.lookup(KEYS[0])
    assert caplog.text.count("is not what was stored there") == 2


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    probe = Disk(tmp_path / "probe", 1 << 20)
    (path,) = stored(probe)
    size = path.stat().st_size
    probe.close()
    disk = Disk(tmp_path / "store", size * 4)
    for age, path in enumerate(stored(disk, 4)):
        os.utime(path, (1000 + age, 1000 + age))
    assert is_item(disk.load(KEYS[0]), 0)  # used now
    disk.store(KEYS[9], item(9))
    disk.drain()
    assert [disk.lookup(KEYS[n]) for n in (0, 1, 2, 3, 9)] == [True, False, False, True, True]
    assert disk.nbytes <= size * 4
    disk.store(KEYS[8], item(8, size * 9))
    disk.drain()
    assert not disk.lookup(KEYS[8]) and disk.lookup(KEYS[9]), "larger than all the room: nothing goes for it"
    disk.close()


def test_a_full_disk_costs_no_more_than_what_it_would_keep(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[str] = []

    def full(self: Path, data: bytes) -> int:
        begun.append(self.suffix)
        os.truncate(os.open(self, os.O_CREAT | os.O_WRONLY), 3)
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "write_bytes", full)
        stored(disk, 2)
        assert not disk.lookup(KEYS[0]) and caplog.text.count("no space left") == 1
    assert begun == [".part", ".part"], "no file stands under its name before it is whole"
    assert [path.name for path in disk.folder.iterdir()] == ["secret"]
    stored(disk, 2)
    assert disk.lookup(KEYS[1])


@pytest.mark.skipif(os.name != "posix", reason="modes")
def test_a_disk_that_does_not_answer_has_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(disk, 1)
    name, own = disk._path(KEYS[0]).name, os.stat

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).endswith(name):
            raise OSError(errno.EIO, "input/output error")
        return own(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    assert not disk.lookup(KEYS[0])
    monkeypatch.undo()
    assert disk.lookup(KEYS[0])


def test_its_secret_is_its_owners_alone(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "store", 1 << 20)
    disk.close()
    secret = tmp_path / "store" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600 and len(secret.read_bytes()) == 32
    secret.chmod(0o640)
    with pytest.raises(InputError, match="others may read"):
        Disk(tmp_path / "store", 1 << 20)
    secret.chmod(0o600)
    secret.write_bytes(b"short")
    with pytest.raises(InputError, match="no secret of 32 bytes"):
        Disk(tmp_path / "store", 1 << 20)


def test_a_folder_that_cannot_be_used_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used"):
        Disk(tmp_path / "file", 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="not writable"):
        Disk(tmp_path / "store", 1)


def test_two_that_begin_at_once_have_one_secret(tmp_path: Path) -> None:
    made: list[Disk] = []
    threads = [threading.Thread(target=lambda: made.append(Disk(tmp_path / "s", 1 << 20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({disk.secret for disk in made}) == 1 and len(made) == 8
    for number, disk in enumerate(made * 4):
        disk.store(KEYS[number % 5], item(number % 5))
    for disk in made:
        disk.close()
    last = Disk(tmp_path / "s", 1 << 20)
    assert all(is_item(last.load(key), number) for number, key in enumerate(KEYS[:5]))
    assert not list(last.folder.glob("*.part"))
    last.close()


def test_an_engine_takes_nothing_of_a_damaged_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And nothing of other plans, though they have one folder; its requests never fail for it."""
    prompt, sampling = list(range(3, 53)), Sampling(max_tokens=3, ignore_eos=True)

    def ask(recipe: str, **settings: Any) -> tuple[int, int]:
        with Stepped(module("llama", recipe), **settings) as engine:
            (result,) = engine.all([prompt], sampling)
            return result.tokens[0], result.usage.cached_tokens

    plain = ask("paged")
    assert ask("paged", store=tmp_path) == plain
    assert ask("paged_int8", store=tmp_path)[1] == 0
    assert ask("paged", store=tmp_path) == (plain[0], 48)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with caplog.at_level(logging.WARNING):
        assert ask("paged", store=tmp_path) == plain
    assert "is removed" in caplog.text
    assert ask("paged", store=tmp_path) == (plain[0], 48), "it was stored anew"


def test_what_goes_from_the_hosts_memory_goes_below() -> None:
    below = Host(1 << 20)
    host = Host(128, below)
    for number in range(3):
        host.store(KEYS[number], item(number))
    assert [host.lookup(key) for key in KEYS[:3]] == [False, True, True] and below.lookup(KEYS[0])
    assert host.load(KEYS[1]) is not None
    host.limit(64)
    assert host.lookup(KEYS[1]) and below.lookup(KEYS[2]) and host.nbytes == 64
    host.store(KEYS[3], item(3, 65))
    assert not host.lookup(KEYS[3]) and is_item(below.load(KEYS[3]), 3) and host.lookup(KEYS[1])


def test_bytes_come_back_as_they_were() -> None:
    cpu = torch.device("cpu")
    parts = [
        torch.randn(3, 5)[:, :2],
        torch.arange(7, dtype=torch.uint8),
        torch.randn(2).to(torch.float8_e4m3fn),
    ]
    packed = pack(parts, cpu)
    places = [torch.zeros_like(part) for part in parts]
    unpack(packed, places, cpu)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(parts, places, strict=True))
    with pytest.raises(ValueError, match="expected"):
        unpack(packed, places[:2], cpu)
