"""A site's kit: what goes in comes out, nothing secret is in it, and an archive that is anything else is refused."""

from __future__ import annotations

import datetime
import json
import stat
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from client.__main__ import cli as client_cli
from client.commands.kit import unpack
from client.policy import Policy
from common.deploy import keys, kit
from common.deploy.audit import AuditLog
from common.errors import SettingsError
from server.__main__ import cli as server_cli
from server.deploy import certs, kits

TODAY = datetime.date(2026, 12, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certs.write(tmp_path / "certs", ["fl.example.org"], ["192.0.2.10"], 90)
    return tmp_path


def made(folder: Path, name: str = "site-3", server: str = "fl.example.org:9092") -> Path:
    path = folder / f"{name}.zip"
    kits.make(kits.Order(name, server, folder / "certs"), path, TODAY)
    return path


def altered(path: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """The archive anew, with other entries."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    change(held)
    out = path.with_name("altered.zip")
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, content)
    return out


def test_a_kit_is_made_and_unpacked(folder: Path) -> None:
    said: list[str] = []
    path = made(folder)
    found = unpack(path, None, "", said.append)
    assert (found.name, found.server) == ("site-3", "fl.example.org:9092")
    assert found.ca.read_bytes() == (folder / "certs" / "ca.pem").read_bytes()
    assert stat.S_IMODE(found.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(found.key.parent.stat().st_mode) == 0o700
    assert Policy.load(str(found.policy)) == Policy(share_labels=False, max_message_mb=2048.0)
    own = keys.fingerprint(keys.read_public((found.key.with_name("site-3.key.pub")).read_bytes(), "it"))
    told = "\n".join(said)
    authority = kit.authorities(found.ca.read_bytes(), "it")[0].fingerprint
    assert own == found.fingerprint
    for words in (own, keys.spoken(own), authority, "over the phone"):
        assert words in told
    assert authority in (found.ca.parent / "README.txt").read_text()
    compose = yaml.safe_load((found.ca.parent / "compose.yml").read_text())
    assert compose["services"]["site"]["command"][:5] == ["python", "-m", "client", "join", "/kit/site-3.zip"]


def test_nothing_secret_is_in_it(folder: Path) -> None:
    with zipfile.ZipFile(made(folder)) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert b"PRIVATE" not in content
    for secret in ("ca.key", "server.key"):
        assert (folder / "certs" / secret).read_bytes().splitlines()[1] not in content


def test_a_private_key_in_place_of_the_authority_is_not_sent(folder: Path) -> None:
    both = folder / "both.pem"
    both.write_bytes((folder / "certs" / "server.pem").read_bytes() + (folder / "certs" / "server.key").read_bytes())
    with pytest.raises(SettingsError, match="private key"):
        kits.make(kits.Order("a", "fl.example.org:9092", folder / "certs", both), folder / "a.zip", TODAY)
    assert not (folder / "a.zip").exists()


@pytest.mark.parametrize(
    ("name", "server", "word"),
    [
        ("../a", "fl.example.org:9092", "is no name"),
        ("a", "fl.example.org", "HOST:PORT"),
        ("a", "fl.example.org:70000", "HOST:PORT"),
        ("a", "https://fl.example.org:9092", "HOST:PORT"),
        ("a", "fl.example.org:9092\nx", "HOST:PORT"),
        ("a", "other.example.org:9092", "not for other.example.org"),
    ],
)
def test_an_order_that_could_not_work(name: str, server: str, word: str, folder: Path) -> None:
    with pytest.raises(SettingsError, match=word):
        kits.make(kits.Order(name, server, folder / "certs"), folder / "kit.zip", TODAY)
    assert not (folder / "kit.zip").exists()


def test_a_site_keeps_its_key_and_policy_when_a_new_kit_comes(folder: Path) -> None:
    """The authority is taken anew, after the site agreed to it."""
    said: list[str] = []
    first = unpack(made(folder), None, "", said.append)
    first.policy.write_text("max_steps = 7\n")
    key = first.key.read_bytes()
    unpack(folder / "site-3.zip", None, "", said.append, agreed=pytest.fail)  # the same authority: nobody is asked
    (folder / "site-3.zip").unlink()
    (folder / "certs").rename(folder / "old")
    certs.write(folder / "certs", ["fl.example.org"], [], 90)
    with pytest.raises(SettingsError, match="not joined"):
        unpack(made(folder), None, "", said.append, agreed=lambda: False)
    assert first.ca.read_bytes() == (folder / "old" / "ca.pem").read_bytes()
    unpack(folder / "site-3.zip", None, "", said.append, agreed=lambda: True)
    assert first.ca.read_bytes() == (folder / "certs" / "ca.pem").read_bytes()
    assert first.key.read_bytes() == key
    assert first.policy.read_text() == "max_steps = 7\n"


def test_the_authority_that_was_read_out_is_compared(folder: Path) -> None:
    path = made(folder)
    (authority,) = kit.read(path).manifest.authorities
    other = "0000" + authority[4:]
    with pytest.raises(SettingsError, match="not theirs"):
        unpack(path, folder / "x", other, lambda _: None)
    with pytest.raises(SettingsError, match="not theirs"):
        unpack(path, folder / "x", " ", lambda _: None)
    assert not (folder / "x").exists()
    for text in (authority, authority.upper(), authority.replace(" ", ":")):
        unpack(path, folder / "x", text, lambda _: None, agreed=pytest.fail)


def test_two_authorities_while_one_takes_over(folder: Path) -> None:
    """`certs --beside`: the kit has both, and a handshake with either server comes about."""
    new = certs.write(folder / "new", ["fl.example.org"], [], 90, beside=folder / "certs")
    kits.make(kits.Order("a", "fl.example.org:9092", folder / "new"), folder / "a.zip", TODAY)
    bundle = kit.read(folder / "a.zip").files[kit.CA]
    prints = [each.fingerprint for each in kit.authorities(bundle, "it")]
    old = certs.Certificates(folder / "certs")
    assert prints == [kit.authorities(each.ca.read_bytes(), "it")[0].fingerprint for each in (new, old)]
    from common.deploy import probe

    (folder / "bundle.pem").write_bytes(bundle)
    for server in (old, new):
        assert probe.shakes_hands(server.certificate, server.key, folder / "bundle.pem") == ""
    assert probe.shakes_hands(old.certificate, old.key, new.ca) != ""


# --- an archive that is something else


def manifest(**values: object) -> Callable[[dict[str, bytes]], object]:
    def change(held: dict[str, bytes]) -> None:
        held[kit.MANIFEST] = json.dumps({**json.loads(held[kit.MANIFEST]), **values}).encode()

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda held: held.update({"../evil": b"x"}), "does not have"),
        (lambda held: held.update({"/etc/passwd": b"x"}), "does not have"),
        (lambda held: held.update({"a/": b""}), "does not have"),
        (lambda held: held.update({"site.key": b"x"}), "does not have"),
        (lambda held: held.pop(kit.CA), "lacks ca.pem"),
        (lambda held: held.pop(kit.MANIFEST), "lacks manifest.json"),
        (lambda held: held.update({kit.CA: held[kit.CA] + b"\n"}), "is not as its manifest says"),
        (lambda held: held.update({kit.README: b"0" * (kit.MOST_BYTES + 1)}), "is larger"),
        (lambda held: held.update({kit.MANIFEST: b"[" * 100_000}), "is no JSON"),
        (lambda held: held.update({kit.MANIFEST: b"\xff"}), "is no JSON"),
        (lambda held: held.update({kit.MANIFEST: b"[]"}), "of another release"),
        (manifest(kit=2), "of another release"),
        (manifest(name="../x"), "name"),
        (manifest(name=1), "name"),
        (manifest(server="x"), "server"),
        (manifest(server="--insecure"), "server"),
        (manifest(more=1), "unknown key"),
        (manifest(files={}), "not as its manifest says"),
        (manifest(authorities=["0000"]), "other authorities"),
    ],
)
def test_a_kit_that_is_not_as_it_was_made(
    change: Callable[[dict[str, bytes]], object], word: str, folder: Path
) -> None:
    path = altered(made(folder), change)
    before = sorted(folder.rglob("*"))
    with pytest.raises(SettingsError, match=word):
        unpack(path, folder / "site-3", "", lambda _: None)
    assert sorted(folder.rglob("*")) == before


def test_an_entry_twice_a_bomb_and_a_folder_of_links(folder: Path) -> None:
    path = made(folder)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(kit.CA, b"again")
    with pytest.raises(SettingsError, match="or has once"):
        kit.read(path)
    path.unlink()
    with zipfile.ZipFile(made(folder, "bomb"), "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"0" * 100_000_000)
    with pytest.raises(SettingsError, match="does not have"):
        kit.read(folder / "bomb.zip")
    (folder / "large.zip").write_bytes(b"PK" + b"0" * kit.MOST_ARCHIVE)
    with pytest.raises(SettingsError, match="larger than a kit"):
        kit.read(folder / "large.zip")
    (folder / "target").mkdir()
    (folder / "target" / "ca.pem").symlink_to(folder / "elsewhere")
    with pytest.raises(SettingsError, match="is a link"):
        unpack(made(folder), folder / "target", "", lambda _: None)
    assert not (folder / "elsewhere").exists()


@given(st.integers(0, 3000), st.binary(min_size=1, max_size=8))
def test_damage_anywhere_is_told_or_changes_nothing(at: int, junk: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "kit.zip"
        content = bytearray(_whole())
        at %= len(content)
        content[at : at + len(junk)] = junk
        path.write_bytes(bytes(content))
        try:
            found = kit.read(path)
        except SettingsError:
            return
        assert dict(found.files) == dict(_kit().files)


_cache: list[bytes] = []


def _whole() -> bytes:
    if not _cache:
        import tempfile

        with tempfile.TemporaryDirectory() as name:
            certs.write(Path(name) / "certs", ["fl.example.org"], [], 90)
            _cache.append(made(Path(name)).read_bytes())
    return _cache[0]


def _kit() -> kit.Kit:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "k.zip").write_bytes(_whole())
        return kit.read(Path(name) / "k.zip")


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04" + b"\0" * 40, b"hello" * 100])
def test_what_is_no_archive(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "k.zip").write_bytes(content)
    with pytest.raises(SettingsError, match="no kit"):
        kit.read(tmp_path / "k.zip")
    with pytest.raises(SettingsError, match="cannot be read"):
        kit.read(tmp_path / "none.zip")


# --- the commands


def test_the_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    log = AuditLog(folder / "audit.jsonl")
    run = CliRunner()
    done = run.invoke(server_cli, ["kit", "site-3", "--server", "fl.example.org:9092"])
    assert done.exit_code == 0, done.output
    (authority,) = kit.read(folder / "site-3.zip").manifest.authorities
    assert authority in done.output
    assert json.loads(log.path.read_text())["what"] == "kit made"
    assert run.invoke(server_cli, ["kit", "site-3", "--server", "fl.example.org:9092"]).exit_code == 2
    told = run.invoke(client_cli, ["join"])
    assert told.exit_code == 2
    assert "the kit" in told.output
    # All that follows the unpacking is as without a kit: a data file that is not there ends it.
    told = run.invoke(client_cli, ["join", "site-3.zip", "--data", "none.npz"])
    assert told.exit_code == 2
    assert "--data: there is no file" in told.output
    assert (folder / "site-3" / "site-3.key").exists()
    told = run.invoke(client_cli, ["join", "site-3.zip", "--authority", "0000"])
    assert told.exit_code == 2
    assert "not theirs" in told.output
