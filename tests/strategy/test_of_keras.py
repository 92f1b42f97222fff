"""Keras's own tests of distribution pass under tfdist's strategy."""

import pathlib
import subprocess
import sys

import keras
import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive

FOLDER = pathlib.Path(keras.__file__).parent / "src" / "backend" / "tensorflow"
RUN = """
import sys
import pytest, tensorflow as tf, tfdist
tf.distribute.MirroredStrategy = tfdist.MirroredStrategy
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", *sys.argv[1:]]))
"""


@exhaustive
@pytest.mark.parametrize("name", ["distribute_test.py", "optimizer_distribute_test.py"])
def test_keras_own_tests_pass(name, tmp_path):
    file = FOLDER / name
    if not file.exists():
        pytest.skip(f"this version of Keras comes without {name}")
    command = [sys.executable, "-c", RUN, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FAR, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
