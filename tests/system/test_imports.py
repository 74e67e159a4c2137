"""What the start of a process must not pay for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from common.flower import ROOT, environment

CODE = """
import sys
from pathlib import Path
from tests.support.site import Site
from common.experiment import Experiment
text = 'partition.clients = 3\\nlocal.steps = 2\\n'
for local in ('', 'local.optimizer = "adam"', 'local.optimizer = "muon"', 'strategy.name = "hafedho"'):
    reply = Site(Path(sys.argv[1]), Experiment.parse(text + local)).train()
    assert reply.head.status == 'ok', reply.head
print(sorted({'sklearn', 'torch._dynamo', 'transformers', 'mlflow'} & sys.modules.keys()))
"""


def test_a_client_that_trains_has_loaded_nothing_it_does_not_need(tmp_path: Path) -> None:
    """scikit-learn for its file of digits and torch.compile for optimizers that are not compiled are 6 CPU seconds."""
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
