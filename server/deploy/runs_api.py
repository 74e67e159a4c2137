"""Runs, sites and the queue over HTTP, beside Flower's control API: what `python -m server runs` and `sites` ask."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from common.deploy.audit import AuditLog
from common.errors import SettingsError
from common.experiment import Experiment
from server.deploy.gate import OWN, Owners, user_of
from server.deploy.queue import Entry, Queue
from server.deploy.users import Role, User
from server.rounds.folder import HISTORY, ROLL, SETTINGS, RunFolder
from server.rounds.stopping import GRACE_S

MOST_BODY = 2**22
Found = dict[str, Any]


class Fault(Exception):
    """A call that cannot be answered; `status` is that of HTTP."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Books:
    """What is known of runs and sites. `runs`: Flower's; `nodes`: Flower's, as NodeInfo."""

    def __init__(
        self,
        queue: Queue,
        owners: Owners,
        audit: AuditLog,
        runs: Callable[[], Sequence[Any]],
        nodes: Callable[[], Sequence[Any]],
    ) -> None:
        self._queue, self._owners, self._audit, self._runs, self._nodes = queue, owners, audit, runs, nodes

    def everything(self) -> list[Found]:
        """Every run, the newest first, and before them what waits."""
        owners, entries = self._owners.all(), self._queue.entries()
        by_run = {entry.run: entry for entry in entries if entry.run}
        found = [_of_flower(run, owners, by_run.get(run.run_id)) for run in self._runs()]
        found.sort(key=lambda each: each["since"], reverse=True)
        waiting = [_of_queue(entry) for entry in entries if entry.state in ("waiting", "submitting")]
        failed = [_of_queue(entry) for entry in entries if entry.state == "done" and entry.error and not entry.run]
        return [*waiting, *found, *failed]

    def one(self, ref: str) -> Found:
        """A run by its id, its place in the queue or its name (the newest). Raises Fault."""
        runs = self.everything()
        for key in ("id", "queue", "name"):
            for run in runs:
                if ref and run[key] == ref:
                    return run
        raise Fault(404, f"there is no run {ref!r} here; `python -m server runs list` names them")

    def show(self, ref: str) -> Found:
        """A run with its settings, the last rounds and why clients were dropped."""
        run = self.one(ref)
        path = Path(run["folder"]) if run["folder"] else None
        history = RunFolder(path).history() if path else []
        causes: dict[str, dict[str, int]] = {}
        for line in history:
            for name, cause in line.get("causes", {}).items():
                of = causes.setdefault(name, {})
                of[cause] = of.get(cause, 0) + 1
        settings = (path / SETTINGS).read_text("utf-8") if path and (path / SETTINGS).exists() else run["experiment"]
        keys = ("round", "sampled", "accepted", "dropped", "changed", "grown", "void")
        return {
            **run,
            "settings": settings,
            "rounds_done": [{key: line[key] for key in keys if key in line} for line in history[-20:]],
            "causes": causes,
            "notes": RunFolder(path).notes()[-20:] if path else [],
        }

    def add(self, user: User, text: str, folder: str = "") -> Found:
        """Put an experiment into the queue. Raises SettingsError for one that cannot work."""
        experiment = Experiment.parse(text, "experiment")
        if folder:
            RunFolder(folder).require(resume=False)
        entry = self._queue.add(experiment.name, text, user.name, folder and str(Path(folder).resolve()))
        self._audit.try_record("queued", actor=user.name, run=entry.name, id=entry.id)
        return _of_queue(entry)

    def stop(self, user: User, ref: str, grace_s: float) -> Found:
        """Ask a run to stop as SIGTERM does, or take it out of the queue."""
        run = self._allowed(user, ref)
        if run["queue"]:
            self._queue.change(run["queue"], stop=True)
        if run["status"] == "waiting" and run["queue"] and self._queue.withdraw(run["queue"]):
            self._audit.try_record("stopped", "withdrawn", actor=user.name, run=run["name"], id=run["queue"])
            return {**run, "status": "withdrawn"}
        if run["status"] in ("finished", "failed", "stopped", "withdrawn"):
            raise Fault(409, f"{run['name']} is {run['status']} already")
        RunFolder(run["folder"]).stop.ask(grace_s, user.name or "somebody")
        self._audit.try_record("stopped", "asked", actor=user.name, run=run["name"], id=run["id"], grace_s=grace_s)
        return {**run, "status": "stopping"}

    def resume(self, user: User, ref: str, text: str = "") -> Found:
        """Put a run that has ended into the queue again, from its newest checkpoint; `text`: other settings."""
        run = self._allowed(user, ref)
        if run["status"] not in ("failed", "stopped", "finished", "lost"):
            raise Fault(409, f"{run['name']} is {run['status']}: there is nothing to resume")
        RunFolder(run["folder"]).require(resume=True)
        experiment = Experiment.parse(text or run["experiment"], "experiment")
        entry = self._queue.add(experiment.name, text or run["experiment"], user.name, run["folder"], resume=True)
        self._audit.try_record("resumed", "queued", actor=user.name, run=run["name"], id=entry.id)
        return _of_queue(entry)

    def _allowed(self, user: User, ref: str) -> Found:
        run = self.one(ref)
        if user.role is not Role.operate and (not user.name or run["owner"] != user.name):
            raise Fault(403, f"{run['name']} is {run['owner'] or 'nobody'}'s; this needs {Role.operate}")
        return run

    def sites(self) -> list[Found]:
        """Who may join or is here, with what it said at the newest roll call and why it was refused."""
        rolls: dict[int, Found] = {}
        refused: dict[int, str] = {}
        for run in reversed(self.everything()):  # the newest last
            if not run["folder"]:
                continue
            members = _json(Path(run["folder"]) / ROLL)
            odd = _odd(members)
            rolls |= {int(each["node"]): {**each, "odd": each.get("data_schema") in odd} for each in members}
            for note in RunFolder(run["folder"]).notes():
                word, _, why = note.partition(": ")
                if word.startswith("refused node ") and word.split()[-1].lstrip("-").isdecimal():
                    refused[int(word.split()[-1])] = why
        found = []
        for node in self._nodes():
            if node.status == "unregistered":
                continue
            roll = rolls.get(node.node_id, {})
            found.append(
                {
                    "name": node.name or roll.get("name", ""),
                    "node": str(node.node_id),
                    "status": node.status,
                    "seen": _seen(node),
                    "seen_at": time.time() if node.status == "online" else _seconds(_seen(node)),
                    "examples": roll.get("examples"),
                    "versions": roll.get("versions", ""),
                    "arithmetic": roll.get("arithmetic", ""),
                    "schema": roll.get("data_schema", ""),
                    "schema_differs": bool(roll.get("odd")),
                    "device": roll.get("device", ""),
                    "refused": "" if roll else refused.get(node.node_id, ""),
                }
            )
        return sorted(found, key=lambda site: (site["status"] != "online", site["name"], site["node"]))


