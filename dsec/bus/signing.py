"""Credentials for jobs, on a bus whose server checks credentials (operator mode): a user JWT that holds the job's subjects.

With them nats-server itself enforces what the Edge's gate lets through. Signed with a signing key of the account (NATS ADR-14); no call to
the server is made, and one lasts for a day: when it ends the server ends the connection, and the next one gets another.
"""

from __future__ import annotations

import base64
import json
import os
import time
from typing import Any

from dsec.bus.grants import Grant
from dsec.errors import InvalidRequest, Unsupported

LIFE = 86_400  # seconds


class Signer:
    """``seed``: of the account's key or of one of its signing keys (SA…); ``account``: the account's public key (A…), "" where the seed is
    the account's own. Raises `InvalidRequest` for a seed that is none, `Unsupported` without the package nkeys."""

    def __init__(self, seed: str, account: str = "") -> None:
        try:
            import nkeys  # type: ignore[import-untyped]
        except ImportError as error:
            raise Unsupported("the package nkeys is not installed", fix="pip install nkeys", reason="nkeys") from error
        self._account = account
        try:
            self._key = nkeys.from_seed(bytearray(seed.strip().encode()))
            self._issuer = bytes(self._key.public_key).decode()
        except (nkeys.NkeysError, ValueError) as error:
            raise InvalidRequest(f"not a signing key: {error}", field="bus.signing_key", fix="give the seed of an account's key") from error
        if not self._issuer.startswith("A"):
            raise InvalidRequest("not an account's key", field="bus.signing_key", fix="its public key begins with A, its seed with SA")

    def credentials(self, grant: Grant, life: float = LIFE) -> str:
        """The text of a credentials file for the job, good for ``life`` seconds."""
        import nkeys

        seed = bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
        user = bytes(nkeys.from_seed(bytearray(seed)).public_key).decode()
        may: dict[str, Any] = {
            "type": "user",
            "version": 2,
            "pub": {"allow": list(grant.publish)},
            "sub": {"allow": list(grant.subscribe)},
            "subs": -1,
            "data": -1,
            "payload": -1,
        }
        if self._account:
            may["issuer_account"] = self._account
        now = int(time.time())
        claims = {"jti": os.urandom(16).hex(), "iat": now, "exp": now + int(life), "iss": self._issuer, "sub": user, "name": grant.worker}
        head = _base64(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
        text = f"{head}.{_base64(json.dumps(claims | {'nats': may}).encode())}"
        token = f"{text}.{_base64(bytes(self._key.sign(text.encode())))}"
        return (
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed.decode()}\n------END USER NKEY SEED------\n"
        )


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
