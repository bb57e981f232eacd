"""Run an exported policy with NumPy and onnxruntime alone: `python play_onnx.py policy.onnx`."""

import sys

import numpy as np
import onnxruntime

KINDS = {"tensor(uint8)": np.uint8, "tensor(float)": np.float32, "tensor(bool)": np.bool_}

policy = onnxruntime.InferenceSession(sys.argv[1])
agents, steps, random = 4, 20, np.random.default_rng(0)
inputs = {each.name: ((agents, *each.shape[1:]), KINDS[each.type]) for each in policy.get_inputs()}
outputs = [each.name for each in policy.get_outputs()]
memory = {name: np.zeros(*kind) for name, kind in inputs.items() if name.endswith("_in")}
first = np.ones(agents, dtype=bool)  # every agent's first observation opens an episode
for _ in range(steps):
    obs = random.integers(0, 256, inputs["obs"][0]).astype(inputs["obs"][1])  # here your world speaks
    said = dict(zip(outputs, policy.run(None, {"obs": obs, "first": first, **memory}), strict=True))
    memory = {name: said[name.removesuffix("_in") + "_out"] for name in memory}  # carried to the next step
    actions = said["logits"].argmax(-1)
    first = random.random(agents) < 0.1  # here your world says who starts anew
    print(actions, said["value"].round(3))
