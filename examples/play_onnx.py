"""Run an exported policy with NumPy and onnxruntime alone: `python play_onnx.py policy.onnx`."""

import sys

import numpy as np
import onnxruntime

if len(sys.argv) != 2:
    sys.exit("usage: python play_onnx.py policy.onnx; holdfast export runs/NAME --to onnx writes such a file")
policy = onnxruntime.InferenceSession(sys.argv[1])
agents, steps, random = 4, 20, np.random.default_rng(0)
kinds = {"tensor(float)": "float32", "tensor(double)": "float64"}  # others are named as in NumPy: tensor(uint8)
inputs = {i.name: np.zeros((agents, *i.shape[1:]), kinds.get(i.type, i.type[7:-1])) for i in policy.get_inputs()}
names = [node.name for node in policy.get_outputs()]
observed = [name for name in inputs if name.split(".")[0] == "obs"]  # obs, or obs.image and so on of a Dict
state = {name: zeros for name, zeros in inputs.items() if name.endswith("_in") and name not in observed}
first = np.ones(agents, dtype=bool)  # the first observation of every agent starts an episode
for _ in range(steps):
    obs = {name: random.integers(0, 2, inputs[name].shape).astype(inputs[name].dtype) for name in observed}  # yours
    flags = {name: first for name in ("first", "trial") if name in inputs}  # a trial starts with an episode, too
    outputs = dict(zip(names, policy.run(None, {**obs, **flags, **state}), strict=True))
    state = {name: outputs[name.removesuffix("_in") + "_out"] for name in state}  # carried to the next step
    actions = outputs["action"]  # the greedy one, in the action space; to sample, see docs/guides/play_and_export.md
    first = random.random(agents) < 0.1  # from your environment: true where an episode starts
    print(actions, outputs["value"].round(3))
