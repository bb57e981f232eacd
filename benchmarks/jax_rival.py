"""The rival of `holdfast bench train`: recurrent PPO on the world Echo, one jitted JAX program for a whole iteration.

Usage: python benchmarks/jax_rival.py AGENTS MINIBATCHES [float32|bfloat16]

The same network (2 -> 128 -> 128 -> LSTM 128 -> 2 + 1), segments of 64 steps, one epoch, GAE, clipping and Adam. States
are zeroed where an episode starts. Products are in the given precision; weights, states and sums in float32.
"""

import json
import sys
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

WAIT, STEPS, HIDDEN, WIDTH = 8, 64, 128, 128
GAMMA, LAMBDA, CLIP, ENTROPY, RATE, MAX_NORM = 0.9, 0.8, 0.1, 0.02, 1e-3, 0.5


class World(NamedTuple):
    """The bit to remember, the steps left until the query, and whether an episode starts."""

    bit: jax.Array
    left: jax.Array
    first: jax.Array


class Transition(NamedTuple):
    """A step of all agents; reward and end are those of its action."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    first: jax.Array
    end: jax.Array


def layer(key, inputs, outputs, scale=1.0):
    size = max(inputs, outputs)
    return {"w": random.orthogonal(key, size)[:inputs, :outputs] * scale, "b": jnp.zeros(outputs)}


def make_weights(key):
    keys = random.split(key, 6)
    sizes = {"in1": (2, WIDTH), "in2": (WIDTH, WIDTH), "x": (WIDTH, 4 * HIDDEN), "h": (HIDDEN, 4 * HIDDEN)}
    weights = {name: layer(each, *size) for each, (name, size) in zip(keys, sizes.items(), strict=False)}
    return weights | {"out": layer(keys[4], HIDDEN, 3, 0.01)}


def product(x, weight, dtype):
    return lax.dot_general(
        x.astype(dtype), weight.astype(dtype), (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


def encode(weights, obs, dtype):
    x = jax.nn.relu(product(obs, weights["in1"]["w"], dtype) + weights["in1"]["b"])
    x = jax.nn.relu(product(x, weights["in2"]["w"], dtype) + weights["in2"]["b"])
    return product(x, weights["x"]["w"], dtype) + weights["x"]["b"] + weights["h"]["b"]


def remember(weights, gates, state, first, dtype):
    h, c = (jnp.where(first[:, None], 0.0, part) for part in state)
    i, f, g, o = jnp.split(gates + product(h, weights["h"]["w"], dtype), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def decode(weights, h):
    out = h @ weights["out"]["w"] + weights["out"]["b"]
    return jax.nn.log_softmax(out[..., :2]), out[..., 2]


def observe(world):
    return jnp.stack([jnp.where(world.first, 2.0 * world.bit - 1, 0.0), world.left == 0], axis=-1)


def act(weights, dtype, carry, keys):
    world, state = carry
    obs = observe(world)
    state = remember(weights, encode(weights, obs, dtype), state, world.first, dtype)
    log_probs, value = decode(weights, state[0])
    action = (random.uniform(keys[0], value.shape) > jnp.exp(log_probs[:, 0])).astype(jnp.int32)
    query = world.left == 0
    bit = jnp.where(query, random.bernoulli(keys[1], 0.5, query.shape).astype(jnp.int32), world.bit)
    log_prob = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
    step = Transition(obs, action, log_prob, value, (query & (action == world.bit)) * 1.0, world.first, query)
    return (World(bit, jnp.where(query, WAIT, world.left - 1), query), state), step


def advantages(steps, last):
    def back(carry, step):
        advantage, following = carry
        goes_on = GAMMA * (1.0 - step.end)
        advantage = step.reward + goes_on * following - step.value + LAMBDA * goes_on * advantage
        return (advantage, step.value), advantage

    return lax.scan(back, (jnp.zeros_like(last), last), steps, reverse=True)[1]


def loss(weights, dtype, entry, steps, advantage):
    gates = encode(weights, steps.obs, dtype)

    def step(state, inputs):
        state = remember(weights, inputs[0], state, inputs[1], dtype)
        return state, state[0]

    log_probs, value = decode(weights, lax.scan(step, entry, (gates, steps.first))[1])
    log_prob = jnp.take_along_axis(log_probs, steps.action[..., None], -1)[..., 0]
    ratio = jnp.exp(log_prob - steps.log_prob)
    normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = -jnp.minimum(ratio * normal, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normal).mean()
    critic = 0.5 * jnp.square(value - advantage - steps.value).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return policy + 0.5 * critic - ENTROPY * entropy, jnp.abs(ratio - 1).max()


def adam(weights, moments, grads, count):
    norm = jnp.sqrt(sum(jnp.square(grad).sum() for grad in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda grad: grad * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), grads)
    mean = jax.tree.map(lambda m, grad: 0.9 * m + 0.1 * grad, moments[0], grads)
    square = jax.tree.map(lambda v, grad: 0.999 * v + 0.001 * grad * grad, moments[1], grads)
    rate, scale = RATE / (1 - 0.9**count), 1 / (1 - 0.999**count)
    new = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v * scale) + 1e-8), weights, mean, square)
    return new, (mean, square)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def iterate(minibatches, dtype, training):
    key, weights, moments, count, world, state = training
    key, for_steps, for_order = random.split(key, 3)
    entry = state
    keys = random.split(for_steps, (STEPS, 2))
    (world, state), steps = lax.scan(partial(act, weights, dtype), (world, state), keys)
    last = decode(weights, remember(weights, encode(weights, observe(world), dtype), state, world.first, dtype)[0])[1]
    advantage = advantages(steps, last)

    def update(carry, rows):
        weights, moments, count = carry
        part = jax.tree.map(lambda x: x[:, rows], (steps, advantage))
        entries = jax.tree.map(lambda x: x[rows], entry)
        (_, error), grads = jax.value_and_grad(loss, has_aux=True)(weights, dtype, entries, *part)
        weights, moments = adam(weights, moments, grads, count + 1)
        return (weights, moments, count + 1), error

    order = random.permutation(for_order, len(world.bit)).reshape(minibatches, -1)
    (weights, moments, count), errors = lax.scan(update, (weights, moments, count), order)
    measured = steps.reward.sum() / steps.end.sum(), errors[0]
    return (key, weights, moments, count, world, state), measured


def main(agents, minibatches, precision="bfloat16", seconds=3.0):
    """Measure steps a second; print them as one JSON object."""
    key, dtype = random.key(0), jnp.dtype(precision).type
    weights = make_weights(key)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    world = World(jnp.zeros(agents, jnp.int32), jnp.full(agents, WAIT), jnp.ones(agents, bool))
    state = jnp.zeros((agents, HIDDEN)), jnp.zeros((agents, HIDDEN))
    training = key, weights, (zeros, jax.tree.map(jnp.zeros_like, weights)), jnp.zeros(()), world, state
    start = time.perf_counter()
    for _ in range(5):
        # Compiled twice: the first result has other layouts than what it started from.
        training, measured = jax.block_until_ready(iterate(minibatches, dtype, training))
    compiled, rates, begin = time.perf_counter() - start, [], time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - begin < seconds:
        last = time.perf_counter()
        for _ in range(5):
            training, measured = iterate(minibatches, dtype, training)
        jax.block_until_ready(training)
        rates.append(5 * agents * STEPS / (time.perf_counter() - last))
    rates = sorted(rates)
    result = {
        "steps_per_second": rates[len(rates) // 2],
        "spread": [rates[0], rates[-1]],
        "agents": agents,
        "minibatches": minibatches,
        "precision": precision,
        "return": float(measured[0]),
        "replay_error": float(measured[1]),
        "compile_seconds": compiled,
        "jax": jax.__version__,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4])
