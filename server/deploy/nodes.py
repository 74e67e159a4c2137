"""Who may join: a file of site names and public keys, and a running SuperLink that follows it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import tomli_w

from common.deploy import keys
from common.errors import RunError, SettingsError
from common.files import write_atomically
from common.settings import name_fault, tables_of, text_of
from server.deploy.control import Control, Node

log = logging.getLogger("server.deploy.nodes")

LOOK_S = 1.0

Nodes = dict[str, bytes]
"""Site name -> public key in PEM."""


def read(path: Path) -> Nodes:
    """The sites of a nodes file. Raises SettingsError for a file that is wrong in any line."""
    if not path.exists():
        raise SettingsError(
            f"--nodes: there is no file {str(path)!r}; make it with: python -m server nodes add NAME KEY.pub"
        )
    tables = tables_of(text_of(path, "nodes file"), f"nodes file {str(path)!r}")
    entries = tables.get("nodes", {})
    if set(tables) - {"nodes"} or not isinstance(entries, dict):
        raise SettingsError(f'nodes file {str(path)!r} holds one table, [nodes], of name = "public key"')
    nodes: Nodes = {}
    for name, text in entries.items():
        if fault := name_fault(name):
            raise SettingsError(f"nodes file {str(path)!r}: {fault}")
        if not isinstance(text, str):
            raise SettingsError(f"nodes file {str(path)!r}: {name!r} needs a public key as text")
        nodes[name] = keys.read_public(text, f"nodes file {str(path)!r}: the key of {name!r}")
    _unique(nodes, str(path))
    return nodes


def write(path: Path, nodes: Nodes) -> None:
    """Replace the nodes file."""
    table = {name: keys.openssh(pem) for name, pem in sorted(nodes.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, tomli_w.dumps({"nodes": table}).encode())


def add(path: Path, name: str, key: Path) -> str:
    """Allow a site; returns its key's fingerprint. Raises SettingsError if its name or key is there already."""
    if fault := name_fault(name):
        raise SettingsError(fault)
    try:
        content = key.read_bytes()
    except OSError as error:
        raise SettingsError(f"{str(key)!r} cannot be read: {error.strerror}") from None
    nodes = read(path) if path.exists() else {}
    if name in nodes:
        raise SettingsError(f"{name!r} has a key already; to replace it, remove {name!r} first")
    nodes[name] = keys.read_public(content, repr(str(key)))
    _unique(nodes, str(path))
    write(path, nodes)
    return keys.fingerprint(nodes[name])


def remove(path: Path, name: str) -> None:
    """Shut a site out. Raises SettingsError if it is not there."""
    nodes = read(path)
    if name not in nodes:
        raise SettingsError(f"{name!r} is not in {str(path)!r}; there are: {', '.join(sorted(nodes)) or 'none'}")
    del nodes[name]
    write(path, nodes)


def _unique(nodes: Nodes, path: str) -> None:
    owner: dict[bytes, str] = {}
    for name, pem in nodes.items():
        if (other := owner.setdefault(pem, name)) != name:
            raise SettingsError(f"nodes file {path!r}: {other!r} and {name!r} have the same key; each needs its own")


def reconcile(control: Control, wanted: Nodes, say: Callable[[str], None]) -> None:
    """Make the SuperLink know exactly the wanted sites: others are removed first, missing ones registered."""
    known = {node.name: node for node in control.nodes()}
    for name, node in known.items():
        if wanted.get(name) != node.public_key:
            control.unregister(node)
            say(f"site {name or node.node_id} was removed: its key is refused from now on")
    for name, pem in wanted.items():
        if name in known and known[name].public_key == pem:
            continue
        try:
            control.register(Node(0, name, pem))
            say(f"site {name} may join with key {keys.fingerprint(pem)}")
        except RunError as error:
            # A SuperLink keeps the keys that were removed and never takes one back.
            say(f"site {name} cannot be registered: {error}; if this key was removed before, the site needs a new one")


class Admission:
    """Keeps a SuperLink in step with the nodes file, in a thread of its own; a context manager.

    Entering reads the file and registers its sites, or raises SettingsError. Later a file that is wrong is told and
    the sites stay as they were.
    """

    def __init__(self, path: Path, control: Control, say: Callable[[str], None]) -> None:
        self._path, self._control, self._say = path, control, say
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nodes", daemon=True)
        self._seen: tuple[int, int] | None = None

    def __enter__(self) -> Admission:
        self._seen = self._stamp()
        reconcile(self._control, read(self._path), self._say)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _stamp(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

    def _follow(self) -> None:
        while not self._end.wait(LOOK_S):
            if (stamp := self._stamp()) == self._seen:
                continue
            try:
                reconcile(self._control, read(self._path), self._say)
            except SettingsError as error:
                self._say(f"the sites stay as they were: {error}")
            except RunError as error:
                log.warning("nodes: %s; trying again", error)
                continue
            self._seen = stamp
