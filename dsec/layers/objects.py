"""One object store by its URL, over obstore: a directory (any POSIX mount), S3 and its like, HTTP for reading.

    /mnt/layers, file:///mnt/layers      a directory; files appear by rename
    s3://bucket/prefix                   S3: keys, region and endpoint from AWS_… in the environment
    https://host/prefix                  read only; the server must answer Range requests

obstore's errors become the project's: what is absent is `NotFound`, what cannot be reached now is `Unavailable` (retry), a request
that the store refuses is `NodeError`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from dsec.errors import InvalidRequest, NodeError, NotFound, Unavailable, Unsupported

if TYPE_CHECKING:
    from obstore.store import ObjectStore

FIELD = "layers.remote"


def check(url: str) -> str:
    """The URL, with a directory as ``file:///…``. Raises `InvalidRequest`."""
    if url.startswith("/"):
        return "file://" + os.path.normpath(url)
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return "file://" + os.path.normpath(unquote(parts.path))
    if parts.scheme in ("s3", "http", "https") and parts.netloc:
        return url.rstrip("/")
    raise InvalidRequest("not a layer store", field=FIELD, value=url, fix="give a directory, s3://bucket/prefix or https://host/prefix")


def connect(url: str, timeout: float = 10.0, *, make: bool = False) -> ObjectStore:
    """The store at a checked URL. ``timeout``: seconds for a request, retries included. ``make``: make a missing directory.

    Raises `Unsupported` without obstore, `NodeError` for a directory that is not there.
    """
    try:
        from obstore.store import HTTPStore, LocalStore, S3Store
    except ImportError as error:
        raise Unsupported("remote layer stores need obstore", reason=str(error), fix="pip install 'dsec[node]'") from error
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        if not make and not os.path.isdir(rest):
            raise NodeError("the layer store's directory is not there", field=FIELD, value=rest, fix="mount it, or make it")
        return LocalStore(rest, automatic_cleanup=False, mkdir=make)
    client: Any = {"timeout": timedelta(seconds=timeout), "connect_timeout": timedelta(seconds=min(timeout, 3.0)), "allow_http": True}
    retry: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=timeout), "backoff": {"init_backoff": timedelta(milliseconds=50)}}
    if scheme == "s3":
        bucket, _, prefix = rest.partition("/")
        return S3Store(bucket, prefix=prefix or None, client_options=client, retry_config=retry)
    return HTTPStore.from_url(url + "/", client_options=client, retry_config=retry)


@contextlib.contextmanager
def errors(what: str) -> Iterator[None]:
    """Turns obstore's errors into the project's."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError) as error:
        raise NotFound("the layer store has no such object", field="layer", value=what) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise NodeError(f"the layer store refuses: {_short(error)}", field=FIELD, value=what, retryable=False) from error
    except exceptions.NotSupportedError as error:
        raise Unsupported("this layer store cannot do that", field=FIELD, value=what, reason=_short(error)) from error
    except (exceptions.BaseError, OSError) as error:
        raise Unavailable(f"the layer store cannot be reached: {_short(error)}", field=FIELD, value=what) from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
