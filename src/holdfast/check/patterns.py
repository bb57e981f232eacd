"""The ways memory goes wrong that we know, each with the line that mends it."""

from holdfast.check.results import Pattern

_CLEAR = "state = torch.where(first, initial, state) before the cell reads, in rollout and update alike."

_WRITE = {
    # When memory is cleared.
    "memory is never cleared": _CLEAR,
    "state cleared one step late": f"first[t] belongs to obs[t], not to the step after it: {_CLEAR}",
    "state cleared one step early": (
        f"done[t] came with obs[t] and opens the next episode there, not a step before: {_CLEAR}"
    ),
    "clears on terminated only": "first = terminated | truncated; clear on either.",
    "clears on truncated only": "first = terminated | truncated; clear on either.",
    "one agent's start clears everybody": (
        "Clear row by row: torch.where(first[:, None], initial, state), not `if first.any()`."
    ),
    "clears only when all agents start together": (
        "Clear row by row: torch.where(first[:, None], initial, state), not `if first.all()`."
    ),
    "the first row's flags clear everybody": "Use every row's own flag: first[:, None], not first[0].",
    "every call starts from nothing": (
        "Hand the state of the last call to the next one; initial states are for starts only."
    ),
    "memory wiped at every segment": (
        "Keep the state from segment to segment; clear it where `first` is true and nowhere else."
    ),
    "memory wiped before each rollout": (
        "Keep the state from rollout to rollout; clear it where `first` is true and nowhere else."
    ),
    "memory wiped before each rollout, and cleared nowhere else": (
        f"Keep the state from rollout to rollout, and: {_CLEAR}"
    ),
    "clears looked at in a segment's first step only": (
        "Clear at every step of the segment: pass first[B,T], not first[:, 0]."
    ),
    "the clear at a segment's first step is missed": (
        "Store the entry state before clearing, and replay first[:, 0] too."
    ),
    "reads where nobody acts": "Where valid is false keep the state: torch.where(valid, new_state, state).",
    "takes no notice of trials": "clear = first | trial where memory.clear_on is trial.",
    "only part of the state is cleared": (
        "Clear every tensor of the state: hidden and cell states of all layers."
    ),
    # Where a replay starts.
    "training starts from zeros": (
        "Store the state at each segment's entry and start its replay there, not from zeros."
    ),
    "entry state is the one after the step": (
        "Copy the entry state before the segment's first step is lived, not after it."
    ),
    "entry state is one step old": (
        "Copy the entry state right before the segment's first step, not a step earlier."
    ),
    "every segment starts from the rollout's entry state": (
        "Store a state for every segment, not one for each rollout."
    ),
    "entry state of another segment of the same agent": "Keep entry states in the order of their segments.",
    "entry states of other rows": (
        "Shuffle entry states with the same index as their segments: entry[index], steps[index]."
    ),
    "part of the entry state is lost": (
        "Store every tensor of the state: hidden and cell states of all layers."
    ),
    # How a segment is read.
    "rows mixed: time and batch swapped": (
        "Use transpose(0, 1) between [B,T] and [T,B]; reshape and view only regroup numbers."
    ),
    "clears ignored when the batch holds one sequence": (
        "Clear whatever the batch size; do not squeeze or branch on one row."
    ),
    "a sequence alone is read differently": "Treat one row like many; do not squeeze the batch axis.",
    "rows see each other within a call": (
        "Normalise over features, not over the batch: nn.LayerNorm, not nn.BatchNorm."
    ),
    "state shared between slices": (
        "Keep a state for each slice of environments: states[env_id_start], not one for all."
    ),
    # Graphs.
    "graph kept across calls": "state = state.detach() where it leaves a call, or act under torch.no_grad().",
    "gradient flows into the entry state": "Start a replay from entry.detach().",
    "graph kept beside the state": (
        "Keep no tensor with a graph on self between calls: detach it, or do not keep it."
    ),
    "graph cut inside the segment": (
        "Detach at a segment's edge only; within it let the state keep its graph."
    ),
    "no gradient arrives": (
        "Let outputs depend on the weights: no torch.no_grad() and no detach() in the path of the loss."
    ),
    "the gradient is not a number": (
        "Look for sqrt, log or division at 0, and for where() around them, in the backward path."
    ),
    # Purity.
    "draws random numbers while it thinks": (
        "Switch dropout and noise off in recurrent policies, or draw from a seed that is replayed."
    ),
    "keeps state outside of the state it returns": (
        "Put everything that is remembered into the state: no attribute, closure or global."
    ),
    "asking for a value advances the memory": (
        "Evaluate bootstrap values from a copy of the state, and drop the state that comes out."
    ),
    "writes into its inputs": "Work on copies: x = x.clone() before in-place operations; return a new state.",
    "keeps everything it meets": "Keep nothing that grows with time; detach and drop what was logged.",
    "part of the memory is not saved": (
        "Save every tensor of the state: hidden and cell states of all layers, for all slices."
    ),
    # Evaluation and other modes.
    "evaluation touches the training's memory": (
        "Evaluate a copy of the policy, or put the live memories back afterwards."
    ),
    "different once it is compiled": (
        "Do nothing that depends on torch.compiler.is_compiling(); compare eager and compiled outputs."
    ),
    "the cell differs from its reference": "Compare the kernel with holdfast.memory.reference step by step.",
}

CLOCKS = tuple(_WRITE)[: tuple(_WRITE).index("training starts from zeros")]
"""The patterns that say when memory is cleared; each may be true of one phase only."""

PATTERNS = {name: Pattern(name, write) for name, write in _WRITE.items()}


def pattern(name: str, where: str = "") -> Pattern:
    """Look a pattern up; `where` says in which phase it was seen, if not in all."""
    found = PATTERNS[name]
    return Pattern(f"{found.name} ({where})", found.write) if where else found
