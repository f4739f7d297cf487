"""An authority of our own, and its certificate for loopback, for servers that speak TLS."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: the authority's certificate, and the server's with its key."""

    authority: Path
    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """For a server in this process."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.key)
        return context


def make(folder: Path, *, strict: bool = True, addresses: Sequence[str] = ()) -> Certificates:
    """Make both, valid for a day, for ``127.0.0.1`` and ``localhost``.

    Args:
        folder: where.
        strict: with all that RFC 5280 asks for; else as many clusters have them.
        addresses: further ones of the server.
    """
    files = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _name("authority of a test")
    issued = _builder(authority, authority, authority_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    key = ec.generate_private_key(ec.SECP256R1())
    own = ("127.0.0.1", *addresses)
    names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(each)) for each in own]
    names.append(x509.DNSName("localhost"))
    served = _builder(_name("server of a test"), authority, key.public_key()).add_extension(
        x509.SubjectAlternativeName(names), critical=False
    )
    if strict:
        public = authority_key.public_key()
        issued = issued.add_extension(_usage(signs_certificates=True), critical=True).add_extension(
            x509.SubjectKeyIdentifier.from_public_key(public), critical=False
        )
        served = served.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        ).add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
    authority_certificate = issued.sign(authority_key, hashes.SHA256())
    certificate = served.sign(authority_key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    files.authority.write_bytes(authority_certificate.public_bytes(pem))
    files.certificate.write_bytes(certificate.public_bytes(pem))
    files.key.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
