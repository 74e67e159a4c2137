"""What a server looks at before it opens: itself, its experiment, its ports, its certificates."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import importlib.util
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.deploy import probe
from common.deploy.addresses import answers, ip_address, is_loopback, reachable
from common.deploy.checks import VERSIONS_S, Check, each, private, show, versions, writable
from common.errors import RunError, SettingsError
from common.flower import environment
from server.commands.options import token_of

# Imported where used: torch and Flower take seconds, and what cannot be imported is a line of its check.
if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from server.deploy.certs import Certificates

PREPARE_S, ASK_S = 120.0, 8.0
WRONG_CLOCK_S = 5.0
"""Flower refuses what a site signs more than so many seconds ahead."""

# Where a module must be found by the server app: in a process that starts elsewhere, with the bundle beside it.
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_BUNDLED = ("server", "client", "strategies", "common")


def doctor_command(**settings: Any) -> int:
    """Print the checks of `checks` with the same arguments as they come; returns the exit code, 1 if one fails."""
    return show(checks(**settings))


def checks(
    experiment: Path | None = None,
    *,
    host: str = "127.0.0.1",
    fleet_port: int = 9092,
    control_host: str = "127.0.0.1",
    control_port: int = 8000,
    certs: Path | None = None,
    insecure: bool = False,
    nodes: Path | None = None,
    state: Path | None = None,
    run_dir: Path | None = None,
    superlink: str | None = None,
    ca: Path | None = None,
    names: Sequence[str] = (),
    sets: Sequence[str] = (),
) -> Iterator[Check]:
    """The checks of a server, with the meaning that `run` and `superlink` give the same options.

    `names`: what sites type as --server, to be compared with the certificate. With `superlink` a running one is
    asked instead of looking for free ports.
    """
    yield from each("versions", versions, VERSIONS_S)
    size = 0
    if experiment:
        found: list[int] = []
        yield from each("experiment", lambda: _experiment(experiment, sets, state, found), PREPARE_S)
        size = sum(found)
    if superlink:
        yield from each("superlink", lambda: _superlink(superlink, ca), ASK_S)
    else:
        for option, where, port in (("fleet", host, fleet_port), ("control", control_host, control_port)):
            yield from each("ports", lambda o=option, w=where, p=port: _port(o, w, p))  # type: ignore[misc]
    if certs:
        yield from each("tls", lambda: _certificates(certs, [*names, *_typed(host)]))
    elif not insecure and not superlink:
        for option, where in (("--host", host), ("--control-host", control_host)):
            if not is_loopback(where):
                advice = "make certificates with `python -m server certs` and give --certs, or type --insecure"
                yield Check(
                    "tls", False, f"{option} {where} is open to other machines and nothing is encrypted", advice
                )
    if nodes:
        yield from each("nodes", lambda: _nodes(nodes, certs))
    yield from each("run folder", lambda: writable("run folder", run_dir or Path("runs"), 3.0 * size))
    if state:
        yield from each("state", lambda: writable("state", state))
    yield from each("gpu", _gpu, 30.0)


def _typed(host: str) -> list[str]:
    """A host that sites can type as it stands."""
    return [] if host.strip("[]") in ("", "0.0.0.0", "::") else [host.strip("[]")]


def _experiment(path: Path, sets: Sequence[str], state: Path | None, size: list[int]) -> Iterator[Check]:
    from common.experiment import Experiment
    from server.rounds.prepare import deployable, prepare

    settings = Experiment.load(path, sets)
    prepared = deployable(prepare(settings))
    kept = prepared.strategy.init(prepared.model.vector.clone())
    size.append(sum(value.nbytes for value in [*kept.values(), *prepared.model.buffers.values()]))
    clients = len(prepared.task.names())
    yield Check(
        "experiment",
        True,
        f"{settings.name}: {settings.task.name}, {f'{clients} clients' if clients else 'sites bring their data'}, "
        f"{prepared.model.vector.numel():,} parameters, {settings.strategy.name}; "
        f"a checkpoint of {size[0] / 1e6:.1f} MB",
    )
    if ":" in settings.task.name:
        yield _module(settings.task.name.partition(":")[0], state)
    yield from _memory(size[0], settings.round.sample or clients)


def _module(module: str, state: Path | None) -> Check:
    """Whether a task's module is found without this folder on the path: the server app does not start here."""
    if module.partition(".")[0] in _BUNDLED and importlib.util.find_spec(module):
        return Check("task module", True, f"{module} travels in the bundle")
    folder = state if state and state.is_dir() else Path(os.sep)
    done = subprocess.run([sys.executable, "-P", "-c", _FIND, module], cwd=folder, env=environment(), timeout=30)
    if done.returncode == 0:
        return Check("task module", True, f"{module} is found by the server app")
    advice = "install it (pip install -e .) where the SuperLink runs, or set PYTHONPATH for it to an absolute folder"
    return Check(
        "task module", False, f"{module} is found in this folder only; the server app starts elsewhere", advice
    )


