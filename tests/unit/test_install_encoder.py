"""The release's texts out of its encoder file, written in whatever way; nothing of it is run."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings

import pytest

from ds4d.errors import ModelFileError
from ds4d.model.install import encoder

HEAD = "## Tools\n\nCall them within <｜M｜calls> after </think>.\n{a: 1}\n### Available\n\n"
TAIL = "\n\nUse only these — no others.\n"
TEXTS = {"head": HEAD, "tail": TAIL}


def table(texts):
    return {
        name: (len(text.encode()), hashlib.sha256(text.encode()).hexdigest())
        for name, text in texts.items()
    }


BLOCKS = table(TEXTS)


def find(source, blocks=BLOCKS):
    return encoder.find(source.encode(), "encoding.py", blocks)


WAYS = {
    "constants": f"HEAD = {HEAD!r}\nTAIL = {TAIL!r}\n",
    "annotated": f"HEAD: str = {HEAD!r}\nTAIL: str = {TAIL!r}\n",
    "within longer ones": f"ALL = {'before' + HEAD + 'schemas' + TAIL + 'behind'!r}\n",
    "in a function": f"def render():\n    return {HEAD!r}, {TAIL!r}\n",
    "in a class": f"class T:\n    HEAD = {HEAD!r}\n    TAIL = {TAIL!r}\n",
    "in a dict": f"T = {{'head': {HEAD!r}, 'tail': {TAIL!r}}}\n",
    "implicit concatenation": f"HEAD = ({HEAD[:20]!r}\n  {HEAD[20:]!r})\nTAIL = {TAIL!r}",
    "sums": f"HEAD = {HEAD[:9]!r} + {HEAD[9:30]!r} + {HEAD[30:]!r}\nTAIL = '\\n\\n' + {TAIL[2:]!r}",
    "sums of names": f"NL = '\\n\\n'\nHEAD = {HEAD[:-2]!r} + NL\nTAIL = NL + {TAIL[2:]!r}",
    "a sum with a call in it": f"def f(s):\n    return {HEAD!r} + dump(s) + {TAIL!r}\n",
    "f-strings": (
        "MARK = '｜M｜'\nEND = '</think>'\n"
        "def f(schemas):\n"
        "    return f'## Tools\\n\\nCall them within <{MARK}calls> after {END}.\\n{{a: 1}}\\n"
        "### Available\\n\\n{schemas}\\n\\nUse only these — no others.\\n'\n"
    ),
    "a template with names of the module": (
        "mark: str = '｜M｜'\nthink_end: str = '</think>'\n"
        'TOOLS = """## Tools\n\nCall them within <{mark}calls> after {think_end}.\n'
        '{{a: 1}}\n### Available\n\n{tool_schemas}\n\nUse only these — no others.\n"""\n'
        "def f(tools):\n"
        "    return TOOLS.format(tool_schemas=tools, mark=mark, think_end=think_end)\n"
    ),
    "a template whose fields have other names": (
        "DSML = '｜M｜'\n_END = '</think>'\n"
        'TOOLS = """## Tools\n\nCall them within <{mark}calls> after {end}.\n'
        '{{a: 1}}\n### Available\n\n{schemas}\n\nUse only these — no others.\n"""\n'
        "def f(tools):\n    return TOOLS.format(schemas=tools, mark=DSML, end=_END)\n"
    ),
    "a template with names in capitals": (
        "MARK = '｜M｜'\nEND = '</think>'\n"
        'TOOLS = """## Tools\n\nCall them within <{mark}calls> after {end}.\n'
        '{{a: 1}}\n### Available\n\n{schemas}\n\nUse only these — no others.\n"""\n'
    ),
    "a template with defaults": (
        'TOOLS = """## Tools\n\nCall them within <{mark}calls> after {end}.\n'
        '{{a: 1}}\n### Available\n\n{schemas}\n\nUse only these — no others.\n"""\n'
        "def f(tools, mark='｜M｜', *, end='</think>'):\n"
        "    return TOOLS.format(schemas=tools, mark=mark, end=end)\n"
    ),
    "a template with a dict": (
        'TOOLS = """## Tools\n\nCall them within <{mark}calls> after {end}.\n'
        '{{a: 1}}\n### Available\n\n{schemas}\n\nUse only these — no others.\n"""\n'
        "VALUES = {'mark': '｜M｜', 'end': '</think>'}\n"
    ),
    "replace": (
        f"HEAD = {HEAD.replace('｜M｜', '@@')!r}.replace('@@', '｜M｜')\nTAIL = {TAIL!r}\n"
    ),
    "percent": f"T = {HEAD + '%s' + TAIL!r} % schemas\n",
    "join": f"HEAD = '\\n'.join([{', '.join(map(repr, HEAD.split(chr(10))))}])\nTAIL = {TAIL!r}\n",
    "dedent": (
        "import textwrap\n"
        'HEAD = textwrap.dedent("""\\\n    ## Tools\n\n    Call them within <｜M｜calls> after'
        ' </think>.\n    {a: 1}\n    ### Available\n\n""")\n'
        f"TAIL = {TAIL!r}\n"
    ),
    "strip": f"HEAD = {'  ' + HEAD!r}.lstrip()\nTAIL = {'x' + TAIL + 'xx'!r}.strip('x')\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_is_found_however_it_is_written(way):
    assert find(WAYS[way]) == TEXTS


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        (f"HEAD = {HEAD!r}\n", {"tail"}),
        (f"HEAD = {HEAD[:-1]!r}\nTAIL = {TAIL!r}\n", {"head"}),
        (f"HEAD = {HEAD.replace('Tools', 'tools')!r}\nTAIL = {TAIL!r}\n", {"head"}),
        (f"# {HEAD!r}\n", {"head", "tail"}),
        (f"HEAD = {HEAD[:20]!r} + unknown() + {HEAD[20:]!r}", {"head", "tail"}),
        ("", {"head", "tail"}),
    ],
)
def test_what_is_not_there_to_the_byte_is_missing(source, missing):
    assert BLOCKS.keys() - find(source).keys() == missing


