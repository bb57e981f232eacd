"""Wrong trainers: the lines of the right one that are replaced, the law that must break, and the words that name it."""

from pathlib import Path

from helpers import mini_trainer

SOURCE = Path(mini_trainer.__file__).read_text()
ENTRY = "                start = tuple(part[:, rows] for part in entry)\n"
CLEAR = "            state = tuple(part * (1 - first_t)[None, :, None] for part in state)\n"
UNROLL = "y, _ = agent.unroll(all_obs[:, rows], firsts[:, rows], start)"
MINIBATCHES = "            for rows in torch.randperm(B).split(B // 2):\n"
ADVANTAGES = "        advantages = gae(rewards, values, next_values, ended)\n"
NEXT_VALUES = "        next_values = torch.where(ended.bool(), next_values, following)\n"
NEXT_TRUNCATED = "                next_values[t] = torch.where(truncated & ~terminated, boot, 0.0)\n"
VALUES_OF = "        following = torch.cat([values[1:], value_of(agent, obs, first, state)[None]])\n"
ACT = "                y, state = agent.unroll(obs[None], first[None], state)\n"
FIRST = "            first = ended[t] = (terminated | truncated).float()\n"
BOOT = "boot = value_of(agent, final, torch.zeros(B), state)"
LOSS = "                loss = policy_loss + 0.5 * 0.5 * ((value - returns[:, rows]) ** 2).mean()\n"

