"""What a site looks at before it joins: itself, and the way to its server."""

from __future__ import annotations

import ssl
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from client.commands.look import Look, looked, paths
from client.commands.options import approvals_file
from common.deploy import probe
from common.deploy.addresses import host_port, ip_address, is_loopback
from common.deploy.checks import VERSIONS_S, Check, each, private, show, versions, writable
from common.errors import SettingsError

# Imported where used: torch and Flower take seconds, which --help and an error in what was typed need not wait for.

READ_S, DEVICE_S = 8.0, 30.0

UNASKED = "bound it with --policy (docs/policy.md), or decide run by run with --approve ask (docs/approval.md)"
OTHER_PORT = "clients join at the Fleet port (9092), not at the control port (8000) or at --metrics"


def doctor_command(server: str, **settings: object) -> int:
    """Print the checks of `checks` with the same arguments as they come; returns the exit code, 1 if one fails."""
    return show(checks(server, **settings))  # type: ignore[arg-type]


def checks(
    server: str,
    names: Sequence[str] = (),
    ca: Path | None = None,
    key: str | None = None,
    data: str | None = None,
    memory: Path | None = None,
    device: str = "cpu",
    policy: Path | None = None,
    insecure: bool = False,
    experiment: Path | None = None,
    approve: str = "policy",
    approvals: Path | None = None,
    allow_tasks: Sequence[str] = (),
    trusted: bool = False,
    sets: Sequence[str] = (),
) -> Iterator[Check]:
    """The checks of a site, with the meaning that `join` gives the same options: `{name}` in `key` and `data`.

    None takes more than some seconds, also when nothing answers. At a server without node keys a key pair made for
    this one look is registered and taken out again; no run ever sees it.
    """
    yield from each("versions", versions, VERSIONS_S)
    keys = _files(key, names)
    for path in keys:
        yield from each("key", partial(_key, path))
    if server or not experiment:
        yield from _network(server, ca, keys, insecure)
    yield from each("device", lambda: _device(device), DEVICE_S)
    if memory:
        yield from each("memory", lambda: _memory(memory, [memory, *(memory / name for name in names)]))
    else:
        home = Path.home() / ".fedkeel" / "memory"
        yield from each("memory", lambda: _memory(home, [home / name for name in names]))
    usable = True
    for path in _files(data, names):
        for check in each("data", partial(_data, path), READ_S):
            usable = usable and check.ok is not False
            if check.ok is not None or not experiment:  # what its arrays are called matters to an experiment
                yield check
    if policy:
        yield from each("policy", lambda: _policy(policy))
    elif approve == "policy" and not trusted:
        yield Check(
            "policy", None, "no --policy and no --approve ask: any run of this project's tasks is taken", UNASKED
        )
    file = approvals_file(approvals, memory, names or ["site"])
    yield from each("approvals", lambda: _approvals(file, approve))
    if experiment and usable:
        for name in names or ["site"]:
            own = str(_files(data, [name])[0]) if data else ""
            options = str(policy or ""), device, tuple(allow_tasks), trusted, approve, str(file)
            asked = Look(str(experiment), name, own, *options, tuple(sets))
            yield from looked(paths(asked))


def _approvals(file: Path, approve: str) -> Iterator[Check]:
    """Whether the file that says which runs were approved can be used; nothing where there is none and nobody asks."""
    from client.approval.store import Approvals

    entries = Approvals(file).entries()
    if entries or approve == "ask":
        waiting = sorted(key[:12] for key, entry in entries.items() if entry.waits)
        yield Check("approvals", True, f"{file}: {len(entries)} runs known")
        if waiting and approve == "ask":
            advice = f"python -m client approve {waiting[0]} --approvals {file}"
            yield Check("approvals", None, f"waiting for approval: {', '.join(waiting)}", advice)


def _files(pattern: str | None, names: Sequence[str]) -> list[Path]:
    """The files that an option with {name} in it stands for, once each."""
    if not pattern:
        return []
    found = [pattern.replace("{name}", name) for name in names] if "{name}" in pattern else [pattern]
    return [Path(path).expanduser() for path in dict.fromkeys(found)]


