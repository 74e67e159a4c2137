"""What the image installs: the dependencies in pyproject.toml, and constraints.txt as far as it fits the chosen torch.

    python requirements.py TORCH EXTRAS OUT      TORCH: a pip requirement, EXTRAS: names separated by commas

Writes OUT/requirements.txt and OUT/constraints.txt. They alone decide the dependency layers of the image: a change of
another setting in pyproject.toml builds none of them again.
"""

import re
import sys
import tomllib
from pathlib import Path

# What a build of torch brings along in versions of its own.
OF_TORCH = re.compile(r"(torch|triton|nvidia-|cuda-)")


def main(torch: str, extras: str, out: Path) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in filter(None, extras.split(",")):
        wanted += project["optional-dependencies"][extra]
    pins = [line for line in Path("constraints.txt").read_text("utf-8").split("\n") if line and line[0] != "#"]
    if torch not in pins:
        pins = [pin for pin in pins if not OF_TORCH.match(pin)]
    out.mkdir(parents=True, exist_ok=True)
    (out / "requirements.txt").write_text("\n".join([*wanted, ""]), "utf-8")
    (out / "constraints.txt").write_text("\n".join([*pins, ""]), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
