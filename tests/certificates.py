"""An authority of our own, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Issued:
    """A certificate and its key, in files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.certificate = folder / f"{name}.pem"
        self.key = folder / f"{name}-key.pem"


class Authority:
    """Signs certificates for this machine.

    Attributes:
        file: Its own certificate.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.file = folder / f"{name}.pem"
        made = _begun(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self._write(self.file, made)

    def issue(
        self,
        name: str,
        passphrase: bytes = b"",
        names: tuple[str, ...] = ("localhost", "127.0.0.1"),
    ) -> Issued:
        """One that belongs to these names; of the same `name` it takes the place of the last."""
        key, issued = ec.generate_private_key(ec.SECP256R1()), Issued(self._folder, name)
        places = [
            x509.IPAddress(ipaddress.ip_address(each))
            if each[0].isdecimal()
            else x509.DNSName(each)
            for each in names
        ]
        made = _begun(_name(name), self._name, key).add_extension(
            x509.SubjectAlternativeName(places), critical=False
        )
        encryption = (
            serialization.BestAvailableEncryption(passphrase)
            if passphrase
            else serialization.NoEncryption()
        )
        issued.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            )
        )
        self._write(issued.certificate, made)
        return issued

    def _write(self, file: Path, made: x509.CertificateBuilder) -> None:
        signed = made.sign(self._key, hashes.SHA256())
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - DAY,
        not_valid_after=now + DAY,
    )
