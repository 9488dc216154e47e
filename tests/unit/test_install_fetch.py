"""A source to a file, over HTTP from a server that does wrong whatever can be done wrong."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from email.message import Message

import pytest

from ds4d.errors import ModelFileError, TemporaryError, UsageError
from ds4d.model.install.fetch import Expected, Patience, fetch, kept, patiently
from ds4d.model.install.sources import (
    FileSource,
    WebSource,
    _Redirects,
    read_small,
    source_of,
)
from ds4d.model.install.telling import Teller
from tests.unit.bad_server import (
    BadServer,
    another_version,
    chunked,
    claiming,
    cut,
    ignoring_range,
    modified_at,
    part_of_another,
    redirect,
    stalling,
    status,
    trickling,
)

BODY = b"GGUF" + random.Random(1).randbytes(300_000)
OTHER = b"GGUF" + random.Random(2).randbytes(300_000)


def digest(data):
    return hashlib.sha256(data).hexdigest()


class Waits(list):
    """Takes the place of sleeping."""

    def __call__(self, seconds):
        self.append(seconds)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """The servers here are on loopback, whatever stands before the rest of the world."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def waits():
    return Waits()


@pytest.fixture
def told():
    return io.StringIO()


@pytest.fixture
def get(tmp_path, waits, told):
    """Fetch a URL, or a source, to tmp_path/m.gguf; without words it is expected to be BODY."""

    def run(source, **expected):
        source = source if not isinstance(source, str) else WebSource(source)
        known = expected or {"size": len(BODY), "sha256": digest(BODY)}
        patience = Patience(attempts=4, sleep=waits)
        path = tmp_path / "m.gguf"
        return fetch(source, path, Expected(begins=b"GGUF", **known), Teller(told), patience)

    run.path = tmp_path / "m.gguf"
    return run


def test_a_good_server_is_asked_once(get):
    with BadServer(BODY) as server:
        fetched = get(server.url())
    assert (fetched.size, fetched.sha256) == (len(BODY), digest(BODY))
    assert get.path.read_bytes() == BODY
    assert get.path.stat().st_mode & 0o777 == 0o644
    assert server.asked == [None]


def test_a_connection_that_is_cut_twenty_times_costs_no_byte_twice(get, waits):
    with BadServer(BODY, *[cut(after=10_000)] * 20) as server:
        get(server.url())
    assert get.path.read_bytes() == BODY
    assert server.sent == len(BODY)
    assert server.asked == [None, *(f"bytes={n}-" for n in range(10_000, 210_000, 10_000))]
    assert set(server.if_range[1:]) == {'"v1"'}
    assert waits == [1.0] * 20  # each attempt got on, so nobody loses patience


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(get, told):
    with BadServer(BODY, cut(100_000), *[status(503)] * 4) as server:
        with pytest.raises(
            TemporaryError, match=r"503.*given up after 4 attempts.*goes on from it"
        ):
            get(server.url())
        assert kept(get.path) == 100_000
        get(server.url())
    assert get.path.read_bytes() == BODY
    assert server.sent == len(BODY)
    assert server.asked[-1] == "bytes=100000-"
    assert "what is there" in told.getvalue()  # hashing it has its own progress


def test_a_server_that_ignores_ranges_sends_all_again_and_that_is_said(get, told):
    with BadServer(BODY, cut(100_000), ignoring_range()) as server:
        get(server.url())
    assert get.path.read_bytes() == BODY
    assert server.sent == 100_000 + len(BODY)
    assert "cannot go on in the middle: starting over, 100,000 bytes" in told.getvalue()


def test_patience_with_a_server_that_never_gets_further_has_an_end(get, waits):
    with BadServer(BODY, *[ignoring_range(after=50_000)] * 40) as server:
        with pytest.raises(TemporaryError, match="4 attempts that brought nothing new"):
            get(server.url())
    assert len(server.asked) == 5  # one that brought something, four that did not
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_a_file_that_changes_in_between_is_never_mixed(get, told):
    with BadServer(BODY, cut(100_000), another_version(OTHER, '"v2"')) as server:
        get(server.url(), sha256=digest(OTHER))
    assert get.path.read_bytes() == OTHER
    assert server.sent == 100_000 + len(OTHER)
    assert "has changed: starting over" in told.getvalue()


def test_a_server_that_goes_on_in_another_version_is_caught_by_its_etag(get, told):
    with BadServer(BODY, cut(100_000), part_of_another(OTHER, '"v2"')) as server:
        get(server.url(), size=len(OTHER))
    assert get.path.read_bytes() == OTHER
    assert server.asked == [None, "bytes=100000-", None]
    assert "has changed" in told.getvalue()


