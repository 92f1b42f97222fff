"""`tfdist run --hosts` with OpenSSH's server on two hosts."""

import pytest

from tests.engines.conftest import SCRIPT
from tests.harness.tiers import exhaustive
from tests.launch.sshd import ssh_hosts


@exhaustive
def test_jobs_by_ssh_train_as_one_process(tmp_path, train):
    with ssh_hosts(tmp_path) as hosts:
        hosts.serve()
        where = ["--hosts", "localhost:1,second:1", "--ssh", hosts.ssh()]
        quiet = ["-x", "TF_CPP_MIN_LOG_LEVEL", "-x", "CUDA_VISIBLE_DEVICES"]
        command = [SCRIPT[0], "-m", "tfdist", "run", *where, *quiet]
        train(hosts.inside(0, *command), SCRIPT[1:])


pytestmark = pytest.mark.timeout(600)
