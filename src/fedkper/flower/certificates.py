"""Certificates and keys: made with `cryptography`, checked before a process is started with them.

The coordinator's certificate is signed by an authority of the federation's own, or by the hospitals'. Each
site has a key pair by which the coordinator knows it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path

from fedkper import tree
from fedkper.errors import InputError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise InputError("a federation needs the extra: pip install 'fedkper[flower]'") from error

DAYS = 825
_PRIVATE = 0o600


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A new P-384 key, readable by its owner only."""
    key = ec.generate_private_key(ec.SECP384R1())
    plain = serialization.NoEncryption()
    write_private(
        path, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return key


def site_key(path: Path) -> None:
    """A site's key pair in OpenSSH's form: PATH for the site, PATH.pub for the coordinator."""
    key = ec.generate_private_key(ec.SECP384R1())
    plain, form = serialization.NoEncryption(), serialization.PrivateFormat.OpenSSH
    write_private(path, key.private_bytes(serialization.Encoding.PEM, form, plain))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    tree.write(path.with_suffix(".pub"), public + b"\n")


def write_private(path: Path, content: bytes) -> None:
    """A file that only its owner can read, from its first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def authority(key_path: Path, certificate_path: Path, federation: str) -> None:
    """The federation's own authority: a key and a certificate that signs itself."""
    key = private_key(key_path)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedkper federation {federation}")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    built = (
        _dated(x509.CertificateBuilder().subject_name(name).issuer_name(name))
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    tree.write(certificate_path, built.public_bytes(serialization.Encoding.PEM))


def request(key_path: Path, request_path: Path, hosts: list[str]) -> None:
    """A request for the coordinator's certificate, for an authority that the hospitals have already."""
    key = private_key(key_path)
    built = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])]))
        .add_extension(_names(hosts), critical=False)
        .sign(key, hashes.SHA256())
    )
    tree.write(request_path, built.public_bytes(serialization.Encoding.PEM))


def certify(
    folder: Path, hosts: list[str], begins: datetime.datetime | None = None, days: int = DAYS
) -> None:
    """The coordinator's certificate for `hosts`, signed by the authority in `folder`."""
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    key = private_key(folder / "server.key")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    built = (
        _dated(x509.CertificateBuilder().subject_name(name).issuer_name(issuer.subject), begins, days)
        .public_key(key.public_key())
        .add_extension(_names(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    tree.write(folder / "server.crt", built.public_bytes(serialization.Encoding.PEM))


def _dated(
    builder: x509.CertificateBuilder, begins: datetime.datetime | None = None, days: int = DAYS
) -> x509.CertificateBuilder:
    # An hour back, since clocks of hospitals differ.
    start = begins or _now() - datetime.timedelta(hours=1)
    end = start + datetime.timedelta(days=days)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)


def _names(hosts: list[str]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([_name(host) for host in hosts])


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def host_of(address: str) -> str:
    """HOST of HOST:PORT."""
    return address.rpartition(":")[0].strip("[]")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


# Checks


def check_server(folder: Path, host: str) -> str:
    """Raises InputError unless the coordinator can serve `host` with these files. Returns a warning."""
    path = folder / "server.crt"
    certificate = _certificate(path)
    check_certificate(certificate, _certificate(folder / "ca.crt"), host, str(path))
    try:
        key = serialization.load_pem_private_key(_bytes(folder / "server.key"), None)
    except (ValueError, UnsupportedAlgorithm, TypeError) as error:
        raise InputError(
            f"{folder / 'server.key'}: is no private key in PEM form, or has a passphrase"
        ) from error
    if key.public_key() != certificate.public_key():
        raise InputError(f"{path}: belongs to another key than {folder / 'server.key'}")
    return exposed(folder / "server.key")


def check_certificate(certificate: x509.Certificate, issuer: x509.Certificate, host: str, where: str) -> None:
    """Raises InputError that says which of name, dates and authority is wrong, and how."""
    names = _hosts(certificate)
    if host not in names:
        raise InputError(f"{where}: is for the name {', '.join(names) or '(none)'}, not for {host}")
    begins, ends, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, _now()
    if now > ends:
        raise InputError(f"{where}: expired on {ends:%Y-%m-%d %H:%M} UTC; make a new one")
    if now < begins:
        raise InputError(
            f"{where}: not valid until {begins:%Y-%m-%d %H:%M} UTC; is this machine's clock right?"
        )
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        signer = certificate.issuer.rfc4514_string()
        raise InputError(
            f"{where}: is signed by another authority ({signer}) than that of ca.crt "
            f"({issuer.subject.rfc4514_string()})"
        ) from error


def _hosts(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(v) for kind in (x509.DNSName, x509.IPAddress) for v in found.get_values_for_type(kind)]


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_bytes(path))
    except ValueError as error:
        raise InputError(f"{path}: is no certificate in PEM form") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def check_site_key(path: Path) -> str:
    """Raises InputError unless this is a site's private key. Returns a warning if others can read it."""
    try:
        key = serialization.load_ssh_private_key(_bytes(path), None)
    except (ValueError, UnsupportedAlgorithm, TypeError) as error:
        raise InputError(f"{path}: is no private key in OpenSSH's form, or has a passphrase") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path}: must be an ECDSA key: ssh-keygen -t ecdsa -b 384")
    return exposed(path)


def exposed(path: Path) -> str:
    """A sentence if others than the owner can read a key."""
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        return f"{path}: can be read by others; chmod 600 {path}"
    return ""


def look(address: str, authority_path: Path) -> None:
    """Looks at the certificate that the coordinator at HOST:PORT shows.

    Raises InputError if it will not do, and says why; OSError if nobody answers.
    """
    issuer = _certificate(authority_path)
    host, port = host_of(address), address.rpartition(":")[2]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is looked at below, with reasons
    with socket.create_connection((host, int(port)), 5) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=host) as secure:
                shown = secure.getpeercert(binary_form=True) or b""
        except ssl.SSLEOFError as error:  # a proxy without a coordinator behind it
            raise OSError("the connection was closed") from error
        except ssl.SSLError as error:
            raise InputError(
                f"{address}: does not speak TLS ({error.reason}); a federation is never run in plain text"
            ) from error
    check_certificate(x509.load_der_x509_certificate(shown), issuer, host, f"{address}: its certificate")