def _memory(size: int, clients: int) -> Iterator[Check]:
    """A hint if the uploads of one round hardly fit. Each holds at least the model."""
    import psutil

    free = psutil.virtual_memory().available
    if size * (clients + 3) > 0.8 * free:
        need, advice = size * (clients + 3) / 1e9, "lower round.sample, or give the server more memory"
        yield Check("memory", None, f"a round may hold {need:.1f} GB; {free / 1e9:.1f} GB are free here", advice)


def _port(option: str, host: str, port: int) -> Iterator[Check]:
    bare = host.strip("[]")
    if answers(port, reachable(bare).strip("[]")):
        advice = f"is a server running already (then give --superlink)? else choose another --{option}-port"
        yield Check("ports", False, f"{option} port {port} of {host} is in use", advice)
        return
    try:
        family, _, _, _, address = socket.getaddrinfo(bare or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        words = error.strerror or str(error)
        yield Check(
            "ports", False, f"{option} port {port} of {host}: {words}", f"choose another --{option}-port or host"
        )
        return
    yield Check("ports", True, f"{option} port {port} of {host} is free")


def _superlink(address: str, ca: Path | None) -> Iterator[Check]:
    """Whether a running SuperLink answers at its control address, and the time that it says."""
    from server.deploy.control import Control

    try:
        online = [node for node in Control(address, ca, token_of()).nodes() if node.status == "online"]
    except RunError as error:
        host, _, port = address.rpartition(":")
        spoken = probe.spoken(host.strip("[]"), int(port)) if port.isdecimal() else "closed"
        advice = {
            "http2": "this is the Fleet port, of clients; --superlink takes the control port (8000)",
            "http": "it speaks no TLS: leave out --ca" if ca else "look at its log",
        }.get(spoken, "is `python -m server superlink` up? with --certs give --ca CERTS/ca.pem here")
        yield Check("superlink", False, str(error), advice)
        return
    yield Check("superlink", True, f"{address} answers; {len(online)} nodes are online")
    yield from _clock(address, ca)


def _clock(address: str, ca: Path | None) -> Iterator[Check]:
    host, _, port = address.rpartition(":")
    tls = ssl.create_default_context(cafile=ca) if ca else None
    connection = (
        http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=3, context=tls)
        if tls
        else http.client.HTTPConnection(host.strip("[]"), int(port), timeout=3)
    )
    try:
        connection.request("GET", "/")
        said = connection.getresponse().getheader("Date")
    finally:
        connection.close()
    if said is None:
        return
    off = (datetime.datetime.now(datetime.UTC) - email.utils.parsedate_to_datetime(said)).total_seconds()
    near = -WRONG_CLOCK_S < off < WRONG_CLOCK_S
    words = (
        "within seconds of the SuperLink's" if near else f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} it"
    )
    yield Check(
        "clock", True if near else None, words, "run a time service (chrony, systemd-timesyncd) on both machines"
    )


