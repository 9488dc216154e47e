"""Where bytes come from: a file of this machine, or HTTP(S) with what may go wrong there.

A source can be opened anywhere in the middle. What it answers is told plainly (`Stream`): from
which byte it really sends, how long it says the whole is, and which version it is; what follows
from that is `fetch`'s to decide. A failure that may pass is a `Cut`, any other an error for a
person. TLS and proxies are as the standard library has them.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import stat
import urllib.error
import urllib.parse
import urllib.request
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn, Protocol

from ds4d import __version__
from ds4d.errors import ModelFileError, TemporaryError, UsageError

if TYPE_CHECKING:
    from email.message import Message

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0  # without a byte
_LATER = {408, 425, 429}  # 4xx that ask to come again
_OF_URLS = "%/:=&?~#+!$,;'@()*[]"  # left as it is when the rest of a URL is quoted


class Cut(Exception):
    """The transfer broke off, or did not start; another attempt may do better."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s  # at least, as the server asks


class Stream(Protocol):
    """An answer under way. `offset` is the byte that comes first, whatever was asked for."""

    offset: int
    total: int | None  # bytes of the whole
    version: str | None  # equal for equal bytes; None: the source does not say

    def read(self) -> bytes:
        """Some bytes, none at the end. Raises Cut."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    where: str  # for a person and for records: without what may be secret
    file: str | None  # how the file is called there
    remote: bool

    def open(self, offset: int = 0, version: str | None = None) -> Stream:
        """From byte `offset` on, or from the start if the source cannot do that or its version is
        another one by now. Raises Cut, and what `ds4d` says to a person."""
        ...

    def probe(self) -> Stream:
        """Open only to see total and version; already closed."""
        ...


def source_of(text: str) -> Source:
    """What a command line calls SRC: a URL, or a path. Raises UsageError."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme is None:
        return FileSource(Path(text).expanduser())
    if scheme[1].lower() not in ("http", "https"):
        raise UsageError(
            f"{_shown(text)}: {scheme[1]} is not supported, expected http, https or a path"
        )
    return WebSource(text)


def read_small(source: Source, limit: int) -> bytes:
    """A small file in one go. Raises as `open` and `read`, ModelFileError beyond `limit` bytes."""
    stream = source.open()
    data = bytearray()
    try:
        while more := stream.read():
            data += more
            if len(data) > limit:
                raise ModelFileError(f"{source.where}: has more than {limit:,} bytes")
    finally:
        stream.close()
    if stream.total is not None and len(data) != stream.total:
        raise Cut(f"ended after {len(data):,} of {stream.total:,} bytes")
    return bytes(data)


# Files


class FileSource:
    remote = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        self.file: str | None = path.name

    def open(self, offset: int = 0, version: str | None = None) -> Stream:
        try:
            # Not blocking: a FIFO would otherwise wait for its writer before it can be refused.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{self.where}: {error.strerror}") from None
        except ValueError:
            raise UsageError(f"{self.where!r}: not a file name") from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise UsageError(f"{self.where}: is not a regular file, expected a model file or a URL")
        file = os.fdopen(descriptor, "rb", buffering=0)
        stream = _FileStream(self.where, file, status)
        if version in (None, stream.version) and offset <= status.st_size:
            stream.seek(offset)
        return stream

    def probe(self) -> Stream:
        stream = self.open()
        stream.close()
        return stream


class _FileStream:
    def __init__(self, where: str, file: IO[bytes], status: os.stat_result) -> None:
        self.offset = 0
        self.total: int | None = status.st_size
        self.version: str | None = f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
        self._where = where
        self._file = file
        self._left = status.st_size

    def seek(self, offset: int) -> None:
        self._file.seek(offset)
        self.offset = offset
        self._left -= offset

    def read(self) -> bytes:
        try:
            data = self._file.read(min(CHUNK_BYTES, self._left))
        except OSError as error:
            raise ModelFileError(f"{self._where}: cannot be read: {error.strerror}") from None
        self._left -= len(data)
        if not data and self._left:
            raise ModelFileError(f"{self._where}: became shorter while it was read")
        return data

    def close(self) -> None:
        self._file.close()


# HTTP