def test_nothing_of_the_file_is_run(tmp_path):
    mark = tmp_path / "ran"
    source = (
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
        f"HEAD = {HEAD!r} + str(pathlib.Path({str(mark)!r}).touch())\n"
        f'T = f"{{pathlib.Path({str(mark)!r}).touch()}}"\n'
    )
    assert find(source) == {"head": HEAD}
    assert not mark.exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (b"def f(:\n", "not a Python file"),
        (b"\x89PNG\r\n\x1a\n", "not a Python file"),
        (b"x = 1\0", "not a Python file"),
        (b"# coding: nonsense\n", "not a Python file"),
        (b"x = " + b"(" * 100_000, "not a Python file|nests too deeply"),
        (b"x = " + b"-" * 100_000 + b"1", "not a Python file|nests too deeply"),
        (b"x = f'" + b"{a}" * 2000 + b"'", None),
        (b"x = " + b"+".join([b"'a'"] * 1000), None),
    ],
)
def test_what_is_no_encoder_is_one_sentence(source, says):
    if says is None:
        assert encoder.find(source, "encoding.py", BLOCKS) == {}
        return
    with pytest.raises(ModelFileError, match=says) as error:
        encoder.find(source, "encoding.py", BLOCKS)
    assert str(error.value).startswith("encoding.py: ")
    assert "\n" not in str(error.value)


DOUBLING = "a0 = 'xxxxxxxxxxxxxxxx'\n" + "".join(
    f"a{i} = a{i - 1} + a{i - 1}\n" for i in range(1, 99)
)
MANY = f"a = {'x' * 400_000!r}\n" + "".join(f"b{i} = a + '{i}'\n" for i in range(10_000))
REPLACING = f"a = {'a' * 300_000!r}.replace('a', {'b' * 300_000!r})\n"
JOINING = f"a = {'b' * 300_000!r}.join([{', '.join(repr(str(i)) for i in range(9999))}])\n"


@pytest.mark.parametrize("source", [DOUBLING, MANY, REPLACING, JOINING])
def test_a_file_made_to_cost_memory_is_refused_before_it_does(source):
    with pytest.raises(ModelFileError, match="too many texts"):
        find(source)


def test_escapes_of_theirs_warn_nobody():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            find(f"import re\nP = re.compile('\\d')\nHEAD = {HEAD!r}\nTAIL = {TAIL!r}\n") == TEXTS
        )


def test_the_file_that_is_written_holds_exactly_the_blocks(tmp_path):
    path = tmp_path / "prompt.json"
    path.write_bytes(encoder.as_json(find(WAYS["constants"])))
    assert json.loads(path.read_text("utf-8")) == TEXTS
    encoder.check(path, BLOCKS)
    for content, says in (
        (json.dumps(TEXTS | {"tail": TAIL + " "}), "tail has sha256"),
        (json.dumps({"head": HEAD}), "holds no text tail"),
        (json.dumps({"head": HEAD, "tail": 5}), "holds no text tail"),
        ("[]", "holds no text head"),
        ("[" * 100_000, "not a JSON file"),
        ("{", "not a JSON file"),
    ):
        path.write_text(content)
        with pytest.raises(ModelFileError, match=says):
            encoder.check(path, BLOCKS)


def test_the_daemon_loads_what_is_written(tmp_path, monkeypatch):
    """Both sides of prompt.json, with the release's names and texts of our own."""
    from ds4d.prompt import constants

    texts = {block: f"{block} — in words of our own\n\n" for block in constants.RELEASE_BLOCKS}
    monkeypatch.setattr(constants, "RELEASE_BLOCKS", table(texts))
    source = "".join(f"{block.upper()} = {text!r}\n" for block, text in texts.items())
    path = tmp_path / "prompt.json"
    path.write_bytes(encoder.as_json(find(source, constants.RELEASE_BLOCKS)))
    loaded = constants.load(path, "0731")
    assert {block: getattr(loaded, block) for block in texts} == texts
    assert loaded.name == "release"


def test_deep_names_do_not_reach_the_interpreters_limit():
    limit = sys.getrecursionlimit()
    source = "x = " + "(" * 50 + "'a'" + ")" * 50 + "\n" + "y = x" + ".strip()" * 60 + "\n"
    assert find(source) == {}
    assert sys.getrecursionlimit() == limit
