"""House rules that a reader could overlook; each is tested on text that breaks it."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import holdfast.nn

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "holdfast").rglob("*.py"))
BESIDE = [path for folder in ("tools", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
OURS = [*SOURCES, ROOT / "src" / "holdfast_pytest.py", *sorted(BESIDE)]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FACE = {"policies/lstm_wrapper.py", "check/adapters/pufferlib.py", "check/known_bugs.py"}
FACE |= {"check/gradient_laws.py"}
"""The interface of hand-written policies; an adapter of another library; advice as text; finite differences."""
MAY_SWALLOW = {"src/holdfast/check/diagnose.py": 1, "src/holdfast/check/long_laws.py": 2}
MAY_SWALLOW |= {"src/holdfast/check/adapters/initial_states.py": 1, "src/holdfast/check/adapters/cleanrl.py": 1}
"""How many handlers catch everything and say nothing: where no cause is found, the finding stands; a policy may have a
longest episode; a call that fails is how an adapter finds out which call is right."""
HOUSE_WORDS = {
    *("told", "said", "seen", "saw", "lived", "heard", "asked", "kept", "held", "mine", "theirs", "found"),
    *("given", "known", "whole", "everybody", "nobody", "anew", "life", "lives"),
}
PRONOUNS = re.compile(r"\b(somebody|nobody|everybody|whoever|anybody|those who|anew)\b", re.IGNORECASE)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(path):
    return path.relative_to(ROOT / "src" / "holdfast").as_posix()


def place_of(path):
    return path.relative_to(ROOT).as_posix()


def outside_memory(pattern):
    return [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in SOURCES
        if not name_of(path).startswith("memory/") and name_of(path) not in FACE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_only_the_memory_package_cuts_gradients():
    assert outside_memory(r"\.detach(_)?\(") == []


def test_only_the_memory_package_knows_h_and_c():
    assert outside_memory(r"""\[["'][hc]["']\]|\blstm_[hc]\b|\b[hc]_0\b""") == []


def test_nothing_loops_over_time_in_the_memory_package_but_the_reference():
    loops = [
        f"{name_of(path)}: {line.strip()}"
        for path in SOURCES
        if name_of(path).startswith("memory/")
        and path.name != "reference.py"
        and "kernels" not in path.parts  # these loops run on the chip
        for line in path.read_text().splitlines()
        if re.search(r"\b(for|while)\b.*(\b(t|step|T)\b|_T[A-Z]|unbind\().*:$", line)
    ]
    assert loops == []


def long_functions(text):
    """Functions of more than 60 lines, decorators not counted; what a chip runs is one function."""
    each = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, FUNCTIONS) and "triton.jit" not in map(ast.unparse, node.decorator_list)
    )
    return [f"{node.name} at {node.lineno}" for node in each if node.end_lineno - node.lineno + 1 > 60]


def too_long_or_mute(text):
    """A file of more than 400 lines, or one that does not say what it is."""
    problems = ["long"] if len(text.splitlines()) > 400 else []
    return problems if ast.get_docstring(ast.parse(text)) else [*problems, "mute"]


def house_words(text):
    """Identifiers that are participles or pronouns: they do not say what they hold."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.append(node.name)
    return [name for name in names if name.strip("_").lower() in HOUSE_WORDS]


def docstrings_with_pronouns(text):
    """Docstrings that speak of agents, callers or users by a pronoun instead of their name."""
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return [doc for node in nodes if PRONOUNS.search(doc := ast.get_docstring(node) or "")]


def public_classes_twice(texts):
    """Names of public classes that several files define, or one file twice."""
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    counts = Counter(node.name for node in nodes if not node.name.startswith("_"))
    return [name for name, count in counts.items() if count > 1]


def left_for_later(text):
    """Words for what is missing, and a question that hides a missing attribute."""
    return re.findall(r"\bhasattr\(|\bTODO\b|\bFIXME\b|\bXXX\b|\bNotImplementedError\b", text)


def swallowed(text):
    """Handlers that let an error go unheard.

    Nothing but `pass`, `continue` or `...` is silent whatever was caught; one that catches everything must
    raise, or say what it caught.
    """
    line_numbers = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            line_numbers.append(node.lineno)
        if not isinstance(node, ast.ExceptHandler):
            continue
        everything = node.type is None or re.search(r"\b(Base)?Exception\b", ast.unparse(node.type))
        idle = all(ast.unparse(line) in ("pass", "continue", "...") for line in node.body)
        inside = [each for line in node.body for each in ast.walk(line)]
        uses_error = any(isinstance(each, ast.Name) and each.id == node.name for each in inside)
        raised = any(isinstance(each, ast.Raise) for each in inside)
        if node.type is None or idle or (everything and not uses_error and not raised):
            line_numbers.append(node.lineno)
    return line_numbers


def endless_waits(text):
    """Waits for a process or a thread without a limit: a test must not hang."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    unlimited = [call for call in calls if "timeout" not in {keyword.arg for keyword in call.keywords}]
    runs = r"subprocess\.(run|call|check_call|check_output)\(|.*\.(communicate|wait|join)\((input=.*)?\)$"
    return [call.lineno for call in unlimited if re.match(runs, ast.unparse(call))]


