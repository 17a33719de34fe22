"""Files that appear only when they are complete."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from sampling_async._whole_files import written_whole


@pytest.fixture
def folder(tmp_path):
    mask = os.umask(0o027)
    yield tmp_path
    os.umask(mask)


def mode_of(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("is_private", "mode"), [(False, 0o640), (True, 0o600)])
def test_a_new_file_has_the_usual_permissions_or_is_for_its_owner_only(folder, is_private, mode):
    with written_whole(folder / "file", is_private=is_private) as unfinished:
        unfinished.write_text("whole")
        assert not (folder / "file").exists()
    assert ((folder / "file").read_text(), mode_of(folder / "file")) == ("whole", mode)
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_where_everybody_may_do_everything_a_new_file_is_no_program(folder):
    os.umask(0)  # `folder` sets back what was before
    with written_whole(folder / "file") as unfinished:
        unfinished.write_text("whole")
    assert mode_of(folder / "file") == 0o666


@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_a_file_that_is_there_keeps_its_permissions(folder, mode, is_private):
    (folder / "file").touch()
    (folder / "file").chmod(mode)
    (folder / "link").symlink_to(folder / "file")
    with written_whole(folder / "link", is_private=is_private) as unfinished:
        unfinished.write_text("new")
    assert ((folder / "file").read_text(), mode_of(folder / "file")) == ("new", mode)
    assert (folder / "link").is_symlink()


@pytest.mark.parametrize(
    ("failure", "number", "text"),
    [
        (
            OSError(errno.ENOSPC, "it is full", "/tmp/other"),
            errno.ENOSPC,
            "it is full",
        ),
        (OSError("of pyarrow"), errno.EIO, "of pyarrow"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_and_the_earlier_one_stays(folder, failure, number, text):
    (folder / "file").write_text("earlier")
    with pytest.raises(OSError, match=text) as caught, written_whole(folder / "file"):
        raise failure
    assert (caught.value.errno, caught.value.strerror) == (number, text)
    assert caught.value.filename == str(folder / "file")
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "earlier"


def test_links_in_a_circle_are_refused_and_stay(folder):
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    with pytest.raises(OSError, match="symbolic links") as caught, written_whole(folder / "a"):
        pytest.fail("there is nothing to write to")
    assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, str(folder / "a"))
    assert (folder / "a").is_symlink()
    assert (folder / "b").is_symlink()
