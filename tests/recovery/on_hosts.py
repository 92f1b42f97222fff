"""A worker of a training on hosts with launchers: `on_hosts.py FOLDER FAULTS WAIT`.

FAULTS are a phase, a step and what happens then, by rank, for the first process of each; after step
WAIT, rank 0 waits until as many processes wait to be admitted. With LEAVES in the environment,
workers leave on SIGTERM. See test_on_hosts.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import sys
import traceback

import tfdist
from tests.recovery.behaviours.surviving import AwaitNewcomers, trained
from tfdist._src.cluster.membership import regrouping

# On a busy machine those that leave last take long to answer each other, and a record remains.
regrouping._FAREWELL_SECONDS = regrouping._FAREWELLS_SECONDS = 20.0
folder, faults, wait = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
life = len(list(folder.glob(f"{index}-*.life")))
begun = folder / f"{index}-{life}.begun"
begun.write_text(str(os.getpid()))
begun.rename(folder / f"{index}-{life}.life")
strategy = tfdist.MultiWorkerMirroredStrategy()
try:
    awaited = AwaitNewcomers(wait, str(folder / "sign"), len(faults))
    settings = {"more": lambda: [awaited] if wait else []}
    if "LEAVES" in os.environ:
        settings["snapshots"] = str(folder / "snapshots")
    mine = {tfdist.rank(): faults[str(index)]} if str(index) in faults and not life else {}
    answer = True, trained(strategy, settings, mine)
except Exception:
    answer = False, traceback.format_exc()
part = folder / f"{index}-{life}.part"
part.write_bytes(pickle.dumps(answer))
part.rename(folder / f"{index}-{life}.answer")
