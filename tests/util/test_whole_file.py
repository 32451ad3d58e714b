"""Files that are written as a whole or not at all, wherever they shall stand."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from kvcompile.util.archive_file import archive_file
from kvcompile.util.whole_file import whole_file, write_tensors


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "error", (OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(143))
)
def test_nothing_is_left_of_one_that_was_not_finished(tmp_path: Path, error: BaseException) -> None:
    old = tmp_path / "old"
    old.write_text("mine")
    for path in (old, tmp_path / "new"):
        with pytest.raises(type(error)), whole_file(path) as made:
            made.write_text("half")
            raise error
    assert listed(tmp_path) == ["old"] and old.read_text() == "mine"


def test_rights_are_those_of_the_file_before_or_of_any_new_one(tmp_path: Path) -> None:
    """A passing file is its owner's alone, and so are those of safetensors: others would read nothing."""
    private = tmp_path / "private"
    private.touch(mode=0o640)
    mask = os.umask(0o022)
    try:
        for path, rights in ((private, 0o640), (tmp_path / "new", 0o644)):
            with whole_file(path) as made:
                write_tensors({"x": torch.zeros(1)}, made)
            assert stat.S_IMODE(path.stat().st_mode) == rights
    finally:
        os.umask(mask)


def test_a_link_leads_to_the_file(tmp_path: Path) -> None:
    for target in ("there", "not_there_yet"):
        (tmp_path / f"to_{target}").symlink_to(target)
    (tmp_path / "there").write_text("old")
    for target in ("there", "not_there_yet"):
        with whole_file(tmp_path / f"to_{target}") as made:
            made.write_text("new")
        assert (tmp_path / f"to_{target}").is_symlink() and (tmp_path / target).read_text() == "new"


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    before = listed(tmp_path)
    for name, reason in (
        ("pipe", "a device or a pipe"),
        ("folder", "a folder"),
        ("file/x", "Not a directory"),
        ("no/x", "No such file"),
        ("loop", "loop|symbolic links"),
        ("loop/x", "loop|symbolic links"),
        ("nul\0", "null"),
        ("n" * 300, "too long"),
    ):
        with pytest.raises(OSError, match=reason), whole_file(tmp_path / name) as made:
            made.write_text("new")
    with pytest.raises(OSError, match="a device or a pipe"), whole_file("/dev/null"):
        pass
    with pytest.raises(OSError, match=r"expected str|should be a str"), whole_file(None):  # type: ignore[arg-type]
        pass
    assert listed(tmp_path) == before and (tmp_path / "pipe").is_fifo()


def test_an_archive_on_a_full_disk_is_an_error() -> None:
    """PyTorch's own file would end this process."""
    with pytest.raises(OSError, match="No space left"), archive_file(Path("/dev/full")) as file:
        torch.save(torch.zeros(1 << 16), file)


def test_an_archive_that_is_interrupted_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), archive_file(tmp_path / "x") as file:
        file._file = _Interrupted()  # type: ignore[attr-defined]
        torch.save(torch.zeros(1 << 16), file)


class _Interrupted:
    def write(self, data: bytes) -> int:
        raise KeyboardInterrupt


def test_an_archive_is_what_pytorch_writes(tmp_path: Path) -> None:
    with archive_file(tmp_path / "x") as file:
        torch.save({"x": torch.arange(5)}, file)
    assert torch.load(tmp_path / "x")["x"].tolist() == [0, 1, 2, 3, 4]