def _odd(roll: Sequence[Found]) -> set[str]:
    """Of the schemas of a roll those that are not most clients'; all of them where there is no such majority."""
    count = Counter(member["data_schema"] for member in roll if member.get("data_schema"))
    usual = next((schema for schema, many in count.items() if 2 * many > count.total()), None)
    return set(count) - {usual}


def _seen(node: Any) -> str:
    """When a node was heard last: it promises to be there until some time after each word."""
    return "now" if node.status == "online" else str(node.last_deactivated_at or node.online_until or "")


def _seconds(moment: str) -> float | None:
    """A time as ISO 8601 or in seconds, in seconds since 1970; None for none."""
    try:
        return float(moment)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None


def _json(path: Path) -> list[Found]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _of_queue(entry: Entry) -> Found:
    state = {"waiting": "waiting", "submitting": "starting", "done": "failed"}.get(entry.state, entry.state)
    return {
        "id": "",
        "queue": entry.id,
        "name": entry.name,
        "status": state,
        "round": max(entry.reached, 0),
        "rounds": None,
        "round_at": None,
        "since": _time(entry.since),
        "owner": entry.owner,
        "folder": entry.folder,
        "error": entry.error,
        "experiment": entry.experiment,
    }


def _of_flower(run: Any, owners: Mapping[str, str], entry: Entry | None) -> Found:
    config = run.override_config
    path = str(config.get("run-dir", ""))
    folder = RunFolder(path) if path else None
    status = folder.status() if folder else {}
    own = folder is not None and status.get("claim") == config.get("claim", "")
    word = str(status.get("status", "")) if own else ""
    if run.status.status == "finished" and word in ("", "starting", "running", "stopping"):
        # Ended without a word in its folder, or another run has the folder by now.
        sub = run.status.sub_status
        word = {"completed": "finished", "stopped": "stopped"}.get(sub, "lost" if word else "failed")
    last = _last(folder.path / HISTORY) if folder and own else {}
    name = Path(path).name or str(run.run_id)
    return {
        "id": str(run.run_id),
        "queue": entry.id if entry else "",
        "name": name,
        "status": word or {"pending": "starting"}.get(run.status.status, run.status.status),
        "round": last.get("round", 0),
        "rounds": status.get("rounds"),
        "round_at": _seconds(str(last.get("time", ""))),
        "since": str(run.running_at or run.starting_at or run.pending_at),
        "owner": entry.owner if entry else owners.get(str(run.run_id), ""),
        "folder": path,
        "error": str(status.get("error", "")) if own else run.status.details,
        "experiment": str(config.get("experiment-toml", "")),
    }


