"""What travels to a cluster, and what is compared before anything runs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_batch.data.describe import prepare
from eagle_batch.errors import ConfigError, DataError
from eagle_batch.job import launch, parcel
from eagle_batch.job.parcel import pack
from eagle_batch.pipeline import load_pipeline
from tests.job.fake_job import write_job


def test_an_unpacked_pipeline_is_the_same_job(tmp_path: Path) -> None:
    """Same fingerprint, hence the same shards, texts and commits as the pipeline at home."""
    pipeline = load_pipeline(write_job(tmp_path / "home", ["a", "b", "c"]))
    away = tmp_path / "away"
    away.mkdir()
    pack(pipeline, away)
    (tmp_path / "home" / "in.parquet").unlink()
    there = load_pipeline(away / "pipeline.yaml")
    assert there.input.path == (str(away / "input" / "in.parquet"),)
    assert there.output.path == pipeline.output.path
    home = write_job(tmp_path / "home", ["a", "b", "c"])
    assert prepare(there)[0].fingerprint == prepare(load_pipeline(home))[0].fingerprint


def test_files_of_one_name_stay_apart_and_in_order(tmp_path: Path) -> None:
    for folder in ("b", "a"):
        write_job(tmp_path / folder, [folder])
    path = write_job(
        tmp_path / "p",
        ["x"],
        input={"path": ["../b/*.parquet", "s3://bucket/x/*.parquet", "../a/in.parquet"]},
    )
    away = tmp_path / "away"
    away.mkdir()
    pack(load_pipeline(path), away)
    paths = json.loads((away / "pipeline.yaml").read_text())["input"]["path"]
    assert paths == ["input/b/in.parquet", "s3://bucket/x/*.parquet", "input/a/in.parquet"]
    assert pq.read_table(away / paths[0])["topic"].to_pylist() == ["b"]


def test_modules_and_texts_to_compare_with_travel_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module, a package, and files of one name in two folders; the same job is there."""
    home, away = tmp_path / "home", tmp_path / "away"
    for name in ("a", "b"):
        (home / name).mkdir(parents=True)
        pq.write_table(pa.table({"text": [f"{name} one two three"]}), home / name / "bench.parquet")
    (home / "own_checks.py").write_text("def fine(text, row):\n    return True\n")
    (home / "own_package").mkdir()
    (home / "own_package" / "__init__.py").write_text("")
    (home / "own_package" / "inner.py").write_text("def fine(text, row):\n    return True\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = ("own_checks:fine", "own_package.inner:fine", "json:loads")
    path = write_job(
        home,
        ["x"],
        stages=[{"name": "one", "prompt": "x", "validators": [{"python": n} for n in names]}],
        decontaminate={
            "stages": ["one"],
            "against": ["*/bench.parquet"],
            "column": "text",
            "ngram": 3,
        },
    )
    pipeline = load_pipeline(path)
    away.mkdir()
    packed = pack(pipeline, away)
    assert (away / "own_checks.py").is_file()
    assert (away / "own_package" / "inner.py").is_file()
    assert not (away / "json").exists()
    there = load_pipeline(away / "pipeline.yaml")
    assert there.decontaminate is not None
    assert [Path(each).is_relative_to(away) for each in there.decontaminate.against] == [True] * 2
    assert not any("decontaminate" in note for note in packed.notes)
    known = there.model_copy(update={"input": pipeline.input})
    assert prepare(known)[0].fingerprint == prepare(pipeline)[0].fingerprint
    (home / "own_checks.py").write_text("def fine(text, row):\n    return False\n")
    (tmp_path / "again").mkdir()
    assert pack(pipeline, tmp_path / "again").digest != packed.digest


def test_the_digest_tells_the_work_apart(tmp_path: Path) -> None:
    digests = []
    for number, (topics, seed) in enumerate([(["a"], 1), (["a"], 1), (["b"], 1), (["a"], 2)]):
        path = write_job(tmp_path / "same", topics, seed=seed)
        away = tmp_path / str(number)
        away.mkdir()
        digests.append(pack(load_pipeline(path), away).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_paths_that_stay_behind_are_named(tmp_path: Path) -> None:
    notes = pack(load_pipeline(write_job(tmp_path / "p", ["a"])), tmp_path).notes
    assert [note.split(": ")[0] for note in notes] == ["target.model", "output.path"]


def test_a_missing_input_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    path = write_job(tmp_path / "p", ["a"])
    (tmp_path / "p" / "in.parquet").unlink()
    with pytest.raises(DataError, match=r"input.path: .*in.parquet"):
        pack(load_pipeline(path), tmp_path)


def test_too_much_to_travel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="put them where all nodes can read them"):
        pack(load_pipeline(write_job(tmp_path / "p", ["a"])), tmp_path)


def launched(folder: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run the launcher of a parcel, with another command than eagle-batch."""
    pack(load_pipeline(write_job(folder / "p", ["a"])), folder, ["-c", "print('it runs')"])
    manifest = json.loads((folder / launch.MANIFEST).read_text()) | changes
    (folder / launch.MANIFEST).write_text(json.dumps(manifest))
    return subprocess.run(
        [sys.executable, "launch.py"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_equal_versions_run_without_a_word(tmp_path: Path) -> None:
    done = launched(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "it runs\n", "")


@pytest.mark.parametrize(("package", "there"), [("eagle-batch", ""), ("no-such-package", "none")])
def test_another_version_of_ours_is_explained_and_exits_2(
    package: str, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, notes = launch.differences({package: "9.9.9"})
    (line,) = errors + notes
    assert f"9.9.9 where it was submitted, {there}" in line
    done = launched(tmp_path, versions={"eagle-batch": "9.9.9"})
    assert done.returncode == 2
    assert "eagle-batch: 9.9.9 where it was submitted" in done.stderr
    assert "install the same eagle-batch on every node" in done.stderr
    assert done.stdout == ""


def test_another_version_of_others_is_a_note(tmp_path: Path) -> None:
    done = launched(tmp_path, versions={"tokenizers": "0.0.1", "torch": "1.0+cpu"})
    assert done.returncode == 0
    assert done.stdout.count("note: ") == 2
    assert launch.plain("2.9.0+cpu") == launch.plain("2.9.0+cu128") == "2.9.0"


def test_the_time_of_change_by_which_a_large_file_is_known_travels_too(tmp_path: Path) -> None:
    source = write_job(tmp_path / "p", ["a"]).parent / "in.parquet"
    os.utime(source, ns=(10**18, 10**18))
    pack(load_pipeline(tmp_path / "p" / "pipeline.yaml"), tmp_path, ["-c", ""])
    unpacked = tmp_path / "input" / "in.parquet"
    unpacked.touch()
    subprocess.run([sys.executable, "launch.py"], cwd=tmp_path, check=True)
    assert unpacked.stat().st_mtime_ns == 10**18
