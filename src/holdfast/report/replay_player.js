/* Plays a replay file that is in the page. */
async function hfPlay(root) {
  const packed = new Blob([hfBytes(root.querySelector(".hf-data").textContent)]);
  const stream = packed.stream().pipeThrough(new DecompressionStream("gzip"));
  const replay = JSON.parse(await new Response(stream).text());
  const arrays = hfArrays(replay.arrays), view = new HfView(root, replay.header);
  view.records = hfRecords(arrays);
  const last = view.records.length - 1;
  const frameSteps = arrays.frame_steps ? arrays.frame_steps.data : [];
  const frames = await Promise.all(replay.frames.map((frame) => createImageBitmap(new Blob([hfBytes(frame)], { type: "image/webp" }))));
  const changes = arrays.changes ? arrays.changes.data : [];
  let gridStep = -1, next = 0, timer = null, speed = 8;

  function gridAt(t) {
    if (!arrays.grid) return;
    if (t < gridStep || gridStep < 0) {
      view.grid = { cells: arrays.grid.data.slice(), shape: arrays.grid.shape };
      next = 0;
    }
    for (; next < changes.length && changes[next] <= t; next += 3) view.grid.cells[changes[next + 1]] = changes[next + 2];
    gridStep = t;
  }

  const controls = root.appendChild(hfElement("div", "hf-controls"));
  const button = (text, label, action) => {
    const element = controls.appendChild(hfElement("button", "", text));
    element.type = "button";
    element.setAttribute("aria-label", label);
    element.addEventListener("click", (event) => {
      if (event.detail) root.focus({ preventScroll: true });
      action();
    });
    return element;
  };
  const play = button("▶ play", "play or pause", () => toggle());
  button("‹", "one step back", () => go(view.t - 1));
  button("›", "one step on", () => go(view.t + 1));
  const range = controls.appendChild(hfElement("input", "hf-range"));
  Object.assign(range, { type: "range", min: 0, max: last, value: 0 });
  range.setAttribute("aria-label", "step");
  range.addEventListener("input", () => go(Number(range.value)));
  const label = controls.appendChild(hfElement("output"));
  const hint = root.appendChild(hfElement("p", "hf-hint"));
  const keys = [["space", "play"], ["← →", "step"], ["[ ]", "agent"], ["- =", "speed"]];
  for (const [key, text] of keys) hint.append(hfElement("kbd", "", key), ` ${text} `);
  root.append(hfElement("p", "hf-hint", "colour: norm of the state · red: episode start (● terminated, ○ truncated) · dashed: segment edge in training"));

  function go(t) {
    const step = Math.max(0, Math.min(t, last));
    gridAt(step);
    let number = -1;
    while (number + 1 < frameSteps.length && frameSteps[number + 1] <= step) number++;
    view.frame = number < 0 ? null : frames[number];
    view.show(step);
    range.value = step;
    label.textContent = `step ${step} of ${last} · ${speed}/s`;
  }

  function toggle(on = timer === null) {
    clearInterval(timer);
    timer = on ? setInterval(() => (view.t < last ? go(view.t + 1) : toggle(false)), 1000 / speed) : null;
    if (on && view.t === last) go(0);
    play.textContent = on ? "❚❚ pause" : "▶ play";
    root.dataset.playing = on;
  }

  function faster(factor) {
    speed = Math.max(1, Math.min(64, speed * factor));
    if (timer !== null) toggle(true);
    go(view.t);
  }

  const actions = {
    " ": () => toggle(), "[": () => view.follow(view.agent - 1), "]": () => view.follow(view.agent + 1),
    "-": () => faster(0.5), "=": () => faster(2), "+": () => faster(2),
    ArrowLeft: () => go(view.t - 1), ArrowRight: () => go(view.t + 1), Home: () => go(0), End: () => go(last),
  };
  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    if (event.target.tagName === "SELECT" || (event.key === " " && event.target.tagName === "BUTTON")) return;
    event.preventDefault();
    actions[event.key]();
  });
  root.addEventListener("pointerdown", (event) => event.target.closest("button, select, input") || root.focus({ preventScroll: true }));
  view.onSeek = go;
  root.dataset.playing = false;
  go(0);
}
