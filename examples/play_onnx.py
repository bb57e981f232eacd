"""Run an exported policy with NumPy and onnxruntime alone: `python play_onnx.py policy.onnx`."""

import sys

import numpy as np
import onnxruntime

KINDS = {"tensor(uint8)": np.uint8, "tensor(float)": np.float32, "tensor(bool)": np.bool_}

policy = onnxruntime.InferenceSession(sys.argv[1])
agents, steps, random = 4, 20, np.random.default_rng(0)
inputs = {node.name: ((agents, *node.shape[1:]), KINDS[node.type]) for node in policy.get_inputs()}
names = [node.name for node in policy.get_outputs()]
state = {name: np.zeros(*kind) for name, kind in inputs.items() if name.endswith("_in")}
first = np.ones(agents, dtype=bool)  # the first observation of every agent starts an episode
for _ in range(steps):
    obs = random.integers(0, 256, inputs["obs"][0]).astype(inputs["obs"][1])  # from your environment
    outputs = dict(zip(names, policy.run(None, {"obs": obs, "first": first, **state}), strict=True))
    state = {name: outputs[name.removesuffix("_in") + "_out"] for name in state}  # carried to the next step
    actions = outputs["logits"].argmax(-1)
    first = random.random(agents) < 0.1  # from your environment: true where an episode starts
    print(actions, outputs["value"].round(3))
