"""The control leg of a Flower server: submit runs, ask how they are doing, stop them; say which sites may join."""

from __future__ import annotations

import hashlib
import ssl
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

from common.errors import RunError, SettingsError
from common.flower import ROOT

LOOK_S = 4.0
"""Two such questions end within the time that Prometheus waits for an answer."""
Watcher = Callable[[Callable[[str], Any]], None]
"""Told how to ask a SuperLink: with what answers a GET of a path of its control port."""
NEVER = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
"""In errors that stay however long one waits."""


class NoAnswer(RunError):
    """Nobody answers at a control address: the SuperLink is not there yet, or not any more."""


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


@dataclass(frozen=True)
class Node:
    """A site as the server knows it: its id there, its name ("" without node keys) and its public key in PEM."""

    node_id: int
    name: str
    public_key: bytes
    status: str = ""
    """Flower's word: "registered", "online" or "offline"."""


@dataclass(frozen=True)
class Control:
    """A Flower server's control address, HOST:PORT. With `ca`, the file of its authority, over TLS.

    Every call raises RunError if the server does not answer or refuses.
    """

    address: str
    ca: Path | None = None
    token: str = field(default="", repr=False)
    """Who calls, where the SuperLink has `--users`."""

    def submit(self, project: Path = ROOT, run_config: Mapping[str, str | int | float | bool] | None = None) -> int:
        """Bundle the project folder, start a run of it and return its id.

        Keys of `run_config` must stand in the project's `[tool.flwr.app.config]`. Raises SettingsError if the
        folder is no Flower app.
        """
        content = bundle(project)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        config = user_config_to_proto(dict(run_config or {}))
        with self._client() as client:
            answer = client.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=config))
        if not answer.HasField("run_id"):
            raise RunError(f"the server at {self.address} did not start the run")
        return int(answer.run_id)

    def status(self, run_id: int) -> RunStatus:
        """How a run is doing."""
        with self._client() as client:
            status = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
        return RunStatus(status.status, status.sub_status, status.details)

    def log(self, run_id: int) -> str:
        """What the server app has logged so far."""
        with self._client() as client:
            first = next(iter(client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=0.0))), None)
        return first.log_output if first else ""

    def runs(self) -> dict[int, tuple[RunStatus, str]]:
        """All runs: how they are doing, and the claim that each was submitted with (see `RunFolder.claimed`)."""
        with self._client() as client:
            found = client.ListRuns(ListRunsRequest()).run_dict
        return {
            int(id): (
                RunStatus(run.status.status, run.status.sub_status, run.status.details),
                str(user_config_from_proto(run.override_config).get("claim", "")),
            )
            for id, run in found.items()
        }

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 30.0) -> Any:
        """A call of our own beside Flower's, see `server/deploy/runs_api.py`: its answer, from JSON."""
        scheme = "https" if self.ca else "http"
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            trust = ssl.create_default_context(cafile=str(self.ca)) if self.ca else True
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"the authority's certificate {str(self.ca)!r} cannot be used: {error}") from None
        try:
            with httpx.Client(verify=trust, timeout=timeout_s) as client:
                answer = client.request(
                    method, f"{scheme}://{self.address}{path}", json=body if method == "POST" else None, headers=headers
                )
        except httpx.HTTPError as error:
            raise RunError(f"no answer from the Flower server at {self.address}: {error}") from None
        if answer.is_error:
            raise RunError(f"the server at {self.address}: {_detail(answer)}")
        return answer.json()

    def look(self, path: str) -> Any:
        """`ask("GET", path)` for who cannot wait long, such as metrics that are scraped."""
        return self.ask("GET", path, timeout_s=LOOK_S)

    def stop(self, run_id: int) -> None:
        """Stop a run; its server app ends within about half a minute."""
        with self._client() as client:
            client.StopRun(StopRunRequest(run_id=run_id))

    def nodes(self) -> list[Node]:
        """The sites that may join, and those that are here."""
        with self._client() as client:
            found = client.ListNodes(ListNodesRequest()).nodes_info
        return [Node(n.node_id, n.name, n.public_key, n.status) for n in found if n.status != "unregistered"]

    def online(self) -> list[int]:
        """Ids of the nodes that the server takes for alive."""
        return sorted(node.node_id for node in self.nodes() if node.status == "online")

    def register(self, node: Node) -> None:
        """Let a site join under its name and key."""
        with self._client() as client:
            client.RegisterNode(RegisterNodeRequest(public_key=node.public_key, name=node.name))

    def unregister(self, node: Node) -> None:
        """Shut a site out."""
        with self._client() as client:
            client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))

    def absent(self) -> str:
        """Why no SuperLink answers, "" if one does, whatever it says. Raises SettingsError where it never will."""
        try:
            self.online()
        except NoAnswer as error:
            return str(error)
        except RunError:
            return ""
        return ""

    @contextmanager
    def _client(self) -> Iterator[ControlHttpClient]:
        own = [_Bearer(self.token)] if self.token else []
        try:
            client = ControlHttpClient.from_server_address(
                self.address,
                self.ca is None,
                self.ca.read_bytes() if self.ca else None,
                [
                    RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
                    *own,
                ],
            )
        except (OSError, ValueError) as error:
            raise SettingsError(f"the authority's certificate {str(self.ca)!r} cannot be used: {error}") from None
        try:
            yield client
        except httpx.HTTPStatusError as error:
            flower_error = FlowerError.from_json(error.response.text)
            text = " ".join(filter(None, (flower_error.message, flower_error.public_details))) if flower_error else ""
            raise RunError(f"the Flower server at {self.address}: {text or error}") from None
        except httpx.HTTPError as error:
            if any(word in str(error) for word in NEVER):
                raise SettingsError(
                    f"--superlink: {self.address}: {error}; is this its ca.pem, and its name?"
                ) from None
            raise NoAnswer(f"no answer from the Flower server at {self.address}: {error}") from None
        finally:
            client.close()


class _Bearer:
    """Says who calls."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the token."""
        context.request.headers["authorization"] = f"Bearer {self._token}"
        return call_next(context)


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def bundle(project: Path) -> bytes:
    """The project's Flower app bundle (FAB). Raises SettingsError if the folder is no Flower app."""
    try:
        settings = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))
        # Flower's own collection walks the whole folder, virtual environments included: seconds.
        patterns = settings["tool"]["flwr"]["app"].get("fab-include", ["**/*.py"])
        paths = [path for pattern in patterns for path in project.glob(pattern.lstrip("/")) if path.is_file()]
        paths += [project / "pyproject.toml", *project.glob(".gitignore")]
        return build_fab_from_files({path.relative_to(project).as_posix(): path for path in paths})[0]
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{project} is not a Flower app: {error}") from None