BROKEN = {
    "never clears": ([(CLEAR, "")], "clear", "never cleared"),
    "clears on terminated only": (
        [(FIRST, "            ended[t], first = (terminated | truncated).float(), terminated.float()\n")],
        "clear",
        "cleared on terminated only",
    ),
    "clears on truncated only": (
        [(FIRST, "            ended[t], first = (terminated | truncated).float(), truncated.float()\n")],
        "clear",
        "cleared on truncated only",
    ),
    "clears one step late": (
        [
            (
                FIRST,
                "            late, ended[t] = ended[t - 1] if t else torch.zeros(B), (terminated | truncated).float()\n"
                "            first = late.clone()\n",
            ),
        ],
        "clear",
        "cleared one step late",
    ),
    "flags of the neighbouring environment": (
        [(FIRST, FIRST + "            first = first.roll(1)\n")],
        "clear",
        "flags of other steps or environments",
    ),
    "clears before each rollout": (
        [("        entry = state\n", "        entry = state = tuple(torch.zeros_like(part) for part in state)\n")],
        "carry",
        "cleared before each rollout",
    ),
    "clears before each call": (
        [(ACT, "                y, state = agent.unroll(obs[None], first[None], tuple(0 * part for part in state))\n")],
        "carry",
        "cleared before each call",
    ),
    "state of the neighbouring environment when acting": (
        [(ACT, ACT + "                state = tuple(part.roll(1, 1) for part in state)\n")],
        "carry",
        "another environment or step",
    ),
    "replays from zeros": (
        [(ENTRY, "                start = tuple(0 * part[:, rows] for part in entry)\n")],
        "entry",
        "replayed from zeros",
    ),
    "entry state after the first step": (
        [
            ("        entry = state\n", ""),
            (ACT, ACT + "                entry = state if t == 0 else entry\n"),
        ],
        "entry",
        "stored after the step",
    ),
    "entry state of another environment": (
        [(ENTRY, "                start = tuple(part[:, (rows + 1) % B] for part in entry)\n")],
        "entry",
        "other environments",
    ),
    "entry state of the rollout before": (
        [
            ("        entry = state\n", "        entry, old = old, state\n"),
            ("    for _ in range(UPDATES):\n", "    old = state\n    for _ in range(UPDATES):\n"),
        ],
        "entry",
        "replayed from zeros",
    ),
    "replays without clearing": (
        [(UNROLL, "y, _ = agent.unroll(all_obs[:, rows], 0 * firsts[:, rows], start)")],
        "clear",
        "replayed without clearing",
    ),
    "replays in one call without clearing": (
        [(UNROLL, "y, _ = agent.lstm(agent.encoder(all_obs[:, rows]), start)")],
        "clear",
        "replayed without clearing",
    ),
    "time and environments swapped in the update": (
        [(UNROLL, "y, _ = agent.lstm(agent.encoder(all_obs[:, rows].transpose(0, 1)), None); y = y.transpose(0, 1)")],
        "entry",
        "time and batch are swapped",
    ),
    "shuffles steps": (
        [
            (
                UNROLL,
                "mix = torch.randperm(T); y, _ = agent.unroll(all_obs[mix][:, rows], firsts[mix][:, rows], start); "
                "y = y[mix.argsort()]",
            )
        ],
        "entry",
        "steps are shuffled",
    ),
    "scaled outputs in the update": (
        [("policy, value = agent.heads(y)\n", "policy, value = agent.heads(0.9 * y)\n")],
        "replay",
        "between the memory and the head",
    ),
    "other inputs of the critic in the update": (
        [("policy, value = agent.heads(y)\n", "policy, value = agent.heads(y)[0], agent.heads(y + 0.1)[1]\n")],
        "replay",
        "values of inputs unlike",
    ),
    "other heads in the update": (
        [
            (
                UNROLL,
                "b = agent.critic.bias.data; " + UNROLL + "; b += 0.125",
            ),
            ("                loss.backward()\n", "                loss.backward(); b -= 0.125\n"),
        ],
        "replay",
        "must be that of the rollout",
    ),
    "other gates in the update": (
        [(UNROLL, "w = agent.lstm.weight_ih_l0.data; old = w.clone(); w *= 1.1; " + UNROLL + "; w.copy_(old)")],
        "replay",
        "another output",
    ),
    "trains a step twice": (
        [
            (
                MINIBATCHES,
                "            for rows in torch.cat([torch.randperm(B), torch.zeros(2).long()]).split(B // 2):\n",
            )
        ],
        "once",
        "most steps 2 times",
    ),
    "drops environments": (
        [(MINIBATCHES, "            for rows in torch.arange(B - 1).split(B // 2):\n")],
        "once",
        "0 times",
    ),
    "bootstraps from the reset observation": (
        [(NEXT_TRUNCATED, "                boot = value_of(agent, obs, first, state)\n" + NEXT_TRUNCATED)],
        "bootstrap",
        "first observation of the next episode",
    ),
    "truncation as termination": ([(NEXT_TRUNCATED, "")], "bootstrap", "treated as a termination"),
    "termination bootstrapped": (
        [(NEXT_VALUES, "        next_values = following\n")],
        "bootstrap",
        "values after terminations",
    ),
    "bootstrap 0 at the rollout's end": (
        [(VALUES_OF, "        following = torch.cat([values[1:], torch.zeros(1, B)])\n")],
        "bootstrap",
        "values at the ends of rollouts",
    ),
    "final observation with a cleared state": (
        [(BOOT, "boot = value_of(agent, final, torch.ones(B), state)")],
        "bootstrap",
        "cleared too early",
    ),
    "both flags bootstrapped": (
        [("torch.where(truncated & ~terminated, boot, 0.0)", "torch.where(truncated, boot, 0.0)")],
        "bootstrap",
        "values after terminations",
    ),
    "advantages across ends": (
        [(ADVANTAGES, "        advantages = gae(rewards, values, following, 0 * ended)\n")],
        "bootstrap",
        "run on into the next episode",
    ),
    "advantages off by one": (
        [(ADVANTAGES, ADVANTAGES + "        advantages = advantages.roll(1, 0)\n")],
        "advantage",
        "one step late",
    ),
    "rewards off by one": (
        [(ADVANTAGES, "        advantages = gae(rewards.roll(1, 0), values, next_values, ended)\n")],
        "advantage",
        "rewards are one step late",
    ),
    "another lambda": (
        [("LAMBDA = 12, 2, 2, 0.99, 0.95", "LAMBDA = 12, 2, 2, 0.99, 0.9")],
        "advantage",
        "lambda=0.9:",
    ),
    "update writes the state": (
        [
            (
                "                optimizer.step()\n",
                "                optimizer.step()\n"
                "                state[0][:, :4], state[1][:, :4] = (x.data for x in _)\n",
            )
        ],
        "carry",
        "between rollouts, writes the state",
    ),
    "value call writes the state": (
        [
            (
                VALUES_OF,
                VALUES_OF + "        _, state = agent.unroll(obs[None], first[None], state)\n"
                "        state = tuple(part.data for part in state)\n",
            )
        ],
        "pure",
        "changes the state of the rollout",
    ),
    "value call ignores starts": (
        [("value_of(agent, obs, first, state)[None]", "value_of(agent, obs, 0 * first, state)[None]")],
        "pure",
        "ignores that an episode starts",
    ),
    "normalizes in the update only": (
        [(UNROLL, UNROLL.replace("all_obs", "(all_obs / all_obs.std())"))],
        "replay",
        "inputs are normalized",
    ),
    "learns": (
        [("lr=0.0", "lr=0.1")],
        "weights",
        "set the learning rate to 0",
    ),
}


def broken_trainer(name):
    """Return the `train` of a wrong trainer."""
    return changed_trainer(name, BROKEN[name][0])


def changed_trainer(name, replacements):
    """Replace lines of the right trainer, each of which must be there once, and return its `train`."""
    text = SOURCE
    for old, new in replacements:
        assert text.count(old) == 1, (name, old, text.count(old))
        text = text.replace(old, new)
    namespace = {"__name__": f"changed trainer: {name}"}
    exec(compile(text, f"<{name}>", "exec"), namespace)
    return namespace["train"]
