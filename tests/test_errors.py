"""Where errors of user code were raised, and the file that keeps their tracebacks."""

import json
from pathlib import Path

import pytest

import holdfast.errors
from holdfast.errors import ConfigError, ContractError, WorkerError, located_error_text, recording_errors, with_note
from holdfast.state_tree import get_field


def error_of(call, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call(*args)
    return caught.value


def test_place_is_the_innermost_line_of_the_users_own_code():
    def own():
        raise ValueError("bad\n thing")

    line = own.__code__.co_firstlineno + 1
    assert located_error_text(error_of(own)) == f"ValueError: bad thing (test_errors.py:{line})"

    def through_the_standard_library():
        json.loads("{")

    line = through_the_standard_library.__code__.co_firstlineno + 1
    assert located_error_text(error_of(through_the_standard_library)).endswith(f" (test_errors.py:{line})")


def test_place_without_a_frame_of_user_code():
    assert located_error_text(ValueError("bad")) == "ValueError: bad"
    # Of an installed package alone.
    installed = error_of(json.loads, "{")
    installed.__traceback__ = installed.__traceback__.tb_next.tb_next
    assert located_error_text(installed).rpartition(" (")[2].startswith("decoder.py:")
    # Our own lines say nothing to a user.
    ours = error_of(get_field, {}, "x", int)
    while ours.__traceback__.tb_next:
        ours.__traceback__ = ours.__traceback__.tb_next
    assert not located_error_text(ours).endswith(")")


def test_a_package_whose_name_starts_like_ours_is_the_users(tmp_path):
    file = Path(holdfast.errors.__file__).parent.with_name("holdfast_envs") / "env.py"
    code = compile("def step():\n    raise ValueError('bad')\n", str(file), "exec")
    names = {}
    exec(code, names)
    assert located_error_text(error_of(names["step"])).endswith("(env.py:2)")


def fails(kind, cause=None, note="", message="It fails."):
    error = kind(message)
    raise (with_note(error, note) if note else error) from cause


def test_tracebacks_are_appended_and_the_message_names_the_file(tmp_path):
    file = tmp_path / "error.txt"
    cause = error_of(json.loads, "{")
    for number, args in enumerate(((ContractError, cause), (WorkerError, None, "in _step")), 1):
        with pytest.raises(ContractError) as caught, recording_errors(lambda: file):
            fails(*args)
        assert str(caught.value) == f"It fails. Its traceback is in {file}."
        assert file.read_text().count("It fails.") == number
    first, second, end = file.read_text().split("\n\n")
    assert first.startswith("It fails.\nTraceback (most recent call last):\n")
    assert "JSONDecodeError" in first.splitlines()[-1]
    assert (second, end) == ("It fails.\nin _step", "")


def test_errors_without_foreign_code_leave_no_file(tmp_path):
    file = tmp_path / "error.txt"
    for kind, cause in ((ContractError, None), (WorkerError, None), (ConfigError, ValueError("x"))):
        with pytest.raises(kind, match=r"^It fails\.$"), recording_errors(lambda: file):
            fails(kind, cause)
    assert not file.exists()


def test_file_that_cannot_be_written_is_named(tmp_path):
    message = r"It fails\. Its traceback could not be written to .*: "
    with pytest.raises(ContractError, match=message), recording_errors(lambda: tmp_path):
        fails(ContractError, ValueError("x"))


def test_exceptions_of_other_code_than_ours_become_one_line(tmp_path):
    file = tmp_path / "error.txt"
    line = r"^The policy, or code that it calls, raised ValueError: bad \(test_errors.py:\d+\)\. Its traceback is in "
    with pytest.raises(ContractError, match=line), recording_errors(lambda: file):
        fails(ValueError, None, message="bad")
    assert file.read_text().splitlines()[-2].endswith("ValueError: bad")
