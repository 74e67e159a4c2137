"""Make byte code of what the commands of these packages import, and of nothing else.

    python docker/used.py server client       as whoever may write it

An image's root is read-only later: without byte code each start would compile two thousand modules anew.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

ALSO = {
    "client": ["client.app", "client.node.resident", "common.data.arrow", "common.deploy.endpoint", "pyarrow"],
    "server": [
        "server.app",
        "server.deploy.superlink_program",
        "flwr.superlink.cli.flower_superlink",
        "flwr.supercore.cli.flower_superexec",
        "flwr.superlink.runtime.run_serverapp",
        "flwr_datasets",
        "pandas",
        "matplotlib.pyplot",
        "tensorboard.summary",
        "torch.utils.tensorboard",
    ],
}


def main(packages: list[str]) -> None:
    sys.path.insert(0, ".")
    for package in packages:
        found = importlib.import_module(package)
        names = [each.name for each in pkgutil.walk_packages(found.__path__, f"{package}.") if "__main__" not in each.name]
        for name in [*names, *ALSO[package]]:
            try:
                importlib.import_module(name)
            except ImportError as error:  # an extra that this image does without
                print(f"{name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
