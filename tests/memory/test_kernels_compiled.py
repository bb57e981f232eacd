"""What the interpreter cannot show: the kernels compile for a GPU, fit its chip, and wait for each other."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ROOM = 232_448
"""Bytes of shared memory of one program on an H100 or H200."""

COMPILE = """
import json, sys, torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from holdfast.memory.kernels import gru, launch, lstm
from holdfast.memory.kernels.launch import Layout, Plan

SIXTEEN = "x w y entered gates dy dgates bias".split()
FLOATS = "h_in c_in cells h_out c_out dh_out dc_out dh_in dc_in".split()
KINDS = dict.fromkeys(SIXTEEN, "*bf16") | dict.fromkeys(FLOATS, "*fp32") | {"code": "*u8", "counters": "*i32"}
launch.processors_of = lambda device: 132

def compiled(kernel, hidden, plan, **more):
    layout = Layout(torch.empty(64, 8, 0, dtype=torch.bfloat16), hidden, plan, "tf32")
    settings = {**layout.settings, **more, "TOGETHER": layout.parts > 1, "APPROX": True}
    options = {key: settings.pop(key) for key in ("num_warps", "num_stages")}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in settings else KINDS.get(name, "i32") for name in names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name][0] == "*"}
    source = ASTSource(kernel, signature, settings, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    words = ("ld.volatile", "ld.acquire.gpu", "atom.global.gpu.release", "tanh.approx", "cp.async", "mma")
    return {"shared": made.metadata.shared, **{word: word in ptx for word in words}}

back = {"LATER": False, "ENTRY": False}
print(json.dumps({
    "split forward": compiled(lstm.forward, 144, Plan(16, 32, 4, chunk=256), KEEP=True),
    "split backward": compiled(gru.backward, 128, Plan(16, 32, 4), **back),
    "streamed forward": compiled(gru.forward, 512, Plan(64, 64, 8, chunk=64, stages=3), KEEP=True),
    "whole backward": compiled(lstm.backward, 128, Plan(16, 128, 8), **back),
}))
"""


@pytest.fixture(scope="module")
def compiled():
    """Compile in a process of its own: here Triton interprets."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


def test_kernels_fit_the_chip_and_multiply_in_its_matrix_units(compiled):
    assert all(made["shared"] <= ROOM for made in compiled.values())
    assert all(made["mma"] for made in compiled.values())
    # The GRU's way back needs no hyperbolic tangent.
    assert {name for name, made in compiled.items() if not made["tanh.approx"]} == {"split backward"}


def test_programs_that_split_a_layer_wait_for_what_others_hand_over(compiled):
    reads_again = {name: made["ld.volatile"] for name, made in compiled.items()}
    both = ("ld.acquire.gpu", "atom.global.gpu.release")
    counts = {name: all(made[word] for word in both) for name, made in compiled.items()}
    assert reads_again["split forward"]
    assert not counts["split forward"]
    assert counts["split backward"]
    assert counts["streamed forward"]
    assert not counts["whole backward"]
    assert not reads_again["whole backward"]


def test_only_what_is_streamed_is_copied_ahead(compiled):
    assert {name for name, made in compiled.items() if made["cp.async"]} == {"streamed forward"}
