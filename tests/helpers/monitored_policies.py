"""Scripted worlds with invalid steps, policies of every kind, and a world with an on_step callback."""

import copy

import torch

from helpers.component_graphs import SMALL
from helpers.manual_policy import NewLSTMPolicy
from helpers.small_policy import SPEC, Small, make_small
from holdfast.check.adapters.holdfast import ScriptedWorld
from holdfast.check.script import write_script
from holdfast.memory import GRU, LSTM, MultiCell
from holdfast.policies import ComponentPolicy
from holdfast.policies.components.graph import parse_graph
from holdfast.rollout import Collector
from holdfast.worlds import make_world

T = 8
SEVERAL = SMALL.replace(
    "  _action_: {component: Linear, sources: [_core_]",
    "  aside: {component: Memory, sources: [seen], cell: gru, hidden_size: 5, num_layers: 1}\n"
    "  both: {component: Concat, sources: [_core_, aside]}\n"
    "  late: {component: Memory, sources: [both], cell: lstm, hidden_size: 4, num_layers: 1}\n"
    "  _action_: {component: Linear, sources: [late]",
)


class Bundled(Small):
    """Calls two memories as one."""

    def __init__(self, **options):
        torch.manual_seed(1)
        super().__init__(memory=MultiCell({"a": LSTM(7, 10), "b": GRU(5, 6)}), **options)


def hand_written(**options):
    torch.manual_seed(0)
    return NewLSTMPolicy(SPEC, **options)


def graph(text=SEVERAL, **options):
    torch.manual_seed(0)
    return ComponentPolicy(make_world("recall", agents=1).spec, parse_graph(text), **options)


POLICIES = {
    "lstm": make_small,
    "gru": lambda **options: make_small(memory="gru", **options),
    "minlstm": lambda **options: make_small(memory="minlstm", **options),
    "written by hand": hand_written,
    "bundled": lambda **options: make_small(Bundled, **options),
    "graph": graph,
}


def scripted(agents=6, steps=80, starts=0.2, absences=True, seed=0):
    """A world of drawn observations in which episodes begin anywhere, and agents may be away."""

    def imagine(size, generator):
        return torch.randn(*size, 5, generator=generator)

    def idle(size, generator):
        return torch.zeros(size, dtype=torch.long)

    script = write_script(imagine, agents, steps, share_of_starts=starts, absences=absences, act=idle, seed=seed)
    return ScriptedWorld(SPEC, script)


def world_for(policy, **options):
    """A world that a policy can see, with agents that come and go."""
    if isinstance(policy, ComponentPolicy):
        return make_world("ragged", agents=options.get("agents", 6), delay=(0, 4))
    return scripted(**options)


def stored(policy, world=None, rollouts=2, segments=2, **options):
    """Collect some rollouts and return the last one."""
    collector = Collector(world or world_for(policy, **options), policy, length=segments * T, horizon=T, seed=0)
    return [copy.deepcopy(collector.rollout(version)) for version in range(rollouts)][-1]


class Overheard:
    """A world that calls on_step with every step before the policy acts."""

    def __init__(self, world, hear):
        self.world, self.hear, self.agents, self.spec = world, hear, world.agents, world.spec

    def reset(self):
        return self.notify(self.world.reset())

    def step(self, actions):
        return self.notify(self.world.step(actions))

    def notify(self, step):
        self.hear(step)
        return step
