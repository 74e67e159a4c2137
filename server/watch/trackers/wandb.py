"""Weights & Biases: as WANDB_API_KEY, WANDB_MODE, WANDB_PROJECT and the other variables of its own say."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from common.errors import SettingsError
from common.experiment import Experiment
from common.files import write_atomically
from server.rounds.folder import MODEL, RunFolder
from server.rounds.records import Record
from server.watch.tracking import CLOSE_S, Tracker, place, scalars, settings

# Imported where used: an extra that need not be installed, and seconds of a run that does not track.

RUN_ID = "wandb-run.txt"
"""In the run folder: a resumed run goes on there."""

CODES = {"finished": 0, "stopped": 130, "failed": 1}


class WandB(Tracker):
    """One W&B run: settings as config, each round's numbers with step = round, hashes in the summary.

    Nothing else goes along: no console, no code, no git, no list of packages, nothing about the machine.
    """

    def open(self, experiment: Experiment, folder: Path) -> None:
        """Begin the run, or go on with it. Offline (WANDB_MODE) it lies in the run folder's `wandb/`."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when it is imported
        import wandb

        # wandb would ask for a key in the terminal, behind the run's own lines.
        if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise SettingsError("no key: set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline")
        self._wandb, self._folder, self._model = wandb, folder, experiment.tracking.model
        where, kept = place(experiment, folder), folder / RUN_ID
        run_id = kept.read_text("utf-8").strip() if kept.exists() else uuid.uuid4().hex[:12]
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or where.project,
            group=os.environ.get("WANDB_RUN_GROUP") or where.group,
            job_type=where.stage or None,
            name=where.name,
            id=run_id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(folder),
            config={**settings(experiment), "place": where.tags, "identity": experiment.identity},
            allow_val_change=True,  # `rounds`, after a resume
            reinit="create_new",  # cells of one process do not end each other
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                disable_job_creation=True,
                finish_timeout=CLOSE_S,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        write_atomically(kept, f"{run_id}\n".encode())

    def write(self, record: Record) -> None:
        """A round; wandb itself leaves out steps that are there already."""
        self._run.log(dict(scalars(record)), step=record["round"])
        self._run.summary["weights_sha256"] = record["sha256"]

    def close(self, status: str) -> None:
        """Hashes, the model if asked for, and the end, which waits for what is still to be sent."""
        about = RunFolder(self._folder).status()
        for key, name in (("plan", "partition_sha256"), ("initial", "initial_sha256")):
            if about.get(key):
                self._run.summary[name] = about[key]
        try:
            if self._model and status == "finished":
                artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model")
                artifact.add_file(str(self._folder / MODEL), policy="immutable")
                self._run.log_artifact(artifact)
        finally:
            self._run.finish(exit_code=CODES[status])
