import torch

from holdfast.worlds import make_world
from holdfast.worlds.arena import CROWD, VIEW
from lived import anything, live, returns_of, stacked

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
        for agent in (agent for agent in range(len(where)) if agent // CROWD in maps):
            self.at[agent] = where[agent]
        self.taken_at = {key: when for key, when in self.taken_at.items() if key[0] not in maps}

    def ripe(self, key):
        number, row, column = key
        return (
            self.grows[number][row][column] and self.clock - self.taken_at.get(key, -(10**9)) >= self.regrow
        )

    def act(self, actions):
        """Move all, then let each take what is ripe, lowest number first."""
        self.clock += 1
        rewards = []
        for agent, action in enumerate(actions):
            number, (row, column) = agent // CROWD, self.at[agent]
            there = row + MOVES[action][0], column + MOVES[action][1]
            if not self.walls[number][there[0]][there[1]]:
                self.at[agent] = there
        for agent, (row, column) in enumerate(self.at):
            key = (agent // CROWD, row, column)
            rewards.append(float(self.ripe(key)))
            if rewards[-1]:
                self.taken_at[key] = self.clock
        return rewards

    def look(self, agent):
        number, (row, column) = agent // CROWD, self.at[agent]
        crowd = set(self.at[number * CROWD : (number + 1) * CROWD])
        seen = []
        for r in range(11):
            for c in range(11):
                key = (number, row + r - VIEW, column + c - VIEW)
                if key[1:] in crowd:
                    seen.append([r << 4 | c, 2, 1])
                elif self.walls[number][key[1]][key[2]]:
                    seen.append([r << 4 | c, 0, 1])
                elif self.ripe(key):
                    seen.append([r << 4 | c, 1, 1])
        return seen


def cells_of(world):
    inside = world._at.flatten() % (WIDTH * WIDTH)
    return list(zip((inside // WIDTH).tolist(), (inside % WIDTH).tolist(), strict=True))


def padded(seen, sight):
    return (seen + [[255] * 3] * sight)[:sight]


def test_it_is_what_a_person_would_write_cell_by_cell():
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
        shared += 48 - len({(agent // CROWD, cell) for agent, cell in enumerate(slowly.at)})
        maps = {agent // CROWD for agent in range(48) if step.first[agent]}
        ended += len(maps)
        if maps:
            slowly.begin(cells_of(world), maps)
    # The hard cases were there: several on a cell, and maps that began anew, not together.
    assert shared > 20
    assert ended >= 4


def test_200_tokens_hold_all_there_is_to_see():
    world = make_world("arena", agents=24, size=SIZE, seed=1)
    assert world.spec.obs_shape == (200, 3)
    step, slowly = world.reset(), Slowly(world)
    slowly.begin(cells_of(world), {0})
    for agent in range(24):
        assert step.obs[agent].tolist() == padded(slowly.look(agent), 200)


def test_nobody_begins_inside_a_wall_or_walks_into_one():
    world = make_world("arena", agents=72, size=12, walls=50, length=3)
    act, step = anything(world), world.reset()
    for _ in range(30):
        assert not world._blocked[world._at].any()
        assert torch.equal(world._at.flatten() // (22 * 22), torch.arange(72) // 24)
        step = world.step(act(step.obs, step.first))


def test_a_crowd_begins_and_ends_together_and_maps_are_out_of_step():
    world = make_world("arena", agents=24 * 20, size=12, length=15)
    told = live(world, 40, anything(world))
    first = stacked(told, "first").unflatten(1, (20, CROWD))
    assert torch.equal(first.any(2), first.all(2))
    starts = [torch.nonzero(first[:, number, 0])[:, 0].diff().tolist() for number in range(20)]
    assert all(each[1:] == [15] * len(each[1:]) and 1 <= each[0] <= 15 for each in starts)
    assert len({each[0] for each in starts}) > 5


class Forager:
    """Goes towards the nearest ripe thing it sees, around no corners; else anywhere."""

    def __init__(self, world):
        self.else_ = anything(world)

    def __call__(self, obs, first):
        row, column = (obs[..., 0] >> 4).int() - VIEW, (obs[..., 0] & 15).int() - VIEW
        far = torch.where(obs[..., 1] == 1, row.abs() + column.abs(), 99)
        nearest = far.argmin(1, keepdim=True)
        row, column = row.gather(1, nearest)[:, 0], column.gather(1, nearest)[:, 0]
        go = torch.where(row.abs() > column.abs(), torch.where(row < 0, 1, 2), torch.where(column < 0, 3, 4))
        chance = self.else_(obs, first)
        return torch.where((far.amin(1) < 99) & (chance > 0), go, chance)


def test_who_looks_collects_more_than_who_does_not():
    world = make_world("arena", agents=96, size=24, walls=10, length=60)
    looks, does_not = (returns_of(live(world, 130, act)).mean() for act in (Forager(world), anything(world)))
    assert looks > 1.5 * does_not > 0


def test_nothing_grows_where_nothing_is_to_grow():
    world = make_world("arena", agents=24, size=12, resources=0, length=9)
    assert not returns_of(live(world, 30, anything(world))).any()
