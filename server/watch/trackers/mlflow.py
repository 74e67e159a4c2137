"""MLflow: where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.experiment import Experiment
from common.files import write_atomically
from server.rounds.folder import MODEL, RunFolder
from server.rounds.records import Record
from server.watch.tracking import Tracker, flat, place, scalars, settings

# Imported where used: an extra that need not be installed, and seconds of a run that does not track.

RUN_ID = "mlflow-run.txt"
"""In the run folder: a resumed run goes on there."""

STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
BATCH, LONGEST = 100, 6000  # MLflow's bounds of a request's parameters and of one's text


class MLflow(Tracker):
    """One MLflow run: settings as parameters, each round's numbers as metrics with step = round, hashes as tags.

    The client's own interface, not `mlflow.log_*`: that has one active run a process and adds git and user to it.
    """

    def open(self, experiment: Experiment, folder: Path) -> None:
        """Find or create the run."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient, get_tracking_uri

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._metric, self._tag = Metric, RunTag
        self._folder, self._model, self._sha256 = folder, experiment.tracking.model, ""
        with _alone(get_tracking_uri()):
            self._client: Any = MlflowClient()
            run = self._earlier(folder)
            project = self._experiment(place(experiment, folder).project)
        if run is None:
            where = place(experiment, folder)
            tags = where.tags | {"group": where.group, "identity": experiment.identity}
            run = self._client.create_run(project, run_name=where.name, tags=tags)
            write_atomically(folder / RUN_ID, f"{run.info.run_id}\n".encode())
        self._run = run.info.run_id
        self._last = max((m.step for m in self._client.get_metric_history(self._run, "round/accepted")), default=0)
        given = [(_name(key), value[:LONGEST]) for key, value in flat(settings(experiment))]
        # Parameters never change: after a resume with more rounds the first number stays.
        new = [Param(key, value) for key, value in given if key not in run.data.params]
        for start in range(0, len(new), BATCH):
            self._client.log_batch(self._run, params=new[start : start + BATCH])
        self._client.update_run(self._run, status="RUNNING")

    def _earlier(self, folder: Path) -> Any:
        """The run that an earlier process began, unless it was deleted or lies on another server."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run((folder / RUN_ID).read_text("utf-8").strip())
        except FileNotFoundError:
            return None
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self, project: str) -> str:
        """The id of the MLflow experiment: MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME if set, else `project`."""
        from mlflow.exceptions import MlflowException

        if chosen := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return chosen
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another cell of the plan was faster
            if (found := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(found.experiment_id)

    def write(self, record: Record) -> None:
        """Metrics of a round; one that is there already has the same numbers."""
        self._sha256 = record["sha256"]
        if record["round"] <= self._last:
            return
        now = int(time.time() * 1000)
        metrics = [self._metric(_name(tag), value, now, record["round"]) for tag, value in scalars(record)]
        self._client.log_batch(self._run, metrics=metrics)
        self._last = record["round"]

    def close(self, status: str) -> None:
        """Tags, the model if asked for, and the state of the run."""
        about = RunFolder(self._folder).status()
        hashes = {"weights_sha256": self._sha256, "partition_sha256": about.get("plan")}
        hashes["initial_sha256"] = about.get("initial")
        self._client.log_batch(self._run, tags=[self._tag(key, value) for key, value in hashes.items() if value])
        try:
            if self._model and status == "finished":
                self._client.log_artifact(self._run, str(self._folder / MODEL))
        finally:
            self._client.set_terminated(self._run, STATES[status])


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Cells that begin together would all make the tables of a new SQLite file, and break it: one after the other."""
    file = uri.removeprefix("sqlite:///")
    if file == uri or not file:
        yield
        return
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _name(key: str) -> str:
    """Of what MLflow allows in a name."""
    return re.sub(r"[^\w\-. /]", "_", key)