def _network(server: str, ca: Path | None, keys: Sequence[Path], insecure: bool) -> Iterator[Check]:
    if ca and insecure:
        yield Check("server", False, "--ca and --insecure contradict each other", "leave one of them out")
        return
    address = host_port(server)
    if address is None:
        yield Check("server", False, f"--server: {server!r} is not HOST:PORT", "such as fl.example.org:9092")
        return
    host, port = address
    looks: list[Callable[[], Check]] = [lambda: probe.name_resolves(host), lambda: probe.port_opens(host, port)]
    for look in looks:
        yield (step := look())
        if not step.ok:
            return
    well = True
    encrypted = bool(ca) or not (insecure or is_loopback(host))
    for step in each("tls", lambda: _tls(host, port, ca, encrypted), 15.0):
        well = well and step.ok is not False
        yield step
    if well:
        yield from each("fleet", lambda: _fleet(server, ca, keys, insecure), 12.0)
    else:
        yield Check("fleet", None, "not asked: the connection has to work first")


def _tls(host: str, port: int, ca: Path | None, encrypted: bool) -> Iterator[Check]:
    try:
        der, http2 = probe.presented(host, port)
    except OSError as error:
        yield _without_tls(probe.spoken(host, port), encrypted, error)
        return
    if not http2:
        yield Check("tls", False, f"port {port} speaks TLS but not HTTP/2, as gRPC does", OTHER_PORT)
        return
    if not encrypted:
        advice = "give --ca ca.pem, the file that `python -m server certs` wrote at the server, and no --insecure"
        yield Check("tls", False, "the server speaks TLS and this site would not", advice)
        return
    yield Check("tls", True, "the server speaks TLS")
    yield from _certificate(host, port, der, ca)


def _without_tls(spoken: probe.Spoken, encrypted: bool, error: OSError) -> Check:
    """What to make of a server that does not speak TLS."""
    if spoken == "http2" and not encrypted:
        return Check("tls", True, "the server speaks gRPC without TLS, and so will this site")
    if spoken == "http2":
        advice = "let the server start with --certs; or leave out --ca and type --insecure if that is what you want"
        return Check("tls", False, "the server speaks gRPC without TLS and this site would speak TLS", advice)
    if spoken == "http":
        return Check("tls", False, "this is a web server, not the Fleet port", OTHER_PORT)
    words = {
        "silent": (
            "accepts connections and says nothing",
            "is a proxy in between, or the server stuck? look at its log",
        ),
        "closed": (f"closes the connection ({error})", "is a proxy or a firewall in between? look at the server's log"),
        "other": ("speaks neither TLS nor gRPC", "is this the right port?"),
    }[spoken]
    return Check("tls", False, words[0], words[1])


def _certificate(host: str, port: int, der: bytes, ca: Path | None) -> Iterator[Check]:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    from common.deploy.kit import authorities

    whose = f"the authority in {ca}" if ca else "an authority that this system knows"
    certificate = x509.load_der_x509_certificate(der)
    print_ = certificate.fingerprint(SHA256()).hex(":")[:23]
    try:
        fault = probe.trusted(host, port, ca)
    except (ssl.SSLError, OSError) as error:
        advice = "give the ca.pem that `python -m server certs` wrote at the server"
        yield Check("authority", False, f"--ca {ca} cannot be used: {error}", advice)
        return
    renew = "at the server: move server.pem and server.key away and run `python -m server certs` again"
    lasting = probe.lasts("expiry", certificate, renew)
    if fault and lasting.ok is not False:
        advice = "copy ca.pem from the server again, the one beside server.pem, and give it as --ca"
        issuer = certificate.issuer.rfc4514_string() or "nobody"
        detail = f"the certificate ({print_}..., issued by {issuer}) is not signed by {whose}: {fault}"
        advice += "; or a proxy or firewall here looks into TLS with a certificate of its own: have it let this pass"
        yield Check("authority", False, detail, advice)
    elif not fault:
        held = authorities(ca.read_bytes(), f"--ca {ca}") if ca else []
        trusted = "".join(f"; trusted: {each.fingerprint} ({each.subject}, until {each.until})" for each in held)
        yield Check("authority", True, f"the certificate ({print_}...) is signed by {whose}{trusted}")
    yield lasting
    names = ", ".join(probe.names_of(certificate)) or "nothing"
    if probe.covers(certificate, host):
        yield Check("names", True, f"the certificate is for {names}")
    else:
        kind = "--ip" if ip_address(host) else "--host"
        advice = f"type one of these names, or make a certificate with: python -m server certs {kind} {host}"
        yield Check("names", False, f"the certificate is for {names}; you typed {host}", advice)


