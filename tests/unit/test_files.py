"""Files that are the old one or the new one, and nothing between."""

from __future__ import annotations

import os
import stat

import pytest

from ds4d.files import written_whole


def test_a_new_file_is_there_when_it_is_whole(tmp_path):
    file = tmp_path / "a"
    with written_whole(file) as out:
        out.write(b"new")
        assert not file.exists()
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["a"]


def test_a_writer_that_fails_leaves_the_old_one_and_nothing_else(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), written_whole(file) as out:
        out.write(b"new")
        raise ZeroDivisionError
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_owner_and_mode_stay_those_of_the_old_one(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"old")
    os.chown(file, 65534, 4)
    file.chmod(0o640)
    with written_whole(file) as out:
        out.write(b"new")
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 4, 0o640)


def test_of_a_link_the_file_that_it_names_is_replaced(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("a")
    with written_whole(link) as out:
        out.write(b"new")
    assert link.is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"


def test_one_that_is_not_to_be_replaced_is_not_also_if_it_comes_late(tmp_path):
    file = tmp_path / "a"
    with pytest.raises(FileExistsError), written_whole(file, replace=False):
        file.write_bytes(b"somebody else's")
    with pytest.raises(FileExistsError), written_whole(file, replace=False):
        raise AssertionError("must not get here")
    assert file.read_bytes() == b"somebody else's"
    assert os.listdir(tmp_path) == ["a"]
