"""The example whose workers read their own files, from a folder and from an object store."""

from __future__ import annotations

import sys

import pytest

from tests.engines.conftest import ROOT, clean_environment, loss_in, run
from tests.harness.tiers import exhaustive

pytest.importorskip("moto", reason="moto is not installed: pip install -e '.[engines]'")
pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -e '.[engines]'")
from tests.engines.failing_store import failing_store

SCRIPT = str(ROOT / "examples" / "file_shards.py")
# A worker's part of each batch is a file, so batches are those of one process.
FILES, ROWS, SHORT = 17, 128, ["--batch_size=256", "--shuffle=0"]
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def script(files, *arguments, workers=0, **variables):
    launcher = ["-m", "tfdist", "run", "-n", str(workers)] if workers else []
    command = [sys.executable, *launcher, SCRIPT, f"--files={files}", *arguments]
    return run(command, clean_environment(**variables))


def write(files, **variables):
    script(files, f"--write={FILES}", f"--rows={ROWS}", **variables)


@exhaustive
@pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
def test_workers_read_their_own_files(tmp_path, kind):
    files = f"{tmp_path}/chars/*.{kind}"
    write(files)
    assert len(list((tmp_path / "chars").iterdir())) == FILES
    alone = loss_in(script(files, *SHORT))
    assert loss_in(script(files, *SHORT, workers=2)) == pytest.approx(alone, abs=2e-5)

    import s3fs

    with failing_store() as (store, address):
        variables = {**KEYS, "FSSPEC_S3_ENDPOINT_URL": address}
        s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=address).mkdir(kind)
        files = f"s3://{kind}/chars/*.{kind}"
        write(files, **variables)
        output = script(files, *SHORT, workers=2, **variables)
        assert loss_in(output) == pytest.approx(alone, abs=2e-5)
        assert store.failed >= FILES // 5
