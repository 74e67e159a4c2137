"""Experiments from a notebook or a script: run one or a whole plan, get a history as a pandas frame and a model.

    from server.api import simulate
    run = simulate("experiments/digits.toml", **{"strategy.name": "scaffold", "rounds": 20})
    run.history
    run.model
    run.plot()

What cannot work raises SettingsError before round 1, a run that fails RunError: nothing here ends the process.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from common import flower, portable

portable.start([])  # before torch and numpy are imported, which read what it sets
flower.prepare()  # before flwr is imported, which reads it

import tomli_w  # noqa: E402
from rich.console import Console  # noqa: E402

from common import tasks  # noqa: E402
from common.errors import RunError, SettingsError  # noqa: E402
from common.experiment import Experiment  # noqa: E402
from common.seeds import derive, torch_seeded  # noqa: E402
from common.settings import checked, merged, tables_of, text_of  # noqa: E402
from server.compare.plan import Plan  # noqa: E402
from server.report import frames  # noqa: E402
from server.rounds.ending import Finish  # noqa: E402
from server.rounds.folder import BEST, CELL, MODEL, SETTINGS, RunFolder  # noqa: E402
from server.rounds.records import Headline, headline  # noqa: E402

# Imported where used: torch, Flower and pandas take seconds, and who looks at a history needs few of them.

Tables = Mapping[str, Any]


class Run:
    """A finished run. `folder`: its run folder, which goes with this object if nobody named one; `settings`: its
    resolved experiment."""

    def __init__(self, folder: Path, temporary: bool = False) -> None:
        self.folder = folder
        self.settings = Experiment.load(folder / SETTINGS)
        if temporary:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The history's lines as they are."""
        return RunFolder(self.folder).history()

    @cached_property
    def history(self) -> Any:
        """A pandas frame, one row a round; see `server/report/frames.py` for the columns."""
        return frames.history(self.records)

    @cached_property
    def clients(self) -> Any:
        """A pandas frame with each client's metrics: round, client, metric, value."""
        return frames.clients(self.records)

    @property
    def notes(self) -> list[str]:
        """What the run said beside its rounds: warnings, refused clients, void rounds."""
        return RunFolder(self.folder).notes()

    @property
    def headline(self) -> Headline:
        """The metric that stands for the run, as last evaluated: its name, value, and whether more is better."""
        return headline(next((each for each in reversed(self.records) if headline(each).of), {}))

    @cached_property
    def model(self) -> Any:
        """The plain torch module with the final weights, on the CPU."""
        return self._module(MODEL)

    @cached_property
    def best(self) -> Any:
        """The same with the weights of the best round by the headline. Raises SettingsError if none is kept."""
        return self._module(BEST)

    @property
    def best_round(self) -> int | None:
        """Of which round `best` is; None if none is kept."""
        about = RunFolder(self.folder).status().get("best") or {}
        return about["round"] if about.get("file") else None

    def _module(self, file: str) -> Any:
        from safetensors.torch import load_file

        if not (self.folder / file).exists():
            raise SettingsError(f"{str(self.folder)!r} holds no {file}")
        settings = self.settings
        import torch

        task = tasks.create(settings.task, settings.partition, settings.seed)
        with torch_seeded(derive(settings.seed, "model"), torch.device("cpu")):
            module = task.model()
        module.load_state_dict(load_file(self.folder / file))
        return module.eval()

    def inputs(self, path: str | Path) -> Any:
        """The rows of a table as `model` wants them, (n, d): task "table" alone. The target need not be there."""
        from common.tasks.table import Table  # torch, which who looks at a history does not need

        settings = self.settings
        task = tasks.create(settings.task, settings.partition, settings.seed)
        if not isinstance(task, Table):
            raise SettingsError(f"inputs: task.name = {settings.task.name!r}; allowed: 'table'")
        if task.census is not None:
            task.census.adopt(RunFolder(self.folder).facts())
        return task.inputs(Path(path))

    def plot(self, *columns: str) -> Any:
        """Columns of the history against the rounds, by default the headline and the loss; returns matplotlib's
        axes."""
        found = self.history
        missing = [column for column in columns if column not in found]
        if missing:
            raise SettingsError(f"plot: no column {missing[0]!r}; allowed: {', '.join(found.columns)}")
        usual = dict.fromkeys([self.headline.metric, "loss", "train.loss.weighted"])
        chosen = list(columns) or [key for key in usual if key in found and found[key].notna().any()][:2]
        height = 2.6 * len(chosen) + 0.6
        axes = found[chosen].dropna(how="all").plot(subplots=True, grid=True, figsize=(7, height))
        axes[0].set_title(self.settings.name)
        return axes

    def __repr__(self) -> str:
        found = self.headline
        reached = "" if found.value is None else f", {found.metric} {found.text}"
        return f"<Run {self.settings.name!r}: {len(self.records)} rounds{reached}>"


def simulate(
    experiment: str | Path | Tables | Experiment,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    workers: int = 1,
    device: str = "cpu",
    progress: bool | None = None,
    callback: Finish = lambda record: None,
    **overrides: Any,
) -> Run:
    """Run an experiment in this process, or its clients in `workers` processes.

    `experiment`: a file, tables or settings; `overrides` by dotted key, as in a plan's variants. Without `run_dir` the
    run folder is a temporary one. `progress`: a line that shows the rounds; default: on a terminal and in a notebook.
    `callback`: called with each round's record (a line of the history) once it is on disk; where it returns True or
    raises StopIteration the run ends with that round, its model saved, and `resume` goes on with it. Any other
    exception ends the run as failed and comes through.

    Raises SettingsError and RunError.
    """
    flower.check_version()
    settings = _settings(experiment, overrides)
    path = Path(run_dir) if run_dir is not None else Path(tempfile.mkdtemp(prefix="fedkeel-run-"))
    try:
        _run(settings, RunFolder(path), run_dir is not None, resume, workers, device, _shown(progress), callback)
    except BaseException:
        if run_dir is None:
            shutil.rmtree(path, ignore_errors=True)
        raise
    return Run(path.resolve(), temporary=run_dir is None)


