"""PPO of TorchRL's parts: its collector, primer, GAE and `ClipPPOLoss`, with an LSTM that actor and critic share."""

from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector  # pyright: ignore[reportMissingImports]
from torchrl.envs import Compose, InitTracker, TransformedEnv  # pyright: ignore[reportMissingImports]
from torchrl.modules import (  # pyright: ignore[reportMissingImports]
    ActorValueOperator,
    LSTMModule,
    ProbabilisticActor,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import ClipPPOLoss  # pyright: ignore[reportMissingImports]
from torchrl.objectives.value import GAE  # pyright: ignore[reportMissingImports]

STEPS, UPDATES, EPOCHS, MINIBATCHES, HIDDEN = 16, 3, 2, 2, 16


def train(envs: Any) -> None:
    """Train with learning rate 0."""
    torch.manual_seed(0)
    lstm = LSTMModule(input_size=envs.observation_spec["observation"].shape[-1], hidden_size=HIDDEN, **_KEYS)
    logits = TensorDictModule(nn.Linear(HIDDEN, envs.action_spec.n), in_keys=["embed"], out_keys=["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    model = ActorValueOperator(lstm, actor, ValueOperator(nn.Linear(HIDDEN, 1), in_keys=["embed"]))
    policy, critic = model.get_policy_operator(), model.get_value_operator()
    env = TransformedEnv(envs, Compose(InitTracker(), lstm.make_tensordict_primer()))
    rows = envs.num_envs
    collector = Collector(env, policy, frames_per_batch=rows * STEPS, total_frames=rows * STEPS * UPDATES)
    # Values of recurrent networks are computed one after the other, as its documentation asks.
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False, deactivate_vmap=True)
    loss = ClipPPOLoss(policy, critic, loss_critic_type="l2", critic_coeff=1.0, entropy_bonus=False)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.0)
    with set_recurrent_mode(False):
        for data in collector:
            with set_recurrent_mode(True):
                for _ in range(EPOCHS):
                    with torch.no_grad():
                        data = advantage(data)
                    for part in torch.randperm(rows).chunk(MINIBATCHES):
                        losses = loss(data[part])
                        optimizer.zero_grad()
                        (losses["loss_objective"] + losses["loss_critic"]).backward()
                        optimizer.step()
    collector.shutdown()


_KEYS = {"in_key": "observation", "out_key": "embed"}