@pytest.mark.parametrize("path", OURS, ids=place_of)
def test_files_keep_the_rules(path):
    text = path.read_text()
    assert too_long_or_mute(text) == []
    assert left_for_later(text) == []
    assert len(swallowed(text)) == MAY_SWALLOW.get(place_of(path), 0), swallowed(text)
    assert not re.search(r"(?<!triton_)utils|common|helpers", path.name), "what is in it? Name it so."


@pytest.mark.parametrize("path", [*OURS, *TESTS], ids=place_of)
def test_no_house_words_or_pronouns(path):
    text = path.read_text()
    # Hypothesis has a decorator of that name.
    allowed = {"given"} if re.search(r"from hypothesis import .*\bgiven\b", text) else set()
    assert [word for word in house_words(text) if word not in allowed] == []
    assert docstrings_with_pronouns(text) == []


def test_no_two_public_classes_share_a_name():
    # holdfast.nn has the names of torch.nn, which those cells have too.
    assert {*public_classes_twice([path.read_text() for path in SOURCES])} == {*holdfast.nn.__all__}


@pytest.mark.parametrize("path", [*OURS, *TESTS], ids=place_of)
def test_functions_are_short(path):
    assert long_functions(path.read_text()) == []


@pytest.mark.parametrize("path", TESTS, ids=place_of)
def test_tests_do_not_wait_for_ever(path):
    assert endless_waits(path.read_text()) == []


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        (long_functions, "def long():\n" + "    x = 1\n" * 60),
        (long_functions, "class A:\n    async def long(self):\n" + "        x = 1\n" * 60),
        (too_long_or_mute, '"""Say."""\n' + "x = 1\n" * 400),
        (too_long_or_mute, "#!/usr/bin/env python\nx = 1\n"),
        (too_long_or_mute, ""),
        (house_words, "told = 1"),
        (house_words, "def f(found): ..."),
        (house_words, "self._seen"),
        (house_words, "class Life: ..."),
        (docstrings_with_pronouns, 'def f():\n    """Ask whoever comes."""'),
        (docstrings_with_pronouns, '"""Nobody acts."""'),
        (public_classes_twice, ["class A: ...", "class A: ..."]),
        (left_for_later, "if hasattr(x, 'y'): ..."),
        (left_for_later, "x = 1  # TODO: two"),
        (left_for_later, "# FIXME"),
        (left_for_later, '"""XXX"""'),
        (left_for_later, "raise NotImplementedError"),
        (swallowed, "try: f()\nexcept: g()"),
        (swallowed, "try: f()\nexcept: raise"),
        (swallowed, "try: f()\nexcept Exception: pass"),
        (swallowed, "try: f()\nexcept (ValueError, BaseException): x = 1"),
        (swallowed, "try: f()\nexcept Exception as error: x = None"),
        (swallowed, "try: f()\nexcept KeyError: pass"),
        (swallowed, "try: f()\nexcept* KeyError: ..."),
        (swallowed, "for x in y:\n    try: f()\n    except OSError: continue"),
        (swallowed, "with contextlib.suppress(KeyError): f()"),
        (swallowed, "with suppress(KeyError): f()"),
        (endless_waits, "subprocess.run(['x'], text=True)"),
        (endless_waits, "process.communicate()"),
        (endless_waits, "thread.join()"),
    ],
)
def test_what_breaks_a_rule_is_found(rule, broken):
    assert rule(broken) != []


@pytest.mark.parametrize(
    ("rule", "correct"),
    [
        (long_functions, "def short():\n" + "    x = 1\n" * 59),
        (too_long_or_mute, '#!/usr/bin/env python\n"""Say."""\n' + "x = 1\n" * 398),
        (house_words, "message = step.obs"),
        (docstrings_with_pronouns, '"""Return the agents of one environment."""'),
        (public_classes_twice, ["class A: ...", "class B: ...\nclass _C: ...", "class _C: ..."]),
        (left_for_later, "METHODOLOGY = 'a todo list'"),
        (swallowed, "try: f()\nexcept Exception as error: print(error)"),
        (swallowed, "try: f()\nexcept Exception as error: raise ValueError('so') from None"),
        (swallowed, "try: f()\nexcept KeyError: x = 1"),
        (endless_waits, "subprocess.run(['x'], timeout=60)"),
        (endless_waits, "process.wait(60)"),
        (endless_waits, "', '.join(names)"),
    ],
)
def test_what_keeps_a_rule_passes(rule, correct):
    assert rule(correct) == []