def test_a_file_that_became_shorter_is_fetched_anew(get):
    short = BODY[:50_000]
    with BadServer(BODY, cut(100_000), part_of_another(short, '"v1"')) as server:
        server.acts[1] = lambda x: (
            setattr(server, "body", short),
            status(416, Content_Range=f"bytes */{len(short)}")(x),
        )
        get(server.url(), sha256=digest(short))
    assert get.path.read_bytes() == short


def test_wrong_bytes_are_refused_and_the_next_attempt_fetches_them_again(get, told):
    wrong = BODY[:-1] + b"?"
    with BadServer(wrong) as server:
        with pytest.raises(ModelFileError, match=f"sha256 {digest(wrong)}, expected"):
            get(server.url())
        server.body = BODY
        get(server.url())
    assert get.path.read_bytes() == BODY
    assert server.sent == 2 * len(BODY)
    assert "was refused for its sha256" in told.getvalue()


def test_a_digest_that_was_mistyped_costs_no_second_download(get):
    with BadServer(BODY) as server:
        with pytest.raises(ModelFileError, match=r"kept in .*m.gguf in case"):
            get(server.url(), sha256="0" * 64)
        get(server.url(), sha256=digest(BODY))
    assert server.sent == len(BODY)


@pytest.mark.parametrize("claimed", [len(BODY) - 1, len(BODY) + 1])
def test_another_length_than_the_expected_is_refused_at_once(get, claimed):
    with BadServer(BODY, claiming(claimed)) as server:
        with pytest.raises(ModelFileError, match=f"has {claimed:,} bytes, expected {len(BODY):,}"):
            get(server.url(), size=len(BODY))
    assert len(server.asked) == 1


def test_a_server_that_promises_more_than_it_has_is_given_up(get):
    """Only the digest is known, so nothing contradicts the promise until the bytes end."""
    with BadServer(BODY, *[claiming(len(BODY) + 9)] * 9) as server:
        with pytest.raises(TemporaryError, match=r"ended after 300,004 of 300,013 bytes|answers"):
            get(server.url(), sha256=digest(BODY))
    assert len(server.asked) == 5


def test_a_server_that_says_less_than_it_has_is_caught_by_the_digest(get):
    with BadServer(BODY, claiming(200_000)) as server:
        with pytest.raises(ModelFileError, match="has sha256"):
            get(server.url(), sha256=digest(BODY))
    assert server.asked == [None]


def test_a_length_that_is_not_said_is_counted(get):
    with BadServer(BODY, chunked(BODY)) as server:
        get(server.url())
    with BadServer(BODY, chunked(BODY)) as server:
        get.path.unlink()
        assert get(server.url(), sha256=None).size == len(BODY)


def test_more_bytes_than_expected_end_the_transfer(get):
    with BadServer(BODY, chunked(BODY * 3)) as server:
        with pytest.raises(ModelFileError, match=f"sends more than {len(BODY):,} bytes"):
            get(server.url(), size=len(BODY))
    assert kept(get.path) == 0


def test_fewer_bytes_than_expected_are_not_taken_for_a_whole(get):
    with BadServer(BODY[:200_000], chunked(BODY[:200_000])) as server:
        with pytest.raises(ModelFileError, match="has 200,000 bytes, expected 300,004"):
            get(server.url(), size=len(BODY))
    assert server.asked == [None, "bytes=200000-"]  # it might have been a cut: the server is asked


@pytest.mark.parametrize("act", [chunked(b""), claiming(0)])
def test_an_empty_file_is_refused(get, act):
    with BadServer(b"", act) as server, pytest.raises(ModelFileError, match="is empty"):
        get(server.url(), sha256=None)


def test_busy_servers_are_asked_again_when_they_like(get, waits):
    later = status(429, Retry_After=7)
    with BadServer(BODY, status(503), later, status(503, Retry_After=99_999)) as server:
        get(server.url())
    assert get.path.read_bytes() == BODY
    assert waits == [2.0, 7.0, 300.0]


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410])
def test_what_the_server_refuses_is_told_at_once(get, waits, code):
    with BadServer(BODY, status(code)) as server:
        with pytest.raises(UsageError, match=f"m.gguf: answers {code}"):
            get(server.url("m.gguf"))
    assert waits == []