def _certificates(folder: Path, typed: Sequence[str]) -> Iterator[Check]:
    """Files, key, chain, names and expiry of the certificates, and a TLS handshake with them."""
    from cryptography import x509

    from common.deploy.kit import authorities
    from server.deploy.certs import ALWAYS_ADDRESSES, ALWAYS_HOSTS, Certificates

    files = Certificates(folder).require()
    certificate, authority = (
        x509.load_pem_x509_certificate(path.read_bytes()) for path in (files.certificate, files.ca)
    )
    yield from _fits(files)
    trusted = authorities(files.trust.read_bytes(), str(files.trust))
    renew = f"move server.pem and server.key of {folder} away and run `python -m server certs --out {folder}` again"
    yield _belongs(files.key, certificate, renew)
    yield from private("tls key", files.key)
    again = "make an authority anew with `python -m server certs` and give every site the new ca.pem"
    lasting = [probe.lasts("tls expiry", certificate, renew), probe.lasts("tls ca", authority, again)]
    yield from lasting
    if all(check.ok is not False for check in lasting):
        fault = probe.shakes_hands(files.certificate, files.key, files.ca)
        told = "; ".join(f"{held.fingerprint} ({held.subject}, until {held.until})" for held in trusted)
        well = f"a client that trusts {files.ca} accepts the server; authorities of sites: {told}"
        yield Check("tls", not fault, fault or well, renew)
    names = probe.names_of(certificate)
    missing = [name for name in dict.fromkeys(typed) if not probe.covers(certificate, name)]
    if missing:
        flags = " ".join(f"{'--ip' if ip_address(name) else '--host'} {name}" for name in missing)
        detail = f"the certificate is for {', '.join(names) or 'nothing'}; not for {', '.join(missing)}"
        yield Check("tls names", False, detail, f"{renew}, with {flags}")
    elif not set(names) - {*ALWAYS_HOSTS, *ALWAYS_ADDRESSES}:
        advice = f"other machines cannot join: {renew}, with --host NAME or --ip ADDRESS"
        yield Check("tls names", None, f"the certificate is for {', '.join(names)} alone: this machine", advice)
    else:
        yield Check("tls names", True, f"sites may type {', '.join(names)}")


def _fits(files: Certificates) -> Iterator[Check]:
    from server.deploy.certs import fits

    try:
        fits(files)
    except SettingsError as error:
        if "127.0.0.1" in str(error):  # the rest has checks of its own
            yield Check("tls names", False, str(error), "ask whoever signs it for these names")


def _belongs(key_path: Path, certificate: Certificate, renew: str) -> Check:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key: Any = load_pem_private_key(key_path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        return Check("tls key", False, f"{key_path} is no private key without a password: {error}", renew)
    same = key.public_key() == certificate.public_key()
    return Check("tls key", same, f"{key_path} is {'' if same else 'not '}the key of server.pem", renew)


def _nodes(path: Path, certs: Path | None) -> Iterator[Check]:
    from server.deploy.nodes import read, today

    found, day = read(path), today()
    for name, held in sorted(found.items()):
        for key in held:
            if said := key.ends_soon(day):
                advice = f"a new one beside it: python -m server nodes add {name} NEW.pub --also; or a later --expires"
                yield Check("nodes", None, f"the key {key.fingerprint} of {name} {said}", advice)
    if found:
        yield Check("nodes", True, f"{path}: {len(found)} sites may join: {', '.join(sorted(found))}")
    else:
        yield Check(
            "nodes",
            None,
            f"{path} holds no site: nobody may join",
            f"python -m server nodes add NAME KEY.pub --file {path}",
        )
    if not certs:
        yield Check("nodes", False, "--nodes without --certs", "Flower checks node keys over TLS only: give --certs")


def _gpu() -> Iterator[Check]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    what = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    yield Check("gpu", True, what or "none is seen by torch; a server needs none")
