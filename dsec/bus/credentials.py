"""A NATS credentials file (user JWT and nkey seed), read anew for each connection, so that renewed ones are taken up.

Our own reader because nats-py's reads a file without the marks for ever inside the loop, and because an error of it in a
reconnection would end the reconnecting: a file may be looked at while it is being replaced.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

from dsec.errors import InvalidRequest

_JWT = re.compile(r"-+BEGIN NATS USER JWT-+\s+(\S+)\s+-+END NATS USER JWT-+")
_SEED = re.compile(r"-+BEGIN USER NKEY SEED-+\s+(\S+)\s+-+END USER NKEY SEED-+")


class Credentials:
    """``source`` is a path or the text itself."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._inline = "BEGIN NATS USER JWT" in source

    def check(self) -> None:
        """Raises `InvalidRequest` (field ``creds``) for what can never authenticate."""
        try:
            self.jwt()
            self.sign("")
        except OSError as error:
            raise InvalidRequest(f"unusable credentials: {error}", field="creds", value="" if self._inline else self._source) from error

    def jwt(self) -> bytes:
        """The user's token. Raises OSError, which a reconnection takes as a reason to try again."""
        return self._part(_JWT).encode()

    def sign(self, nonce: str) -> bytes:
        """The server's nonce, signed; base64. Raises OSError."""
        try:
            import nkeys  # type: ignore[import-untyped]
        except ImportError as error:
            raise OSError("the package nkeys is not installed (pip install nkeys)") from error
        try:
            pair = nkeys.from_seed(bytearray(self._part(_SEED).encode()))
            try:
                return base64.b64encode(pair.sign(nonce.encode()))
            finally:
                pair.wipe()
        except (nkeys.NkeysError, ValueError) as error:
            raise OSError(f"the nkey seed is damaged: {error}") from error

    def _part(self, pattern: re.Pattern[str]) -> str:
        text = self._source if self._inline else Path(self._source).expanduser().read_text(errors="replace")
        found = pattern.search(text)
        if found is None:
            raise OSError("it is no NATS credentials file")
        return found[1]