def test_what_a_server_says_does_not_reach_the_terminal_as_it_is(get, waits, told):
    def shouting(x):
        x.handler.wfile.write(b"HTTP/1.0 403 \x1b[2JGo away\r\n\r\n")
        x.hang_up()

    def babbling(x):
        x.handler.wfile.write(b"HTTP/\x1b[2J?\r\n\r\n")
        x.hang_up()

    with BadServer(BODY, babbling, shouting) as server:
        with pytest.raises(UsageError, match=r"answers 403 \?\[2JGo away"):
            get(server.url())
    assert "\x1b" not in told.getvalue()
    assert len(waits) == 1


def test_redirects_are_followed_with_the_range(get):
    with BadServer(BODY) as target:
        with BadServer(b"", *[redirect(target.url())] * 2) as server:
            target.acts.append(cut(100_000))
            get(server.url())
    assert target.sent == len(BODY)
    assert target.asked == [None, "bytes=100000-"]


def test_a_redirect_loop_ends(get, waits):
    with BadServer(BODY) as server:
        server.acts.extend([redirect(server.url())] * 50)
        with pytest.raises(UsageError, match="redirects without end"):
            get(server.url())
    assert waits == []


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://host/m.gguf"])
def test_a_redirect_out_of_http_is_refused(get, to):
    with BadServer(BODY, redirect(to)) as server, pytest.raises(UsageError, match="redirects"):
        get(server.url())


def test_a_redirect_out_of_tls_is_refused():
    from urllib.request import Request

    asked = Request("https://a.example/m.gguf?token=secret")
    with pytest.raises(UsageError, match=r"redirects to http://b.example/x, refused") as refusal:
        _Redirects().redirect_request(
            asked, io.BytesIO(), 302, "", Message(), "http://b.example/x?token=secret"
        )
    assert "secret" not in str(refusal.value)


def test_a_trickle_is_as_good_as_a_stream(get):
    body = BODY[:20_000]
    with BadServer(body, trickling(100)) as server:
        get(server.url(), sha256=digest(body))
    assert get.path.read_bytes() == body


def test_a_server_that_falls_silent_is_a_cut(get, told):
    with BadServer(BODY, stalling(100_000)) as server:
        get(WebSource(server.url(), timeout_s=0.2))
        assert server.asked == [None, "bytes=100000-"]
    assert "nothing came in time" in told.getvalue()


def test_a_page_that_asks_to_log_in_is_recognised_by_its_first_bytes(get):
    page = b"<!DOCTYPE html>" + bytes(10 << 20)
    with BadServer(page) as server:
        with pytest.raises(
            ModelFileError, match=r"begins with b'<!DOCTYPE html>.*expected b'GGUF'"
        ):
            get(server.url(), sha256=None)
    assert kept(get.path) == 0


def test_a_compressed_answer_is_refused(get):
    def packed(x):
        x.extra["Content-Encoding"] = "gzip"
        x.head(200, Content_Length=len(BODY))

    with BadServer(BODY, packed) as server, pytest.raises(UsageError, match="sent as gzip"):
        get(server.url())


def test_without_a_version_and_a_digest_nothing_is_glued_together(get, told):
    """The size of both versions may be the same: only starting over is honest."""
    with BadServer(BODY, cut(100_000), etag=None) as server:
        get(server.url(), size=len(BODY))
    assert server.asked == [None, None]
    assert server.sent == len(BODY) + 100_000
    assert "does not say which version it is: starting over" in told.getvalue()


def test_with_a_digest_no_version_is_needed(get):
    with BadServer(BODY, cut(100_000), etag=None) as server:
        get(server.url())
    assert server.sent == len(BODY)
    assert server.if_range == [None, None]


def test_a_weak_etag_is_no_version_but_an_old_date_is(get):
    with BadServer(BODY, cut(100_000), etag='W/"v1"') as server:
        server.modified = modified_at(time.time() - 3600)
        get(server.url(), size=len(BODY))
    assert server.sent == 100_000 + len(BODY)  # a weak tag names no bytes, whatever the date
    with BadServer(BODY, cut(100_000), etag=None) as server:
        server.modified = modified_at(time.time() - 3600)
        get.path.unlink()
        get(server.url(), size=len(BODY))
    assert server.sent == len(BODY)
    assert server.if_range[1] == server.modified


def test_a_date_of_this_very_second_is_no_version(get):
    with BadServer(BODY, cut(100_000), etag=None) as server:
        server.modified = modified_at(time.time() + 60)
        get(server.url(), size=len(BODY))
    assert server.sent == 100_000 + len(BODY)