class _Redirects(urllib.request.HTTPRedirectHandler):
    """As the standard library follows them, but never out of HTTP or out of TLS."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (req.type == "https" and scheme != "https"):
            fp.close()
            raise UsageError(f"{_shown(req.full_url)}: redirects to {_shown(newurl)}, refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


class WebSource:
    remote = True

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """Raises UsageError for what is no URL, or holds a password."""
        self.where = _shown(url)
        try:
            parts = urllib.parse.urlsplit(url)
            port_is_right = parts.port is None or parts.port > 0
        except ValueError:
            port_is_right = False
        if not port_is_right or not parts.hostname or any(c.isspace() for c in url):
            raise UsageError(
                f"{self.where}: not a URL, expected such as https://host/path/model.gguf"
            )
        if "@" in parts.netloc:
            raise UsageError(
                f"{self.where}: a URL with a user name or password is not supported, because "
                "others could read it in the process list; fetch the file with another program "
                "and install it from its path"
            )
        self.file = urllib.parse.unquote(parts.path.rpartition("/")[2]) or None
        self._url = urllib.parse.quote(url, safe=_OF_URLS)
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_Redirects)
        self._reached = False

    def open(self, offset: int = 0, version: str | None = None) -> Stream:
        headers = {}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if version is not None:
                headers["If-Range"] = version
        return self._ask(headers, offset)

    def probe(self) -> Stream:
        # Not HEAD, which links that are signed for one method refuse.
        stream = self._ask({"Range": "bytes=0-0"}, 0)
        stream.close()
        return stream

    def _ask(self, headers: dict[str, str], offset: int) -> Stream:
        headers["User-Agent"] = f"ds4d/{__version__}"
        try:
            request = urllib.request.Request(self._url, headers=headers)
            response = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            self._reached = True
            with error:
                return self._refused(error, offset)
        except urllib.error.URLError as error:
            self._unreachable(error.reason)
        except http.client.InvalidURL:
            raise UsageError(f"{self.where}: not a URL, or redirects to what is none") from None
        except (OSError, http.client.HTTPException) as error:
            raise Cut(f"no answer: {_why(error)}") from None
        except UnicodeError:
            raise UsageError(f"{self.where}: not a host name") from None
        self._reached = True
        try:
            return self._answer(response)
        except BaseException:
            response.close()
            raise

    def _answer(self, response: http.client.HTTPResponse) -> Stream:
        coding = response.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise UsageError(f"{self.where}: is sent as {_plain(coding)}, expected plain bytes")
        if response.status == 200:
            return _WebStream(response, 0, _number(response.headers.get("Content-Length")))
        if response.status == 206:
            found = re.fullmatch(
                r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)",
                response.headers.get("Content-Range", "").strip(),
            )
            if found is None:
                raise Cut("answered with a part that does not say which (no Content-Range)")
            return _WebStream(response, int(found[1]), _number(found[3]))
        raise UsageError(f"{self.where}: {_says(response.status, response.reason)}")

    def _refused(self, error: urllib.error.HTTPError, offset: int) -> Stream:
        says = _says(error.code, error.reason)
        if error.code == 416 and offset:
            found = re.search(r"/(\d{1,18})$", error.headers.get("Content-Range", ""))
            if found is None:
                raise Cut(says)
            return _Nothing(offset, int(found[1]), _version(error.headers))
        if 300 <= error.code < 400:
            raise UsageError(f"{self.where}: redirects without end, or to nowhere ({error.code})")
        if error.code < 500 and error.code not in _LATER:
            raise UsageError(f"{self.where}: {says}")
        raise Cut(says, wait_s=float(_number(error.headers.get("Retry-After")) or 0))

    def _unreachable(self, reason: str | BaseException) -> NoReturn:
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise UsageError(
                f"{self.where}: the server's certificate is not trusted: {reason.verify_message}"
            )
        if self._reached:
            raise Cut(f"cannot be reached: {_why(reason)}")
        # The first contact: a wrong name or port is told at once, not after minutes of patience.
        raise TemporaryError(f"{self.where}: cannot be reached: {_why(reason)}")


class _WebStream:
    def __init__(self, response: http.client.HTTPResponse, offset: int, total: int | None) -> None:
        self.offset = offset
        self.total = total
        self.version = _version(response.headers)
        self._response = response

    def read(self) -> bytes:
        try:
            return self._response.read1(CHUNK_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Cut(f"the connection was cut: {_why(error)}") from None

    def close(self) -> None:
        self._response.close()


class _Nothing:
    """What a server has behind the last byte."""

    def __init__(self, offset: int, total: int, version: str | None) -> None:
        self.offset = offset
        self.total: int | None = total
        self.version = version

    def read(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


def _version(headers: Message) -> str | None:
    """A strong validator, fit for If-Range (RFC 9110, 8.8)."""
    tag = headers.get("ETag")
    if tag is not None:
        return None if tag.startswith("W/") else tag
    modified = headers.get("Last-Modified")
    try:
        # Within the second of its date a file may still change unseen.
        sent, changed = (parsedate_to_datetime(headers[k]) for k in ("Date", "Last-Modified"))
        return modified if (sent - changed).total_seconds() >= 1 else None
    except (TypeError, ValueError, AttributeError):
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\s*\d{1,18}\s*", text) else None


def _shown(url: str) -> str:
    """Without user, password, query and fragment: signed links carry their secrets there. Also of
    what is no URL."""
    scheme, separator, rest = re.split("[?#]", url, maxsplit=1)[0].partition("://")
    authority, slash, path = rest.partition("/")
    return _plain(f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}")


def _says(code: int, reason: object) -> str:
    return _plain(f"answers {code} {reason}".partition("\n")[0].rstrip())


def _plain(text: str) -> str:
    """Words of a server's, with nothing in them that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _why(reason: str | BaseException) -> str:
    if isinstance(reason, TimeoutError):
        return "nothing came in time"
    if isinstance(reason, socket.gaierror):
        return "no such host"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return _plain(str(reason)) or type(reason).__name__