def _fleet(server: str, ca: Path | None, keys: Sequence[Path], insecure: bool) -> Iterator[Check]:
    from client.node.access import Access
    from client.node.probe import FleetProbe
    from common.deploy.keys import load_private

    found = []
    for path in keys:
        with suppress(SettingsError):  # A check of its own has told.
            found.append((path, load_private(path)))
    with FleetProbe(Access(server, str(ca or ""), insecure=insecure)) as fleet:
        yield from fleet.look(found)


def _key(path: Path) -> Iterator[Check]:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from common.deploy.keys import fingerprint, load_private, read_public

    key = load_private(path)
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    yield Check("key", True, f"{path} ({fingerprint(pem)})")
    yield from private("key", path)
    public = path.with_name(path.name + ".pub")
    if public.exists() and read_public(public.read_bytes(), str(public)) != pem:
        advice = f"the server must know the key of {path}; remove {public} and make it anew with ssh-keygen -y"
        yield Check("key", False, f"{public} is not the public key of {path}", advice)


def _device(name: str) -> Iterator[Check]:
    import torch

    from client.training.device import choose

    device = choose(name)
    if device.type == "cuda":
        torch.zeros(1, device=device).add_(1).item()  # A driver too old or another's whole memory shows only in use.
        free, total = (size / 1e9 for size in torch.cuda.mem_get_info(device))
        yield Check(
            "device", True, f"{device} ({torch.cuda.get_device_name(device)}, {free:.1f} of {total:.1f} GB free)"
        )
    elif torch.cuda.is_available():
        yield Check("device", None, f"cpu, although this machine has {torch.cuda.get_device_name(0)}", "--device auto")
    else:
        yield Check("device", True, "cpu")


def _memory(folder: Path, homes: Sequence[Path]) -> Iterator[Check]:
    from client.memory.folder import LOCK, open_memory

    yield from writable("memory", folder)
    for home in homes:
        if (home.expanduser() / LOCK).exists():
            open_memory(home).close()
            yield Check("memory lock", True, f"no other process uses {home}")


def _data(path: Path) -> Iterator[Check]:
    if not path.exists():
        yield Check(
            "data",
            False,
            f"there is no {path}",
            "--data names this site's file or folder; {name} in it is the site's name",
        )
    elif path.suffix == ".npz":
        yield from _npz(path)
    elif path.is_dir():
        count = sum(1 for _ in path.iterdir())
        yield Check("data", True, f"{path} is a folder of {count} entries; its content is the task's affair")
    else:
        with path.open("rb") as file:
            file.read(1)
        yield Check(
            "data", True, f"{path} can be read ({path.stat().st_size:,} bytes); its content is the task's affair"
        )


def _npz(path: Path) -> Iterator[Check]:
    import numpy as np

    from common.data.arrays import KEYS

    remake = "write it again with numpy.savez and plain numbers"
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            # Reads and checks all, block by block: no more memory than a block.
            if broken := archive.testzip():
                yield Check("data", False, f"{path}: {broken} is damaged (checksum)", "copy it again")
                return
            for entry in archive.namelist():
                with archive.open(entry) as file:
                    read = np.lib.format.read_array_header_1_0
                    if np.lib.format.read_magic(file) != (1, 0):
                        read = np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(file)
                found[entry.removesuffix(".npy")] = f"{dtype}{list(shape)}"
                if dtype.hasobject:
                    yield Check("data", False, f"{path}: {entry} holds Python objects, which are not read", remake)
                    return
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        yield Check("data", False, f"{path} cannot be read as .npz: {error}", remake)
        return
    yield Check("data", True, f"{path}: {', '.join(f'{key} {what}' for key, what in found.items())}")
    for role in ("inputs", "labels"):
        if not set(KEYS[role]) & set(found):
            advice = f"call it one of {', '.join(KEYS[role])}, or name it with task.{role} in the experiment"
            yield Check("data", None, f"{path}: no array has a usual name for the {role}", advice)


def _policy(path: Path) -> Iterator[Check]:
    from client.policy import Policy

    limits = Policy.load(str(path)).model_dump(exclude_none=True, exclude_unset=True)
    yield Check(
        "policy", True, f"{path}: " + (", ".join(f"{key} = {value}" for key, value in limits.items()) or "no limits")
    )