def test_bytes_of_one_source_are_not_continued_from_another_without_a_digest(get):
    with BadServer(BODY, cut(100_000), *[status(503)] * 4) as server:
        with pytest.raises(TemporaryError):
            get(server.url("a/m.gguf"), size=len(BODY))
        with pytest.raises(UsageError, match=r"holds 100,000 bytes from .*/a/m.gguf"):
            get(server.url("b/m.gguf"), size=len(BODY))
    assert server.sent == 100_000
    with BadServer(BODY, etag='"of another server"') as mirror:
        get(mirror.url())  # the digest will tell
    assert get.path.read_bytes() == BODY
    assert mirror.asked == ["bytes=100000-"]


def test_a_signed_link_may_be_renewed_and_its_secret_is_nowhere(get, tmp_path, told):
    with BadServer(BODY, cut(100_000), *[status(503)] * 4) as server:
        with pytest.raises(TemporaryError) as error:
            get(server.url("m.gguf?signature=secret1"), size=len(BODY))
        get(server.url("m.gguf?signature=secret2"), size=len(BODY))
    assert server.sent == len(BODY)
    written = told.getvalue() + str(error.value)
    written += "".join(p.read_text("latin-1") for p in tmp_path.iterdir())
    assert "signature" not in written


def test_a_full_disk_keeps_what_fits_and_goes_on_later(get):
    """The limit on the size of a file is refused by the kernel just as a full disk is."""
    with BadServer(BODY) as server:
        with file_size_limit(150_000):
            with pytest.raises(
                TemporaryError,
                match=r"disk is full after 150,000 bytes of m.gguf: 150,004 more bytes are needed",
            ):
                get(server.url())
        assert kept(get.path) == 150_000
        get(server.url())
    assert get.path.read_bytes() == BODY
    assert server.asked == [None, "bytes=150000-"]


