import pytest
import torch

from helpers.oracles import FAR, Gathers, arena_return_at_most, steps_to
from helpers.play_world import anything, live, returns_of, stacked
from holdfast.worlds import make_world
from holdfast.worlds.builtin.arena import AGENTS_PER_MAP, VIEW

SIZE = 14
WIDTH = SIZE + 2 * VIEW
MOVES = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]


class Slowly:
    """The same arena, agent by agent and cell by cell, as a person would write it."""

    def __init__(self, world):
        self.walls = (world._ground != 0).unflatten(1, (WIDTH, WIDTH)).tolist()
        self.grows = (world._fresh > 0).unflatten(1, (WIDTH, WIDTH)).tolist()
        self.regrow, self.clock = world.regrow, 0

    def begin(self, where, maps):
        """Put the agents of some maps on their cells, where everything is ripe."""
        if not self.clock:
            self.at, self.taken_at = list(where), {}
        for agent in (agent for agent in range(len(where)) if agent // AGENTS_PER_MAP in maps):
            self.at[agent] = where[agent]
        self.taken_at = {key: when for key, when in self.taken_at.items() if key[0] not in maps}

    def ripe(self, key):
        number, row, column = key
        return self.grows[number][row][column] and self.clock - self.taken_at.get(key, -(10**9)) >= self.regrow

    def act(self, actions):
        """Move all, then let each take what is ripe, lowest number first."""
        self.clock += 1
        rewards = []
        for agent, action in enumerate(actions):
            number, (row, column) = agent // AGENTS_PER_MAP, self.at[agent]
            there = row + MOVES[action][0], column + MOVES[action][1]
            if not self.walls[number][there[0]][there[1]]:
                self.at[agent] = there
        for agent, (row, column) in enumerate(self.at):
            key = (agent // AGENTS_PER_MAP, row, column)
            rewards.append(float(self.ripe(key)))
            if rewards[-1]:
                self.taken_at[key] = self.clock
        return rewards

    def look(self, agent):
        number, (row, column) = agent // AGENTS_PER_MAP, self.at[agent]
        crowd = set(self.at[number * AGENTS_PER_MAP : (number + 1) * AGENTS_PER_MAP])
        tokens = []
        for r in range(11):
            for c in range(11):
                key = (number, row + r - VIEW, column + c - VIEW)
                if key[1:] in crowd:
                    tokens.append([r << 4 | c, 2, 1])
                elif self.walls[number][key[1]][key[2]]:
                    tokens.append([r << 4 | c, 0, 1])
                elif self.ripe(key):
                    tokens.append([r << 4 | c, 1, 1])
        return tokens


def cells_of(world):
    inside = world._at.flatten() % (WIDTH * WIDTH)
    return list(zip((inside // WIDTH).tolist(), (inside % WIDTH).tolist(), strict=True))


def padded(tokens, sight):
    return (tokens + [[255] * 3] * sight)[:sight]


def test_arena_matches_a_reference_implementation():
    world = make_world("arena", agents=48, size=SIZE, regrow=4, length=11, seed=3, sight=30)
    act, step = anything(world), world.reset()
    slowly = Slowly(world)
    slowly.begin(cells_of(world), {0, 1})
    shared = ended = 0
    for _ in range(25):
        for agent in range(0, 48, 5):
            assert step.obs[agent].tolist() == padded(slowly.look(agent), 30)
        actions = act(step.obs, step.first)
        step, rewards = world.step(actions), slowly.act(actions.tolist())
        assert step.reward.tolist() == rewards
        shared += 48 - len({(agent // AGENTS_PER_MAP, cell) for agent, cell in enumerate(slowly.at)})
        maps = {agent // AGENTS_PER_MAP for agent in range(48) if step.first[agent]}
        ended += len(maps)
        if maps:
            slowly.begin(cells_of(world), maps)
    # The hard cases were there: several on a cell, and maps that began anew, not together.
    assert shared > 20
    assert ended >= 4


def test_200_tokens_hold_every_view():
    world = make_world("arena", agents=24, size=SIZE, seed=1)
    assert world.spec.obs_shape == (200, 3)
    step, slowly = world.reset(), Slowly(world)
    slowly.begin(cells_of(world), {0})
    for agent in range(24):
        assert step.obs[agent].tolist() == padded(slowly.look(agent), 200)


def test_agents_never_stand_in_walls():
    world = make_world("arena", agents=72, size=12, walls=50, length=3)
    act, step = anything(world), world.reset()
    for _ in range(30):
        assert not world._blocked[world._at + world._offsets()].any()
        assert int(world._at.max()) < 22 * 22
        step = world.step(act(step.obs, step.first))


def test_maps_end_together_and_out_of_phase():
    world = make_world("arena", agents=24 * 20, size=12, length=15)
    steps = live(world, 40, anything(world))
    first = stacked(steps, "first").unflatten(1, (20, AGENTS_PER_MAP))
    assert torch.equal(first.any(2), first.all(2))
    starts = [torch.nonzero(first[:, number, 0])[:, 0].diff().tolist() for number in range(20)]
    assert all(each[1:] == [15] * len(each[1:]) and 1 <= each[0] <= 15 for each in starts)
    assert len({each[0] for each in starts}) > 5


@pytest.mark.parametrize("options", [{}, {"size": 12, "resources": 60, "regrow": 3}, {"truncate": True}])
def test_scripted_return_is_below_return_at_most(options):
    world = make_world("arena", agents=96, **{"size": 24, "length": 60, **options})
    script, chance = (returns_of(live(world, 180, act(world)), each=3).mean() for act in (Gathers, anything))
    assert 1.5 * chance < script < arena_return_at_most(world, 3)
    assert script > 0.4 * arena_return_at_most(world, 3)


def taken_by_who_could_jump(grows, steps, regrow):
    """What 24 take who need no way: each step as many of the ripe things as they are."""
    ripe_at, taken = [0] * grows, 0
    for now in range(steps):
        for thing in [thing for thing, when in enumerate(ripe_at) if when <= now][:AGENTS_PER_MAP]:
            ripe_at[thing], taken = now + regrow, taken + 1
    return taken


@pytest.mark.parametrize(("resources", "regrow", "length"), [(10, 7, 30), (80, 3, 20), (30, 2, 9), (50, 50, 40)])
def test_return_at_most_matches_simulation(resources, regrow, length):
    options = {"size": 12, "resources": resources, "regrow": regrow, "length": length}
    world = make_world("arena", agents=24 * 5, **options)
    grows = (world._fresh > 0).sum(1).tolist()
    assert len(set(grows)) > 1
    history = live(world, length, anything(world))
    lengths = [int(each.nonzero()[1]) for each in stacked(history, "first")[:, ::AGENTS_PER_MAP].T]
    assert lengths == world.first_lengths().tolist()
    first, later = (
        sum(taken_by_who_could_jump(*each, regrow) for each in zip(grows, steps, strict=True)) / world.agents
        for steps in (lengths, [length] * 5)
    )
    assert arena_return_at_most(world, 1) == pytest.approx(first)
    assert arena_return_at_most(world, 4) == pytest.approx((first + 3 * later) / 4)


def test_return_at_most_is_tight():
    world = make_world("arena", agents=48, size=12, walls=0, resources=100, regrow=1, length=8)
    stays = live(world, 24, lambda obs, first: torch.zeros(48, dtype=torch.long))
    assert float(returns_of(stays, each=3).mean()) == pytest.approx(arena_return_at_most(world, 3))


def test_scripted_player_walks_around_walls():
    wall, goal = torch.zeros(1, 11, 11, dtype=torch.bool), torch.zeros(1, 11, 11, dtype=torch.bool)
    goal[0, 5, 7], wall[0, 1:, 6] = True, True
    far = steps_to(goal, wall)
    # Up over the wall and down again; the wall itself is no way.
    assert far[0, 5, 5] == 2 + 5 + 5
    assert far[0, 5, 8] == 1
    assert (far[wall] == FAR).all()
    wall[0, 0, 6] = True
    assert steps_to(goal, wall)[0, 5, 5] == FAR


def test_arena_without_resources():
    world = make_world("arena", agents=24, size=12, resources=0, length=9)
    assert not returns_of(live(world, 30, anything(world))).any()
