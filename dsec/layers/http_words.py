"""What went wrong on the way to a server, in a few words: aiohttp's own tell of its objects, and say "ssl:default" where nobody asked."""

from __future__ import annotations

import os
import ssl


def words(error: BaseException) -> str:
    """For an error of aiohttp's or of a socket's. Pure."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = error.certificate_error
        return f"its certificate is not trusted ({why.verify_message if isinstance(why, ssl.SSLCertVerificationError) else why})"
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return f"the proxy cannot be reached ({_system(error.os_error)})"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"the proxy answers {error.status}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name does not resolve"
    if isinstance(error, aiohttp.ClientSSLError):
        return "it does not speak TLS as we do"
    if isinstance(error, aiohttp.ClientConnectorError):
        return _system(error.os_error)
    if isinstance(error, TimeoutError):  # aiohttp's are such, too
        return "no answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "what it sent broke off"
    if isinstance(error, aiohttp.TooManyRedirects):
        return "it redirects without end"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"its answer is not HTTP ({error.message})"
    if isinstance(error, OSError):
        return _system(error)
    return str(error) or type(error).__name__


def _system(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else error.strerror or str(error)
