"""The folder of snapshots: names, and which are deleted."""

from __future__ import annotations

import pathlib
import shutil

from tests.harness.tiers import exhaustive
from tfdist._src.snapshots import part_file
from tfdist._src.snapshots.restore import SnapshotFolder, SnapshotId


def fill(folder, *snapshots):
    for snapshot in snapshots:
        folder.prepare(snapshot)
        for rank in range(snapshot.size):
            folder.part(snapshot, rank).write_text("")


def test_parts_are_found_and_others_files_left_alone(tmp_path):
    folder = SnapshotFolder(tmp_path / "snapshots")
    assert folder.parts() == {}
    one, two = SnapshotId(9, "0a", 2), SnapshotId(10, "0a", 1)
    fill(folder, one, two)
    (folder.path / "notes.txt").write_text("mine")
    (folder.part(two, 0).parent / ".rank-0-of-1.npz.1234").write_text("unfinished")
    assert folder.parts() == {one: [0, 1], two: [0]}
    folder.clear()
    assert [path.name for path in folder.path.iterdir()] == ["notes.txt"]


def test_the_newest_are_kept(tmp_path):
    folder = SnapshotFolder(tmp_path)
    several = [SnapshotId(step, "0a", 1) for step in (3, 30, 200, 1000)]
    fill(folder, *several)
    folder.delete_before(several[2])
    assert sorted(folder.parts()) == several[2:]
    folder.delete_after(several[2])
    assert list(folder.parts()) == several[2:3]
    folder.clear()
    assert not tmp_path.exists()


@exhaustive
def test_another_worker_may_delete_them_at_any_time(tmp_path, monkeypatch):
    folder = SnapshotFolder(tmp_path / "snapshots")
    fill(folder, SnapshotId(9, "0a", 2))
    listed = pathlib.Path.iterdir

    def deleted_before(path):
        shutil.rmtree(path if path.name.startswith("step-") else "nothing", ignore_errors=True)
        return listed(path)

    monkeypatch.setattr(pathlib.Path, "iterdir", deleted_before)
    assert folder.parts() == {}
    shutil.rmtree(folder.path)
    assert folder.parts() == {}
    folder.clear()


def test_the_names_of_new_folders_are_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(part_file, "sync_folder", synced.append)
    folder = SnapshotFolder(tmp_path / "run" / "snapshots")
    folder.prepare(SnapshotId(9, "0a", 1))
    assert synced == [tmp_path, tmp_path / "run", tmp_path / "run" / "snapshots"]
    folder.prepare(SnapshotId(10, "0a", 1))
    assert synced[3:] == [tmp_path / "run" / "snapshots"]
