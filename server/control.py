"""Runs of a Flower server: bundle and submit the app, ask how it is doing, read its log, stop it."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StartRunRequest, StopRunRequest, StreamLogsRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from common.errors import RunError, SettingsError

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RunStatus:
    """What the server says of a run: Flower's words, such as "finished", "failed", and a sentence."""

    status: str
    sub_status: str
    details: str

    @property
    def over(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.status == "finished"

    @property
    def completed(self) -> bool:
        """Whether the run has ended well."""
        return self.over and self.sub_status == "completed"


def submit_run(
    control_address: str,
    project: Path = ROOT,
    run_config: Mapping[str, str | int | float | bool] | None = None,
) -> int:
    """Bundle the project folder, start a run of it and return its id.

    Keys of `run_config` must stand in the project's `[tool.flwr.app.config]`. Raises SettingsError if the
    folder is no Flower app and RunError if the server does not take the run.
    """
    content = bundle(project)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    config = user_config_to_proto(dict(run_config or {}))
    with _control(control_address) as control:
        answer = control.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=config))
    if not answer.HasField("run_id"):
        raise RunError(f"the server at {control_address} did not start the run")
    return int(answer.run_id)


def bundle(project: Path) -> bytes:
    """The project's Flower app bundle (FAB). Raises SettingsError if the folder is no Flower app."""
    try:
        settings = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))
        # Flower's own collection walks the whole folder, virtual environments included: seconds.
        patterns = settings["tool"]["flwr"]["app"].get("fab-include", ["**/*.py"])
        paths = [path for pattern in patterns for path in project.glob(pattern) if path.is_file()]
        paths += [project / "pyproject.toml", *project.glob(".gitignore")]
        return build_fab_from_files({path.relative_to(project).as_posix(): path for path in paths})[0]
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{project} is not a Flower app: {error}") from None


def run_status(control_address: str, run_id: int) -> RunStatus:
    """How a run is doing. Raises RunError if the server does not answer or does not know the run."""
    with _control(control_address) as control:
        status = control.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
    return RunStatus(status.status, status.sub_status, status.details)


def run_log(control_address: str, run_id: int) -> str:
    """What the server app has logged so far."""
    with _control(control_address) as control:
        first = next(iter(control.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=0.0))), None)
    return first.log_output if first else ""


def stop_run(control_address: str, run_id: int) -> None:
    """Stop a run; its server app ends within about half a minute."""
    with _control(control_address) as control:
        control.StopRun(StopRunRequest(run_id=run_id))


def online_nodes(control_address: str) -> list[int]:
    """Ids of the nodes that the server takes for alive."""
    with _control(control_address) as control:
        return sorted(
            node.node_id for node in control.ListNodes(ListNodesRequest()).nodes_info if node.status == "online"
        )


@contextmanager
def _control(address: str) -> Iterator[ControlHttpClient]:
    client = ControlHttpClient.from_server_address(
        address, True, None, [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        flower_error = FlowerError.from_json(error.response.text)
        text = " ".join(filter(None, (flower_error.message, flower_error.public_details))) if flower_error else ""
        raise RunError(f"the Flower server at {address}: {text or error}") from None
    except httpx.HTTPError as error:
        raise RunError(f"no answer from the Flower server at {address}: {error}") from None
    finally:
        client.close()