@contextmanager
def file_size_limit(n_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_after_a_crash_of_the_machine_only_synced_bytes_count(get, tmp_path):
    with BadServer(BODY, cut(100_000), *[status(503)] * 4) as server:
        with pytest.raises(TemporaryError):
            get(server.url())
        state = tmp_path / ".m.gguf.state"
        noted = json.loads(state.read_bytes())
        assert noted["synced"] == 100_000
        state.write_text(json.dumps(noted | {"boot": "another", "synced": 60_000}))
        with get.path.open("r+b") as file:
            file.seek(60_000)
            file.write(bytes(40_000))  # what a journal may leave of bytes that were not synced
        get(server.url())
    assert get.path.read_bytes() == BODY
    assert server.asked[-1] == "bytes=60000-"


@pytest.mark.parametrize("state", [None, b"", b"{", b'{"source": 1}'])
def test_bytes_of_which_nothing_is_known_are_not_used(get, tmp_path, state):
    get.path.write_bytes(OTHER[:1000])
    if state is not None:
        (tmp_path / ".m.gguf.state").write_bytes(state)
    with BadServer(BODY) as server:
        get(server.url())
    assert get.path.read_bytes() == BODY
    assert server.asked == [None]


def test_a_file_that_somebody_else_has_a_name_for_is_left_alone(get, tmp_path):
    """As after --link: writing to it would write to the original."""
    original = tmp_path / "original.gguf"
    with BadServer(BODY, cut(1000), *[status(503)] * 4) as server:
        with pytest.raises(TemporaryError):
            get(server.url())
        os.link(get.path, original)
        get(server.url())
    assert original.read_bytes() == BODY[:1000]
    assert get.path.read_bytes() == BODY


def test_a_local_file_is_copied_and_a_copy_goes_on(get, tmp_path):
    source = tmp_path / "there.gguf"
    source.write_bytes(BODY)
    with file_size_limit(150_000), pytest.raises(TemporaryError):
        get(FileSource(source))
    fetched = get(FileSource(source), sha256=None)
    assert fetched.sha256 == digest(BODY)
    assert get.path.read_bytes() == BODY


def test_a_local_file_that_changed_is_copied_anew(get, tmp_path, told):
    source = tmp_path / "there.gguf"
    source.write_bytes(BODY)
    with file_size_limit(150_000), pytest.raises(TemporaryError):
        get(FileSource(source), sha256=None)
    source.write_bytes(OTHER)
    get(FileSource(source), sha256=None)
    assert get.path.read_bytes() == OTHER
    assert "has changed" in told.getvalue()


def test_a_local_source_that_is_no_file_is_refused_without_waiting(get, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(UsageError, match=says):
            get(FileSource(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ftp://host/m.gguf", "ftp is not supported"),
        ("file:///m.gguf", "file is not supported"),
        ("http://", "not a URL"),
        ("http://host:0/m.gguf", "not a URL"),
        ("http://host:99999/m.gguf", "not a URL"),
        ("http://[::1/m.gguf", "not a URL"),
        ("http://host/a b", "not a URL"),
        ("https://user:secret@host/m.gguf", "https://host/m.gguf: a URL with a user name"),
        ("https://user:secret@host:99999/m.gguf", "https://host:99999/m.gguf: not a URL"),
        ("https://user:secret@[::1/m.gguf", "not a URL"),
        ("https://host/m n.gguf?token=secret", "https://host/m n.gguf: not a URL"),
        ("ftp://user:secret@host/m.gguf", "ftp://host/m.gguf: ftp is not supported"),
        ("http:///m.gguf#secret", "http:///m.gguf: not a URL"),
    ],
)
def test_what_is_no_source_is_one_sentence(text, says):
    with pytest.raises(UsageError, match=says) as error:
        source_of(text)
    if "secret" in text:
        assert "secret" not in str(error.value)


def test_a_path_is_a_path_whatever_it_holds(tmp_path):
    assert isinstance(source_of(str(tmp_path / "a:b.gguf")), FileSource)
    assert source_of("~/m.gguf").where == os.path.expanduser("~/m.gguf")


def test_a_host_that_is_not_there_is_told_at_once(get, waits):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(TemporaryError, match="cannot be reached: Connection refused"):
            get(f"http://127.0.0.1:{port}/m.gguf")
    assert waits == []


def test_a_host_that_goes_away_in_between_is_waited_for(get, waits):
    server = BadServer(BODY, cut(100_000))
    with server:
        url = server.url()
        source = WebSource(url)
        source.probe()
    with pytest.raises(TemporaryError, match="cannot be reached: Connection refused; given up"):
        get(source)
    assert len(waits) == 3


def test_names_in_a_url_may_be_of_any_script(get):
    with BadServer(BODY) as server:
        source = WebSource(server.url("модель.gguf"))
        assert source.file == "модель.gguf"
        get(source)


def test_an_untrusted_certificate_is_told_as_such(get, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    pem = tmp_path / "own.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-subj", "/CN=localhost", "-keyout", pem, "-out", pem, "-days", "1"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def shake() -> None:
            connection, _ = door.accept()
            with connection, pytest.raises(OSError):
                context.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=shake)
        thread.start()
        with pytest.raises(UsageError, match="certificate is not trusted: self-signed"):
            get(f"https://localhost:{door.getsockname()[1]}/m.gguf")
        thread.join()


def test_a_small_file_is_read_with_patience_and_a_limit(waits, told):
    ask = (Teller(told), Patience(attempts=4, sleep=waits))
    with BadServer(b"x" * 5000, status(503), cut(100)) as server:
        source = WebSource(server.url())
        assert patiently(source, *ask, lambda s: read_small(s, 9000)) == b"x" * 5000
        with pytest.raises(ModelFileError, match="more than 4,000 bytes"):
            patiently(source, *ask, lambda s: read_small(s, 4000))
    assert waits == [2.0, 4.0]


def test_a_proxy_of_the_environment_is_used(get, monkeypatch):
    with BadServer(BODY) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url("").rstrip("/"))
        get("http://host.invalid/m.gguf")
    assert get.path.read_bytes() == BODY


def test_progress_counts_up_says_the_rate_and_ends_whole():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock, told = Clock(), io.StringIO()
    teller = Teller(told, clock)
    with teller.bar("m.gguf", 100 << 20, 20 << 20) as bar:
        for second in range(1, 41):
            clock.now = float(second)
            bar.at((20 + 2 * second) << 20)
    lines = told.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["40", "60", "80", "100", "100"]
    assert lines[1] == "m.gguf   60 %  60.00 MiB of 100.00 MiB  2.00 MiB/s  0:20 left"
    assert "left" not in lines[-1]


def test_on_a_terminal_progress_is_one_line_that_fits():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    class Clock:
        now = 0.0

        def __call__(self):
            self.now += 0.2
            return self.now

    told = Terminal()
    teller = Teller(told, Clock())
    with teller.bar("a-model-with-a-long-name-such-as-they-have.gguf", 80 << 30) as bar:
        for n in range(10):
            bar.at(n << 30)
        teller.note("a word in between")
        bar.at(11 << 30)
    frames = re.split("\r\033\\[K|\n", told.getvalue())
    assert max(map(len, frames)) < 80
    assert frames[-2] == (
        "a-model-…  [#-----------]   13 %  11.00 GiB of 80.00 GiB  5.00 GiB/s  0:14 left"
    )
    assert "a word in between" in frames
    assert frames[-1] == ""