def compare(
    plan: str | Path | Tables,
    *,
    run_dir: str | Path | None = None,
    workers: int | None = None,
    device: str = "cpu",
    ray: str | None = None,
    progress: bool | None = None,
) -> Any:
    """Run a plan (a file or tables) as `python -m server compare` does; returns `results` of its folder.

    The folder is runs/<name> unless `run_dir` is given: what has run there stays and is not run again.

    Raises SettingsError before anything runs; RunError after all else has run if cells failed.
    """
    from server.compare import start as bench
    from server.compare.progress import Progress
    from server.engines.grid import CLIENT_APP

    flower.check_version()
    if isinstance(plan, Mapping):
        text, settings = tomli_w.dumps(plan), Plan.of(dict(plan))
    else:
        text, settings = Plan.read(plan)
    shown = Progress(settings.name, Console(quiet=not _shown(progress), force_jupyter=False))
    means = bench.Means(CLIENT_APP, device, workers, ray)
    result = bench.run(settings, text, Path(run_dir) if run_dir else Path("runs") / settings.name, means, shown)
    if result.failed:
        told = "\n".join(f"{each.cell.folder}: {each.error}" for each in result.failed)
        raise RunError(
            f"{len(result.failed)} of {len(result.standings)} cells failed; results({str(result.folder)!r}) has the "
            f"others\n{told}"
        )
    return results(result.folder)


def load(folder: str | Path) -> Run:
    """The run in a run folder. Raises SettingsError if there is none."""
    path = Path(folder)
    if not (path / SETTINGS).exists():
        raise SettingsError(f"{str(folder)!r} holds no run: no {SETTINGS}")
    return Run(path.resolve())


def results(folder: str | Path) -> Any:
    """All finished cells of a plan's folder as one tidy pandas frame.

    Columns: `variant`, the grid's dotted keys, `tuned.<key>` of what was tuned, `seed`, `round`, then those of a
    history. Raises SettingsError if the folder holds no plan.
    """
    import pandas as pd

    from server.compare.standings import CELLS

    root = Path(folder)
    try:
        cells = json.loads((root / CELLS).read_text("utf-8"))["cells"]
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{str(folder)!r} holds no plan: {CELLS} cannot be read: {error}") from None
    found, leading = [], dict.fromkeys(["variant"])
    for cell in cells:
        if cell["stage"] != "final" or cell["status"] != "finished":
            continue
        path = root / cell["folder"]
        about = json.loads((path / CELL).read_text("utf-8"))
        frame = frames.history(RunFolder(path).history()).reset_index()
        named = {"variant": about["variant"], **about["point"]}
        named |= {f"tuned.{key}": value for key, value in about["tuned"].items()}
        leading |= dict.fromkeys(named)
        # A list, a value of `betas` for instance, is one value.
        found.append(frame.assign(seed=about["seed"], **{key: [value] * len(frame) for key, value in named.items()}))
    frame = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=["variant", "seed", "round"])
    front = [*leading, "seed", "round"]
    return frame[[*front, *(column for column in frame.columns if column not in front)]]


def _settings(experiment: str | Path | Tables | Experiment, overrides: Tables) -> Experiment:
    if isinstance(experiment, Experiment):
        tables, source = experiment.model_dump(exclude_unset=True), experiment.name
    elif isinstance(experiment, Mapping):
        tables, source = merged({}, experiment), "experiment"
    else:
        tables, source = tables_of(text_of(experiment, "experiment file"), str(experiment)), str(experiment)
    return checked(Experiment, merged(tables, overrides), source)


def _run(
    settings: Experiment,
    folder: RunFolder,
    keep: bool,
    resume: bool,
    workers: int,
    device: str,
    shown: bool,
    finish: Finish,
) -> None:
    import torch

    from server.app import run
    from server.engines.grid import CLIENT_APP, grid

    log = logging.getLogger("client.app")
    level, threads = log.level, torch.get_num_threads()
    log.setLevel(logging.ERROR)  # what simulated clients have to say reaches the server and is told by it
    try:
        with grid(CLIENT_APP, workers, device, folder.path / "memory" if keep else None) as node:
            show = _show(settings.rounds, shown)
            run(node, settings, folder, resume=resume, say=_say(shown), show=show, finish=finish)
    finally:
        log.setLevel(level)
        torch.set_num_threads(threads)
        if shown:
            print()


def _shown(progress: bool | None) -> bool:
    """In a notebook a line can be written over too."""
    return (sys.stdout.isatty() or "ipykernel" in sys.modules) if progress is None else progress


def _say(shown: bool) -> Callable[[str], None]:
    return lambda text: print(f"\r{text}", flush=True) if shown else None


def _show(rounds: int, shown: bool) -> Callable[[dict[str, Any]], None]:
    def show(record: dict[str, Any]) -> None:
        if shown:
            found = headline(record)
            reached = "" if found.value is None else f"  {found.metric} {found.text}"
            print(f"\rround {record['round']}/{rounds}{reached}", end="", flush=True)

    return show
