"""A world whose numbers identify agent and step, and a policy that reads it."""

import torch
from torch import nn

from holdfast.policies import PolicyOutput, RecurrentPolicy
from holdfast.worlds import Step, WorldSpec

FLAGS = ("terminated", "truncated", "first", "valid", "trial")


class Scripted:
    """Returns steps from tables; observation and reward are 1000 * agent + step.

    A table is `[A,S]`; `first` is true at step 0 and with every end unless it is given. The last
    observation of a truncated episode is the number of the step minus a half.
    """

    def __init__(self, agents, steps, truncates="always", **tables):
        self.agents = agents
        self.spec = WorldSpec(obs_shape=(1,), action_names=("a", "b", "c"), truncates=truncates)
        none = torch.zeros(agents, steps, dtype=torch.bool)
        self.tables = {"terminated": none, "truncated": none, "trial": none, "valid": ~none} | tables
        ended = self.tables["terminated"] | self.tables["truncated"]
        self.tables.setdefault("first", ended | (torch.arange(steps) == 0))

    def number(self, t):
        return 1000.0 * torch.arange(self.agents) + t

    def say(self):
        number = self.number(self.t)
        flags = {flag: self.tables[flag][:, self.t] for flag in FLAGS}
        return Step(obs=number[:, None], reward=number, last_obs=number[:, None] - 0.5, **flags)

    def reset(self):
        self.t, self.actions = 0, []
        return self.say()

    def step(self, actions):
        self.actions.append(actions.clone())
        self.t += 1
        return self.say()


def random_script(agents, steps, seed, ends=0.15, gone=0.2):
    """A world with terminations, truncations and invalid rows."""
    generator = torch.Generator().manual_seed(seed)

    def flags(share):
        return torch.rand(agents, steps, generator=generator) < share

    tables = {"terminated": flags(ends), "truncated": flags(ends), "valid": ~flags(gone)}
    tables["terminated"][:, 0] = tables["truncated"][:, 0] = False
    return Scripted(agents, steps, **tables)


class Reader(RecurrentPolicy):
    """A recurrent policy that distinguishes numbers like 2007 and 2008."""

    def __init__(self, spec=None, hidden_size=6, num_layers=2, **memory):
        super().__init__(5, hidden_size, num_layers, **memory)
        self.outwards = nn.Linear(hidden_size, 4, bias=False)

    def encode(self, obs):
        step, agent = obs % 1000, obs // 1000
        inputs = [2 * torch.sin(step), 2 * torch.cos(step / 3), step / 20, agent / 3, torch.cos(agent)]
        return torch.cat(inputs, dim=1).to(self.outwards.weight.dtype)

    def decode(self, features):
        out = self.outwards(features)
        return PolicyOutput(4 * out[:, :3], out[:, 3])


def make_reader(seed=0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Reader(**options)
