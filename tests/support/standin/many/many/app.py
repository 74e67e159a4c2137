"""A server app that runs every experiment of a folder, X.toml into the run folder X: the libraries are loaded once.

What it imports is not in its bundle: PYTHONPATH names the repository.
"""

from __future__ import annotations

from pathlib import Path

from common import flower

flower.prepare()

from flwr.app import Context  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

from common.experiment import Experiment  # noqa: E402
from server.app import run  # noqa: E402
from server.rounds.folder import RunFolder  # noqa: E402
from server.rounds.reply_limits import guard_replies  # noqa: E402

server = ServerApp()
client = ClientApp()  # never runs: the resident clients have their own


@server.main()
def main(grid: Grid, context: Context) -> None:
    guard_replies()
    for file in sorted(Path(str(context.run_config["folder"])).glob("*.toml")):
        experiment = Experiment.load(file)
        flower.tune_flower(longest_wait_s=experiment.round.deadline_s)
        run(grid, experiment, RunFolder(file.with_suffix("")))
