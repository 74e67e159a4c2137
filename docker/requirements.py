"""What an image installs: the dependencies in pyproject.toml, and constraints.txt as far as it fits the chosen torch.

    python requirements.py TORCH EXTRAS OUT [client]      TORCH: a pip requirement, EXTRAS: names separated by commas

Writes OUT/requirements.txt and OUT/constraints.txt. They alone decide the dependency layers of the image: a change of
another setting in pyproject.toml builds none of them again. With `client` it is what a site needs that brings its own
data: no Ray, no library that splits data over simulated clients, nothing that draws or reports.
"""

import re
import sys
import tomllib
from pathlib import Path

# What a build of torch brings along in versions of its own.
OF_TORCH = re.compile(r"(torch(vision|audio)?==|triton|nvidia-|cuda-)")

NOT_OF_A_CLIENT = {"flwr-datasets", "matplotlib", "tensorboard", "scikit-learn", "pandas", "jinja2", "greenlet"}


def name_of(requirement: str) -> str:
    """The distribution that a requirement names."""
    return re.split(r"[\[<>=~! ]", requirement, maxsplit=1)[0]


def main(torch: str, extras: str, out: Path, client: bool) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"]]
    if client:
        wanted = [each.replace("flwr[simulation]", "flwr") for each in wanted if name_of(each) not in NOT_OF_A_CLIENT]
    for extra in filter(None, extras.split(",")):
        wanted += project["optional-dependencies"][extra]
    pins = [line for line in Path("constraints.txt").read_text("utf-8").split("\n") if line and line[0] != "#"]
    if torch not in pins:
        pins = [pin for pin in pins if not OF_TORCH.match(pin)]
    out.mkdir(parents=True, exist_ok=True)
    (out / "requirements.txt").write_text("\n".join([*wanted, ""]), "utf-8")
    (out / "constraints.txt").write_text("\n".join([*pins, ""]), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), "client" in sys.argv[4:])
