/* Polls the state of play, and sends commands. */
function hfLive(root, header) {
  const bar = root.appendChild(hfElement("div", "hf-bar-top")), surgery = root.appendChild(hfElement("div", "hf-surgery"));
  const view = new HfView(root, header);
  view.pending = true;
  view.window = 120;
  let known = 0, speed = 8, playing = false, modes = [], busy = false, message = "";

  const button = (parent, text, action, hint) => {
    const element = parent.appendChild(hfElement("button", "", text));
    element.type = "button";
    if (hint) element.title = hint;
    element.addEventListener("click", (event) => {
      // After a click of the mouse, keys are those of the page again.
      if (event.detail) root.focus({ preventScroll: true });
      action();
    });
    return element;
  };
  const play = button(bar, "▶ play", () => send({ do: playing ? "pause" : "play" }), "space");
  button(bar, "› step", () => send({ do: "step" }), "→");
  button(bar, "›› 10 steps", () => send({ do: "step", count: 10 }));
  button(bar, "slower", () => faster(0.5), "-");
  button(bar, "faster", () => faster(2), "=");
  const greedy = bar.appendChild(hfElement("label")), box = greedy.appendChild(hfElement("input"));
  box.type = "checkbox";
  greedy.append("most likely actions");
  box.addEventListener("change", () => send({ do: "greedy", greedy: box.checked }));
  const status = bar.appendChild(hfElement("output"));

  const modeRow = surgery.appendChild(hfElement("div")), nowRow = surgery.appendChild(hfElement("div"));
  const name = modeRow.appendChild(hfElement("span", "hf-name")), group = modeRow.appendChild(hfElement("span", "hf-group"));
  const modeButtons = ["intact", "frozen", "cleared"].map((mode) => button(group, mode, () => change({ do: "mode", mode }),
    { intact: "the memory works", frozen: "the state stays as it is until the episode ends", cleared: "the state is cleared before every step" }[mode]));
  modeRow.append(hfElement("span", "hf-hint", "at every step"));
  nowRow.append(hfElement("span", "hf-name", "once, now"));
  const clear = button(nowRow, "clear", () => change({ do: "clear" }), "c");
  const remember = button(nowRow, "remember", () => change({ do: "remember" }), "m");
  const restore = button(nowRow, "restore", () => change({ do: "restore" }), "r");
  const swap = button(nowRow, "swap with", () => change({ do: "swap", other: Number(other.value) }), "s");
  const other = nowRow.appendChild(hfElement("select"));
  other.setAttribute("aria-label", "agent to swap with");
  header.agents.forEach((number, row) => other.append(new Option(`agent ${number}`, row)));
  const tally = surgery.appendChild(hfElement("p", "hf-tally"));
  const note = surgery.appendChild(hfElement("p", "hf-message"));
  const hint = root.appendChild(hfElement("p", "hf-hint"));
  for (const [key, text] of [["space", "play"], ["→", "step"], ["[ ]", "agent"], ["- =", "speed"], ["c", "clear"], ["m", "remember"], ["r", "restore"], ["s", "swap"]])
    hint.append(hfElement("kbd", "", key), ` ${text} `);
  root.append(hfElement("p", "hf-hint", "colour: norm of the state · red: episode start (● terminated, ○ truncated) · dashed: segment edge in training · ◆ memory changed · thin red line in the bars: probability before the change"));

  function faster(factor) {
    send({ do: "speed", speed: Math.max(0.5, Math.min(64, speed * factor)) });
  }

  function change(command) {
    send({ agent: view.agent, ...command });
  }

  async function send(command) {
    const reply = await fetch("command", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(command) });
    const answer = await reply.json();
    message = answer.error || "";
    await poll();
  }

  async function poll() {
    if (busy) return;
    busy = true;
    try {
      const reply = await fetch(`state?since=${known}`), state = await reply.json();
      if (!reply.ok) throw new Error(state.error);
      await update(state);
    } catch (error) {
      note.textContent = error instanceof TypeError ? "holdfast play has ended." : error.message;
      note.classList.add("hf-error");
    }
    busy = false;
  }

  async function update(state) {
    view.records.length = Math.min(view.records.length, known);
    if (state.first > known) view.records = [];
    if (state.rows) view.records.push(...hfRecords(hfArrays(state.rows)));
    known = state.total;
    // Records are numbered from the first one that is kept.
    const offset = (view.offset = known - view.records.length);
    view.records.push(...hfRecords(hfArrays(state.now)));
    if (state.grid) view.grid = { cells: hfArrays({ grid: state.grid }).grid.data, shape: state.grid.shape };
    if (state.frame) view.frame = await createImageBitmap(new Blob([hfBytes(state.frame)], { type: "image/webp" }));
    ({ speed, playing, modes } = state);
    view.marks = state.marks.map((mark) => ({ ...mark, t: mark.t - offset }));
    view.state = state;
    view.show(view.records.length - 1);
    root.dataset.total = known;
    root.dataset.playing = playing;
    panel(state);
  }

  function panel(state) {
    play.textContent = playing ? "❚❚ pause" : "▶ play";
    box.checked = state.greedy;
    status.textContent = `step ${known} · ${speed}/s`;
    name.textContent = `memory of agent ${header.agents[view.agent]}`;
    modeButtons.forEach((element) => element.setAttribute("aria-pressed", element.textContent === modes[view.agent]));
    for (const element of [...modeButtons, clear, remember, restore, swap]) element.disabled = !header.memory;
    restore.disabled ||= !state.remembered.includes(view.agent);
    swap.disabled ||= header.agents.length < 2;
    if (Number(other.value) === view.agent && header.agents.length > 1) other.value = (view.agent + 1) % header.agents.length;
    const text = ([count, mean]) => (count ? [hfElement("b", "", mean.toFixed(3)), ` in ${count} episode${count > 1 ? "s" : ""}`] : ["no episode yet"]);
    tally.replaceChildren("mean return, memory left alone: ", ...text(state.tally.alone), " · memory changed: ", ...text(state.tally.changed));
    const mark = [...state.marks].reverse().find(({ agents }) => agents.includes(view.agent));
    note.classList.toggle("hf-error", Boolean(state.error || message));
    note.textContent = state.error || message || (mark ? `before step ${mark.t}: memory of agent ${header.agents[mark.agents[0]]} ${mark.what}` : header.memory ? "" : "this policy has no memory");
  }

  const draw = view.draw.bind(view);
  view.draw = () => {
    if (!view.state) return;
    view.before = view.state.before[view.agent] || null;
    draw();
    panel(view.state);
  };
  const actions = {
    " ": () => play.click(), ArrowRight: () => send({ do: "step" }), "-": () => faster(0.5), "=": () => faster(2), "+": () => faster(2),
    "[": () => view.follow(view.agent - 1), "]": () => view.follow(view.agent + 1),
    c: () => clear.click(), m: () => remember.click(), r: () => restore.click(), s: () => swap.click(),
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    if (event.target.tagName === "SELECT" || (event.key === " " && event.target.closest("button, input"))) return;
    event.preventDefault();
    actions[event.key]();
  });
  setInterval(poll, 125);
  poll();
}
