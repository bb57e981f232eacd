"""What the interpreter cannot show: kernels compile for a GPU, fit its shared memory, and synchronize."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

SHARED_MEMORY = 232_448
"""Bytes of shared memory per program on an H100 or H200."""

COMPILE = """
import json, sys, torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from holdfast.memory.kernels import gru, lstm, ops
from holdfast.memory.kernels.ops import LaunchLayout, LaunchPlan

SIXTEEN = "x w y h_prev gates dy dgates bias".split()
FLOATS = "h_in c_in cells h_out c_out dh_out dc_out dh_in dc_in".split()
TYPES = dict.fromkeys(SIXTEEN, "*bf16") | dict.fromkeys(FLOATS, "*fp32") | {"code": "*u8", "counters": "*i32"}
ops.processors_of = lambda device: 132

def compiled(kernel, hidden, plan, **more):
    layout = LaunchLayout(torch.empty(64, 8, 0, dtype=torch.bfloat16), hidden, plan, "tf32")
    settings = {**layout.settings, **more, "COOPERATIVE": layout.splits > 1, "APPROX": True}
    options = {key: settings.pop(key) for key in ("num_warps", "num_stages")}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in settings else TYPES.get(name, "i32") for name in names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name][0] == "*"}
    source = ASTSource(kernel, signature, settings, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = kernel.asm["ptx"]
    words = ("ld.volatile", "ld.acquire.gpu", ".global.gpu.release", "tanh.approx", "cp.async", "mma")
    return {"shared": kernel.metadata.shared, **{word: word in ptx for word in words}}

back = {"GRAD_OUT": False, "ENTRY_GRAD": False}
print(json.dumps({
    "split forward": compiled(lstm.forward, 144, LaunchPlan(16, 32, 4, chunk=256), SAVE=True),
    "split backward": compiled(gru.backward, 128, LaunchPlan(16, 32, 4), **back),
    "streamed forward": compiled(gru.forward, 512, LaunchPlan(64, 64, 8, chunk=64, stages=3), SAVE=True),
    "unsplit backward": compiled(lstm.backward, 128, LaunchPlan(16, 128, 8), **back),
}))
"""


@pytest.fixture(scope="module")
def compiled():
    """Compile in another process: in this one Triton interprets."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout)


def test_kernels_fit_shared_memory_and_use_tensor_cores(compiled):
    assert all(kernel["shared"] <= SHARED_MEMORY for kernel in compiled.values())
    assert all(kernel["mma"] for kernel in compiled.values())
    # The GRU's backward pass needs no tanh.
    assert {name for name, kernel in compiled.items() if not kernel["tanh.approx"]} == {"split backward"}


def test_split_programs_wait_for_exchanged_values(compiled):
    polls = {name: kernel["ld.volatile"] for name, kernel in compiled.items()}
    words = ("ld.acquire.gpu", ".global.gpu.release")
    counters = {name: all(kernel[word] for word in words) for name, kernel in compiled.items()}
    assert polls["split forward"]
    assert not counters["split forward"]
    assert counters["split backward"]
    assert counters["streamed forward"]
    assert not counters["unsplit backward"]
    assert not polls["unsplit backward"]


def test_only_streamed_weights_are_prefetched(compiled):
    assert {name for name, kernel in compiled.items() if kernel["cp.async"]} == {"streamed forward"}
