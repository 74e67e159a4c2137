"""What goes into a site's kit: the authority, a policy to begin with, files to start the site with, instructions."""

from __future__ import annotations

import datetime
import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template

from cryptography import x509

from common.deploy import kit, probe
from common.deploy.addresses import host_port
from common.errors import SettingsError
from common.settings import name_fault
from server.deploy.certs import ALWAYS_HOSTS, Certificates
from server.rounds.provenance import own_version

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Order:
    """A kit to be made. `server`: HOST:PORT as the site will type it; `ca`: instead of the folder's, a bundle too."""

    name: str
    server: str
    certificates: Path
    ca: Path | None = None

    def check(self) -> None:
        """Raise SettingsError for a name, an address or certificates with which the site could not join."""
        if fault := name_fault(self.name):
            raise SettingsError(fault)
        address = host_port(self.server)
        if address is None:
            raise SettingsError(f"--server: {self.server!r} is not HOST:PORT, such as fl.example.org:9092")
        certificate = Certificates(self.certificates).certificate
        if not certificate.is_file():
            return  # it lies where the SuperLink runs
        host, made = address[0], x509.load_pem_x509_certificate(certificate.read_bytes())
        if not probe.covers(made, host):
            names = ", ".join(set(probe.names_of(made)) - set(ALWAYS_HOSTS)) or "nothing"
            raise SettingsError(f"--server: the certificate in {self.certificates} is for {names}; not for {host}")


def make(order: Order, out: Path, today: datetime.date) -> kit.Kit:
    """Write the kit. Raises SettingsError before anything is written."""
    order.check()
    source = order.ca or Certificates(order.certificates).trust
    try:
        ca = source.read_bytes()
    except OSError as error:
        raise SettingsError(f"--certs: {str(source)!r} cannot be read: {error.strerror}") from None
    found = kit.authorities(ca, repr(str(source)))
    words = {
        "name": order.name,
        "quoted": shlex.quote(order.name),
        "server": order.server,
        "version": own_version() or "unknown",
        "made": today.isoformat(),
        "authorities": "\n".join(
            f"    {each.fingerprint}\n        {each.subject}, until {each.until}" for each in found
        ),
    }
    files = {file: Template((TEMPLATES / file).read_text("utf-8")).substitute(words).encode() for file in kit.FILES[1:]}
    return kit.write(out, order.name, order.server, words["version"], today, {kit.CA: ca, **files})
