"""One object store by its URL, over obstore: a directory (any POSIX mount), S3 and its like, HTTP for reading.

    /mnt/layers, file:///mnt/layers      a directory; files appear by rename
    s3://bucket/prefix                   S3: keys, region and endpoint from AWS_… in the environment, or from what the URL says:
        ?endpoint=https://host:port      another server than Amazon's
        &region=eu-central-1
        &credentials=/etc/dsec/s3        a file of keys as the AWS tools keep it ([default], aws_access_key_id = …); the keys
        &profile=name                    themselves have no place in a URL, which is shown and recorded
    https://host/prefix                  read only; the server must answer Range requests

obstore's errors become the project's: what is absent is `NotFound`, what cannot be reached now is `Unavailable` (retry), a request
that the store refuses (wrong keys, no such bucket, a range that is not there) is `NodeError`, which no retry helps.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from dsec.errors import Conflict, DsecError, InvalidRequest, NodeError, NotFound, Unavailable, Unsupported

if TYPE_CHECKING:
    from obstore.store import ObjectStore

FIELD = "layers.remote"
REGISTRY = "oci://"  # no store: a blob of a registry (`blobrange`)
_S3_OPTIONS = ("endpoint", "region", "credentials", "profile")
_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_METADATA_SERVICE = "169.254.169.254"  # where Amazon's machines find keys; asked when there are no others


def check(url: str) -> str:
    """The URL, with a directory as ``file:///…``. Raises `InvalidRequest`."""
    if url.startswith("/"):
        return "file://" + os.path.normpath(url)
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return "file://" + os.path.normpath(unquote(parts.path))
    if parts.scheme == "s3" and parts.netloc:
        _options(url)
        return url.rstrip("/")
    if parts.scheme in ("http", "https") and parts.netloc:
        return url.rstrip("/")
    raise InvalidRequest("not a layer store", field=FIELD, value=url, fix="give a directory, s3://bucket/prefix or https://host/prefix")


def connect(url: str, timeout: float = 10.0, *, make: bool = False) -> ObjectStore:
    """The store at a checked URL. ``timeout``: seconds for a request, retries included. ``make``: make a missing directory.

    Raises `Unsupported` without obstore, `NodeError` for a directory that is not there and for a file of keys that cannot be used.
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
        bucket, _, prefix = rest.partition("?")[0].partition("/")
        given: Any = _s3_settings(_options(url))
        return S3Store(bucket, prefix=prefix.strip("/") or None, client_options=client, retry_config=retry, **given)
    return HTTPStore.from_url(url + "/", client_options=client, retry_config=retry)


def _options(url: str) -> dict[str, str]:
    """What an S3 URL says behind its question mark. Raises `InvalidRequest`."""
    found = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    for key, value in found.items():
        if key not in _S3_OPTIONS:
            raise InvalidRequest("not an option of an S3 store", field=FIELD, value=key, fix=f"use {', '.join(_S3_OPTIONS)}")
        if not value or (key == "credentials" and not value.startswith("/")) or (key == "endpoint" and "://" not in value):
            raise InvalidRequest(f"not a usable {key}", field=FIELD, value=value, fix="a URL, a name, or a file's whole path")
    return found


def _s3_settings(options: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {key: options[key] for key in ("endpoint", "region") if key in options}
    if path := options.get("credentials"):
        profile = options.get("profile", "default")
        parser = configparser.ConfigParser(interpolation=None)
        try:
            with open(path) as file:
                parser.read_file(file)
            section = parser[profile]
            keys: dict[str, str] = {name: section[key] for key, name in _KEYS.items() if key in section}
        except (OSError, KeyError, ValueError, configparser.Error) as error:
            # Not the error's text: it may hold a line of the file.
            raise NodeError(
                f"the file of S3 keys cannot be used ({type(error).__name__})",
                field=FIELD,
                value=f"{path} [{profile}]",
                fix="it needs a section of that name with aws_access_key_id and aws_secret_access_key",
                retryable=False,
            ) from None
        if not {"access_key_id", "secret_access_key"} <= keys.keys():
            raise NodeError("the file of S3 keys lacks a key", field=FIELD, value=f"{path} [{profile}]", retryable=False)
        found = keys | found
    return found


@contextlib.contextmanager
def errors(what: str) -> Iterator[None]:
    """Turns obstore's errors into the project's."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError) as error:
        if "NoSuchBucket" in str(error):
            raise _no_bucket(error, what) from error
        raise NotFound("the layer store has no such object", field="layer", value=what) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise _keys(error, what) from error
    except exceptions.NotSupportedError as error:
        fix = "serve it by one that answers Range requests, such as nginx or Caddy" if "Range" in str(error) else ""
        raise Unsupported(f"the layer store's server cannot do that: {_short(error)}", field=FIELD, value=what, fix=fix) from error
    except exceptions.AlreadyExistsError as error:
        raise Conflict("the layer store has that object already", field="layer", value=what) from error
    except (exceptions.BaseError, OSError) as error:
        raise _other(error, what) from error


def _no_bucket(error: BaseException, what: str) -> NodeError:
    fix = "make the bucket, or correct layers.remote"
    return NodeError(
        f"the layer store's bucket is not there: {_short(error)}", field=FIELD, value=what, fix=fix, reason="bucket", retryable=False
    )


def _keys(error: BaseException, what: str) -> NodeError:
    fix = "check the keys (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ?credentials=FILE) and what they may do"
    return NodeError(f"the layer store refuses: {_short(error)}", field=FIELD, value=what, fix=fix, reason="credentials", retryable=False)


def _other(error: BaseException, what: str) -> DsecError:
    """What obstore has no class for: a refusal by its HTTP status, or a store that does not answer."""
    text = str(error)
    if "NoSuchBucket" in text:
        return _no_bucket(error, what)
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    if status in (401, 403):
        return _keys(error, what)
    if 400 <= status < 500 and status not in (408, 429):
        return NodeError(f"the layer store refuses: {_short(error)}", field=FIELD, value=what, reason=f"http_{status}", retryable=False)
    if _METADATA_SERVICE in text:
        fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ?credentials=FILE"
        return NodeError("there are no keys for the layer store", field=FIELD, value=what, fix=fix, reason="credentials", retryable=False)
    fix = "is its endpoint right, and does it run?" if status == 0 else ""
    return Unavailable(f"the layer store cannot be reached: {_short(error)}", field=FIELD, value=what, fix=fix)


def _short(error: BaseException) -> str:
    text = " ".join(str(error).partition("Debug source:")[0].split())
    code = f"{found[1]}: " if (found := _CODE.search(text)) else ""
    return (code + text.partition(" <?xml")[0].partition("<?xml")[0])[:300].rstrip(" :")
