"""The run folder: settings, history, checkpoints, model, events. One process writes it at a time."""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save

from common.errors import SettingsError
from common.experiment import Experiment
from common.files import locked, write_atomically
from common.vector import State
from server.rounds.provenance import STARTS_KEPT, now, origin, stamped, unstamped
from server.rounds.stopping import StopFile

HISTORY, NOTES, ROLL, SETTINGS, MODEL, BEST, EARLIER, STATUS, CHECKPOINTS, CELL, FACTS = (
    "history.jsonl",
    "notes.log",
    "roll.json",
    "experiment.toml",
    "model.safetensors",
    "best.safetensors",
    "best",
    "run.json",
    "checkpoints",
    "cell.json",
    "columns.json",
)


class RunFolder:
    """A folder `runs/<name>/`. `open` locks it for as long as the run lasts."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()

    @property
    def stop(self) -> StopFile:
        """The request to stop the run in this folder."""
        return StopFile(self.path)

    @property
    def checkpoints(self) -> Path:
        """Where the round-stamped checkpoints lie."""
        return self.path / CHECKPOINTS

    @contextmanager
    def open(self, resume: bool, claim: str = "") -> Iterator[None]:
        """Lock the folder. A new one goes again if nothing ran.

        With `claim`, that of the command for which this process works (see `claimed`), requests to stop that came
        since are still good; without, they were for an earlier run and are taken back.

        Raises SettingsError if another process uses it, if it holds a run and `resume` is off, if it is on and there
        is none, or if the command has given the run up or another one has taken its place.
        """
        with ExitStack() as stack:
            if not self.path.exists():
                stack.callback(self._remove_if_empty)
            try:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.path / ".lock", f"run folder {str(self.path)!r}"))
            except OSError as error:
                raise SettingsError(f"run folder {str(self.path)!r} cannot be written: {error}") from None
            self.require(resume)
            if not claim:
                self.stop.clear()
            elif self.status().get("claim") != claim:
                raise SettingsError(f"run folder {str(self.path)!r}: who submitted this run has given it up since")
            yield

    @contextmanager
    def claimed(self, resume: bool) -> Iterator[str]:
        """Look whether the folder is free before anything starts, and say for whom the server app will open it: the
        claim, for its `open`. A new folder goes again if nothing ran. Raises as `open` does.

        A run can begin long after it was submitted. By then the command may have been told to stop, or another one may
        have resumed the run: the claim tells who is late.
        """
        new = not self.path.exists()
        try:
            yield self.claim(resume)
        finally:
            if new and not self.in_use():
                self._remove_if_empty()

    def claim(self, resume: bool) -> str:
        """As `claimed`, for one who outlives this process; the folder stays."""
        claim = uuid.uuid4().hex
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"run folder {str(self.path)!r} cannot be written: {error}") from None
        with self.open(resume):
            # What an earlier run left there must not be taken for the word of this one.
            self.set_status("starting", claim=claim)
        return claim

    def withdraw(self, claim: str) -> bool:
        """Give a run up that has been submitted; False if its server app has the folder open: then it must be asked."""
        with suppress(SettingsError, OSError), locked(self.path / ".lock", ""):
            if self.status().get("status") == "starting" and self.status().get("claim") == claim:
                self.set_status("stopped", exit_code=0, claim="")
                return True
        return False

    def _remove_if_empty(self) -> None:
        if not self.holds_run():
            shutil.rmtree(self.path, ignore_errors=True)

    def in_use(self) -> bool:
        """Whether another process has the folder open."""
        try:
            with locked(self.path / ".lock", ""):
                return False
        except SettingsError:
            return True
        except OSError:
            return False

    def require(self, resume: bool) -> None:
        """Raise SettingsError if the folder does not fit: it holds a run to be kept, or none to resume."""
        if resume and not self.holds_run():
            raise SettingsError(f"nothing to resume: {str(self.path)!r} holds no run")
        if not resume and self.holds_run():
            raise SettingsError(
                f"run folder {str(self.path)!r} holds a run already: add --resume to go on with it, or choose another"
            )

    def holds_run(self) -> bool:
        """Whether a run left anything here."""
        return (self.path / HISTORY).exists() or any(self.checkpoints.glob("*.safetensors"))

    def history(self) -> list[dict[str, Any]]:
        """All whole lines of the history; a line cut off by a crash is left out."""
        return list(read_history(self.path / HISTORY))

    def note(self, text: str) -> None:
        """Add a line to what the run said beside its rounds: warnings, refused clients, void rounds."""
        with (self.path / NOTES).open("a", encoding="utf-8") as file:
            file.write(stamped(text.replace("\n", " ")) + "\n")

    def notes(self) -> list[str]:
        """What the run said, without the times."""
        with suppress(FileNotFoundError):
            return [unstamped(line) for line in (self.path / NOTES).read_text("utf-8").splitlines()]
        return []

    def append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Add a line to the history; returns it as it is read again."""
        line: dict[str, Any] = plain(record)
        with (self.path / HISTORY).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        return line

    def cut_history(self, round: int) -> None:
        """Drop the lines after `round`: those rounds are run again from its checkpoint."""
        kept = [json.dumps(line) + "\n" for line in self.history() if line["round"] <= round]
        if (self.path / HISTORY).exists():
            write_atomically(self.path / HISTORY, "".join(kept).encode())

    def save_settings(self, experiment: Experiment) -> None:
        """The resolved settings."""
        write_atomically(self.path / SETTINGS, experiment.toml(full=True).encode())

    def save_model(self, tensors: State) -> Path:
        """The final model as named tensors that load into the plain torch model."""
        write_atomically(self.path / MODEL, save(tensors))
        return self.path / MODEL

    def save_facts(self, facts: str) -> None:
        """Mean and deviation by column, as the run learned them before round 1: whoever uses the model needs them."""
        write_atomically(self.path / FACTS, json.dumps(json.loads(facts), indent=1).encode())

    def facts(self) -> str:
        """What `save_facts` wrote; "" if nothing was."""
        with suppress(FileNotFoundError):
            return json.dumps(json.loads((self.path / FACTS).read_text("utf-8")))
        return ""

    def save_roll(self, members: list[dict[str, Any]]) -> None:
        """Who was on the roll before round 1, with numbers of examples, class counts (if shared) and versions."""
        write_atomically(self.path / ROLL, json.dumps(members, indent=1).encode())

    def set_status(self, status: str, **more: Any) -> None:
        """What became of the run: "starting", "running", "finished", "stopped" or "failed", and why.

        From "running" on it keeps `after`, the round from which on this process has written the history, `plan`, the
        hash of the partition, `initial`, the hash of the weights before round 1, and `arithmetic`, how server and
        clients compute; the last three over resumes, too, and with them `claim`, for which command it runs (`claimed`),
        `changes` (`server/rounds/changes.py`), `starts` (`note_start`), `headline`, the metric that stands for the run,
        and `metrics`, of each whether more is better, and
        `best` (server/rounds/best.py). "finished" has `ended` (round, why) where that was before the
        last round. `time`: when this was.
        """
        lasting = {"initial", "plan", "arithmetic", "claim", "changes", "starts", "headline", "metrics", "best"}
        lasting |= {"after"} if status != "starting" else set()
        kept = {key: value for key, value in self.status().items() if key in lasting}
        value = {"status": status, "time": now(), **kept, **more}
        write_atomically(self.path / STATUS, json.dumps(value, indent=1).encode())

    def note_start(self, **more: Any) -> None:
        """Add this process to run.json's `starts`: time, host, user, command, versions, and `more`."""
        starts = self.status().get("starts")
        kept = starts[-STARTS_KEPT + 1 :] if isinstance(starts, list) else []
        self.amend_status(starts=[*kept, {**origin(), **more}])

    def amend_status(self, **more: Any) -> None:
        """Add to what `set_status` wrote last."""
        write_atomically(self.path / STATUS, json.dumps({**self.status(), **more}, indent=1).encode())

    def status(self) -> dict[str, Any]:
        """What `set_status` wrote last; {} before."""
        with suppress(OSError, json.JSONDecodeError):
            value = json.loads((self.path / STATUS).read_text("utf-8"))
            return value if isinstance(value, dict) else {}
        return {}


def plain(value: Any) -> Any:
    """A record as JSON can hold it: None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a history file."""
    with suppress(FileNotFoundError):
        for line in path.read_text("utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


def choose_folder(root: str | Path, name: str, resume: bool) -> Path:
    """The folder of a run called `name`: with `resume` the latest one, else one that is not there yet."""
    root = Path(root)
    taken = [path for path in (root / name, *_numbered(root, name)) if RunFolder(path).holds_run()]
    if resume:
        if not taken:
            raise SettingsError(f"nothing to resume: there is no run {name!r} in {str(root.resolve())!r}")
        return taken[-1]
    return root / name if not taken else root / f"{name}-{_number(taken[-1], name) + 1}"


def _numbered(root: Path, name: str) -> list[Path]:
    found = [path for path in root.glob(f"{name}-*") if path.name.removeprefix(f"{name}-").isdigit()]
    return sorted(found, key=lambda path: _number(path, name))


def _number(path: Path, name: str) -> int:
    return int(path.name.removeprefix(name).removeprefix("-") or 1)
