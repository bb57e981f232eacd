"""`import holdfast` imports nothing heavy; public names are imported when they are used."""

import subprocess
import sys

import pytest

import holdfast

OPTIONAL = (
    "envpool huggingface_hub matplotlib mettagrid onnx onnxruntime onnxscript pettingzoo popgym tensorboard wandb"
)


def run(code):
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_import_holdfast_is_light():
    code = "import holdfast, sys; print({'torch', 'numpy', 'gymnasium', 'tensordict', 'yaml'} & {*sys.modules})"
    assert run(code) == "set()"


def test_public_names_import_no_optional_package():
    code = (
        "import holdfast, sys\n"
        "for name in dir(holdfast): getattr(holdfast, name)\n"
        f"print({{*{OPTIONAL.split()}}} & {{*sys.modules}})"
    )
    assert run(code) == "set()"


def test_check_and_train_are_functions_after_submodules_were_imported():
    # Each in its own process, forked after the imports that take long.
    code = (
        "import importlib, inspect, os, gymnasium, tensordict, torch\n"
        "for first in ('holdfast.check.results', 'holdfast.training.train', 'holdfast.cli'):\n"
        "    if child := os.fork():\n"
        "        assert os.waitpid(child, 0)[1] == 0, first\n"
        "        continue\n"
        "    importlib.import_module(first)\n"
        "    import holdfast, holdfast.check\n"
        "    print(inspect.isfunction(holdfast.check), inspect.isfunction(holdfast.train))\n"
        "    from holdfast import check, train\n"
        "    print(inspect.isfunction(check), inspect.isfunction(train), flush=True)\n"
        "    os._exit(0)\n"
    )
    assert run(code).split() == ["True"] * 12


def test_public_names_resolve_and_unknown_ones_raise():
    assert {*holdfast.__all__, "__version__"} < set(dir(holdfast))
    assert all(getattr(holdfast, name) is not None for name in dir(holdfast))
    assert holdfast.policies.make_policy is holdfast.make_policy
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'chek'"):
        holdfast.chek  # noqa: B018
