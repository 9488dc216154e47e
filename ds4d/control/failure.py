"""What went wrong, in the words of the protocol. Knows neither methods nor connections."""

from __future__ import annotations

import logging

from ds4d import wire
from ds4d.errors import ConfigError, Declined, Ds4Error, Refused, RequestError
from ds4d.events import emit

log = logging.getLogger(__name__)


def failure(error: BaseException, what: str) -> wire.Error:
    """The error that a client is sent; `what` failed. One that nobody has planned is also logged,
    with its traceback at debug level."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]  # a task group wraps what one of its tasks raised
    text = _unicode(str(error))
    match error:
        case Declined(code=code):
            return wire.Error(code=code, message=text)
        case ConfigError():
            data = [
                wire.Problem(where=_unicode(w), key=_unicode(k), message=_unicode(m))
                for w, k, m in error.problems
            ]
            return wire.Error(code=wire.CONFIG_INVALID, message=text, data=data or None)
        case Refused():
            return wire.Error(code=wire.BUSY, message=text)
        case RequestError():
            return wire.Error(code=wire.BAD_PARAMS, message=text)
        case Ds4Error():
            return wire.Error(code=wire.INTERNAL, message=text)
        case TimeoutError():
            return wire.Error(code=wire.DEADLINE, message=text or f"{what} took too long")
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return wire.Error(code=wire.IO, message=_unicode(f"{where}{error.strerror or error}"))
        case _:
            emit(log, "control.error", level=logging.ERROR, what=what, reason=repr(error))
            log.debug("control.error traceback", exc_info=error)
            text = (
                f"{what} failed in a way that nobody foresaw: {type(error).__name__}; see the log"
            )
            return wire.Error(code=wire.INTERNAL, message=text)


def _unicode(text: str) -> str:
    """A file name in it may be none."""
    return text.encode(errors="backslashreplace").decode()