def _last(path: Path) -> Found:
    """The last whole line of a history, without reading the rest."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            window = 2**16
            while True:
                file.seek(max(0, size - window))
                lines = file.read().split(b"\n")
                if len(lines) > 2 or window >= size:
                    break
                window *= 4
        for line in reversed(lines):
            if line.endswith(b"}"):
                found: Found = json.loads(line)
                return found
    except (OSError, ValueError):
        pass
    return {}


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(seconds))


def routes(app: Any, queue: Queue, owners: Owners, audit: AuditLog) -> list[Route]:
    """The calls, for the SuperLink's application."""

    def state() -> Any:
        return app.state.linkstate_factory.state()

    books = Books(queue, owners, audit, lambda: state().get_run_info(), lambda: state().get_node_info())

    def served(answer: Callable[[User, Mapping[str, str], Found], Any]) -> Callable[[Request], Any]:
        async def handler(request: Request) -> JSONResponse:
            body: Found = {}
            if request.method == "POST":
                content = b""
                async for part in request.stream():
                    content += part
                    if len(content) > MOST_BODY:
                        return JSONResponse({"detail": "too large"}, 413)
                try:
                    body = json.loads(content or b"{}")
                    assert isinstance(body, dict)
                except (ValueError, AssertionError):
                    return JSONResponse({"detail": "a JSON object is needed"}, 400)
            try:
                return JSONResponse(await run_in_threadpool(answer, user_of(request), request.path_params, body))
            except Fault as fault:
                return JSONResponse({"detail": str(fault)}, fault.status)
            except (SettingsError, ValueError) as error:
                return JSONResponse({"detail": str(error)}, 400)

        return handler

    def text(body: Found, key: str) -> str:
        return str(body.get(key, ""))

    calls: dict[tuple[str, str], Callable[[User, Mapping[str, str], Found], Any]] = {
        ("GET", "runs"): lambda user, path, body: books.everything(),
        ("GET", "runs/{ref}"): lambda user, path, body: books.show(path["ref"]),
        ("POST", "queue"): lambda user, path, body: books.add(user, text(body, "experiment"), text(body, "folder")),
        ("POST", "runs/{ref}/stop"): lambda user, path, body: books.stop(
            user, path["ref"], max(0.0, float(body.get("grace_s", GRACE_S)))
        ),
        ("POST", "runs/{ref}/resume"): lambda user, path, body: books.resume(
            user, path["ref"], text(body, "experiment")
        ),
        ("GET", "sites"): lambda user, path, body: books.sites(),
    }
    return [Route(OWN + path, served(answer), methods=[method]) for (method, path), answer in calls.items()]
