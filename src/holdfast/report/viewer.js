"use strict";
/* Draws recorded steps: world, observation, actions, a row per agent, hidden units. Text from files is only ever text. */
const HF_TYPES = { uint8: Uint8Array, int8: Int8Array, int16: Int16Array, int32: Int32Array, float32: Float32Array };
const HF_GREEN = "#2a9d5c";
const HF_HUES = ["#2f7fd1", "#e0861a", "#c2417c", "#8657c9", "#b8860b", "#159aa8", "#d0533a", "#6b7f1f", "#7a6a5c"];
const HF_SCALE = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];

function hfBytes(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function hfArrays(encoded) {
  const arrays = {};
  for (const [name, { dtype, shape, data }] of Object.entries(encoded)) {
    const kind = HF_TYPES[dtype], bytes = hfBytes(data);
    arrays[name] = { shape, data: new kind(bytes.buffer, 0, bytes.length / kind.BYTES_PER_ELEMENT) };
  }
  return arrays;
}

/* Arrays [N,A,...] as one record per step. */
function hfRecords(arrays) {
  const steps = [];
  for (let t = 0; t < arrays.reward.shape[0]; t++) {
    const record = {};
    for (const [name, { shape, data }] of Object.entries(arrays)) {
      if (["grid", "changes", "frame_steps"].includes(name)) continue;
      const size = shape.slice(1).reduce((a, b) => a * b, 1);
      record[name] = data.subarray(t * size, (t + 1) * size);
    }
    steps.push(record);
  }
  return steps;
}

function hfElement(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

const hfShort = (name) => (name === "query" ? "?" : (name.match(/_([a-z0-9]{1,3})$/i) || [0, name.length <= 4 ? name : name.slice(0, 3)])[1]);
const hfNumber = (x) => (Math.abs(x) >= 1e4 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(1) : String(Math.round(x * 1000) / 1000));
const hfRgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const hfMix = (one, two, share) => one.map((x, i) => Math.round(x + (two[i] - x) * share));

class HfView {
  constructor(root, header) {
    Object.assign(this, { root, header, records: [], grid: null, frame: null, t: 0, offset: 0, agent: 0, marks: [], before: null });
    this.count = header.agents.length;
    this.parts = this.build();
    this.colours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.colours(), this.draw()));
    new ResizeObserver(() => this.draw()).observe(root);
  }

  build() {
    const parts = {}, add = (parent, tag, name, text) => (parts[name] = parent.appendChild(hfElement(tag, `hf-${name}`, text)));
    const top = add(this.root, "div", "top"), stage = add(top, "div", "stage"), side = add(top, "div", "side");
    add(stage, "h3", "stage-title", "world");
    add(stage, "canvas", "world").setAttribute("role", "img");
    const who = add(side, "div", "who"), select = add(who, "select", "select");
    select.setAttribute("aria-label", "agent");
    this.header.agents.forEach((number, row) => select.append(new Option(`agent ${number}`, row)));
    select.addEventListener("change", () => this.follow(Number(select.value)));
    add(who, "span", "hint", this.header.greedy ? "most likely actions" : "sampled actions");
    add(side, "div", "facts");
    const seen = side.appendChild(hfElement("div"));
    seen.append(hfElement("h3", "", "observation"));
    const sees = add(seen, "div", "sees");
    add(sees, "canvas", "window").setAttribute("role", "img");
    add(sees, "ul", "tokens");
    const does = side.appendChild(hfElement("div"));
    add(does, "h3", "does", "action");
    add(does, "div", "probs");
    const strip = side.appendChild(hfElement("div"));
    add(strip, "h3", "strip-title", "hidden units now");
    add(strip, "canvas", "strip").setAttribute("role", "img");
    const timeline = add(this.root, "div", "timeline");
    add(timeline, "canvas", "rows").setAttribute("role", "img");
    parts.rows.setAttribute("aria-label", "a row per agent: colour is the norm of its state, red ticks are episode starts");
    parts.rows.addEventListener("click", (event) => this.click(event));
    this.marksRow = 0;
    return parts;
  }

  colours() {
    const style = getComputedStyle(this.root);
    this.ink = Object.fromEntries(["ink", "soft", "paper", "card", "line", "floor", "wall", "accent", "red", "good", "mid", "empty"]
      .map((name) => [name, style.getPropertyValue(`--hf-${name}`).trim()]));
  }

  /* A kind of cell has the colour of the feature of its name. */
  colourOf(name, otherwise) {
    if (/^(floor|empty)$/.test(name)) return this.ink.floor;
    if (/wall/.test(name)) return this.ink.wall;
    if (/^(goal|resource)$/.test(name)) return HF_GREEN;
    if (name === "growing") return `${HF_GREEN}40`;
    if (/(^|:)agent$/.test(name)) return this.ink.soft;
    const index = this.header.features.findIndex((feature) => feature.name === name || feature.name.endsWith(`:${name}`));
    return HF_HUES[(index < 0 ? otherwise : index) % HF_HUES.length];
  }

  featureColour(id) {
    return this.colourOf(this.featureName(id), id);
  }

  featureName(id) {
    const feature = this.header.features.find((each) => each.id === id);
    return feature ? feature.name : `feature ${id}`;
  }

  follow(agent) {
    this.agent = (agent + this.count) % this.count;
    this.parts.select.value = this.agent;
    this.draw();
  }

  show(t) {
    this.t = Math.max(0, Math.min(t, this.records.length - 1));
    this.draw();
  }

  click(event) {
    const box = this.parts.rows.getBoundingClientRect(), { left, pitch, width } = this.layout;
    const row = Math.floor((event.clientY - box.top - 4) / pitch);
    const t = this.firstShown + Math.floor(((event.clientX - box.left - left) / width) * this.span);
    if (row >= 0 && row < this.count) this.follow(row);
    if (event.clientX - box.left >= left && this.onSeek) this.onSeek(Math.max(0, Math.min(t, this.records.length - 1)));
  }

  canvas(name, width, height) {
    const canvas = this.parts[name], ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  draw() {
    if (!this.records.length) return;
    const record = this.records[this.t];
    this.largestUnit = this.records.reduce((most, each) => each.units.reduce((a, b) => Math.max(a, Math.abs(b)), most), 1);
    this.root.dataset.step = this.t + this.offset;
    this.root.dataset.agent = this.header.agents[this.agent];
    this.drawWorld(record);
    this.drawFacts(record);
    this.drawSees(record);
    this.drawProbs(record);
    this.drawStrip(record);
    this.drawRows();
  }

  tokensOf(record, agent) {
    if (!record.tokens) return [];
    const all = record.tokens, size = all.length / this.count, tokens = [];
    for (let i = agent * size; i < (agent + 1) * size; i += 3)
      if (all[i] !== 255) tokens.push({ place: all[i], id: all[i + 1], value: all[i + 2] });
    return tokens;
  }

  drawWorld(record) {
    const width = Math.max(240, this.parts.stage.clientWidth);
    if (this.frame) return this.drawFrame(width);
    if (record.places && this.grid) return this.drawGrid(record, width);
    if (record.tokens) return this.drawSymbols(width);
    return this.drawNumbers(width);
  }

  drawFrame(width) {
    this.parts["stage-title"].textContent = `the environment of agent ${this.header.agents[0]}`;
    const scale = Math.min(width / this.frame.width, 420 / this.frame.height);
    const context = this.canvas("world", this.frame.width * scale, this.frame.height * scale);
    context.drawImage(this.frame, 0, 0, this.frame.width * scale, this.frame.height * scale);
  }

  drawGrid(record, width) {
    const { cells, shape: [, R, C] } = this.grid, perEnv = this.header.agents_per_env;
    const env = Math.floor(this.agent / perEnv), size = Math.max(3, Math.min(44, Math.floor(Math.min(width / C, 420 / R))));
    const context = this.canvas("world", Math.min(width, C * size), R * size);
    const [row, column] = record.places.subarray(2 * this.agent, 2 * this.agent + 2);
    const shift = Math.max(0, Math.min(C * size - width, (column + 0.5) * size - width / 2));
    context.translate(-shift, 0);
    for (let r = 0; r < R; r++)
      for (let c = 0; c < C; c++) {
        const kind = cells[(env * R + r) * C + c], name = this.header.kinds[kind];
        context.fillStyle = this.ink.floor;
        context.fillRect(c * size, r * size, size, size);
        context.fillStyle = this.colourOf(name, kind);
        const gap = /wall|floor|empty/.test(name) ? 0 : Math.round(size * 0.14);
        context.fillRect(c * size + gap, r * size + gap, size - 2 * gap, size - 2 * gap);
        if (size >= 30 && gap) this.label(context, hfShort(name), (c + 0.5) * size, (r + 0.5) * size, "#fff", 11);
      }
    this.drawWindow(context, row, column, size);
    this.drawTrail(context, size);
    const first = env * perEnv, last = Math.min(first + perEnv, record.places.length / 2);
    for (let agent = first; agent < last; agent++) {
      const [r, c] = record.places.subarray(2 * agent, 2 * agent + 2);
      if (r >= 0 && agent !== this.agent) this.drawAgent(context, r, c, size, agent, false);
    }
    if (row >= 0) this.drawAgent(context, row, column, size, this.agent, true);
    this.root.dataset.position = `${row},${column}`;
    const others = perEnv > 1 ? `, ${perEnv} agents` : "";
    this.parts["stage-title"].textContent = `${this.header.world}: the grid of agent ${this.header.agents[this.agent]}${others}`;
    this.parts.world.setAttribute("aria-label", `agent ${this.header.agents[this.agent]} at row ${row}, column ${column}`);
  }

  drawWindow(context, row, column, size) {
    const [R, C] = this.header.window;
    if (row < 0 || !this.header.features.length || this.grid.shape[1] <= R) return;
    context.strokeStyle = this.ink.accent;
    context.lineWidth = 1;
    context.setLineDash([4, 3]);
    context.strokeRect((column - (C - 1) / 2) * size + 0.5, (row - (R - 1) / 2) * size + 0.5, C * size - 1, R * size - 1);
    context.setLineDash([]);
  }

  drawTrail(context, size) {
    const at = (t) => this.records[t].places.subarray(2 * this.agent, 2 * this.agent + 2);
    context.strokeStyle = this.ink.accent;
    context.lineWidth = Math.max(1.5, size / 12);
    context.globalAlpha = 0.45;
    context.beginPath();
    for (let t = this.t; t > Math.max(0, this.t - 12); t--) {
      const [r, c] = at(t);
      context[t === this.t ? "moveTo" : "lineTo"]((c + 0.5) * size, (r + 0.5) * size);
      if (this.records[t].first[this.agent] || !this.records[t - 1].places) break;
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  drawAgent(context, row, column, size, agent, selected) {
    const x = (column + 0.5) * size, y = (row + 0.5) * size;
    context.beginPath();
    context.arc(x, y, Math.max(2, size * 0.36), 0, 7);
    context.fillStyle = selected ? this.ink.accent : this.ink.soft;
    context.fill();
    context.lineWidth = selected ? 2 : 1;
    context.strokeStyle = this.ink.paper;
    context.stroke();
    if (size >= 16) this.label(context, String(agent), x, y, this.ink.paper, Math.min(13, size * 0.4));
  }

  label(context, text, x, y, colour, size = 12) {
    context.font = `600 ${size}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.fillStyle = colour;
    context.fillText(text, x, y + 0.5);
    context.textAlign = "left";
  }

  /* What every agent sees and answers, step by step. */
  drawSymbols(width) {
    const left = 62, pitch = 38, wide = 34, shown = Math.max(4, Math.floor((width - left) / wide));
    const from = Math.max(0, Math.min(this.t - Math.floor(shown * 0.7), this.records.length - shown));
    const context = this.canvas("world", width, this.count * pitch + 4);
    this.parts["stage-title"].textContent = `${this.header.world}: what each agent sees, and what it answers below`;
    for (let agent = 0; agent < this.count; agent++) {
      context.font = `${agent === this.agent ? 600 : 400} 12px system-ui, sans-serif`;
      context.fillStyle = agent === this.agent ? this.ink.ink : this.ink.soft;
      context.fillText(`agent ${this.header.agents[agent]}`, 0, agent * pitch + 13);
      for (let t = from; t < Math.min(from + shown, this.records.length); t++)
        this.drawSymbol(context, t, agent, left + (t - from) * wide, agent * pitch + 2, wide);
    }
    context.strokeStyle = this.ink.accent;
    context.lineWidth = 2;
    context.strokeRect(left + (this.t - from) * wide, this.agent * pitch + 1, wide - 2, pitch - 3);
  }

  drawSymbol(context, t, agent, x, y, wide) {
    const record = this.records[t], tokens = this.tokensOf(record, agent), high = 20;
    if (!record.valid[agent]) return;
    context.fillStyle = tokens.length ? this.featureColour(tokens[0].id) : this.ink.empty;
    context.beginPath();
    context.roundRect(x + 2, y + 1, wide - 6, high, 4);
    context.fill();
    if (tokens.length) this.label(context, hfShort(this.featureName(tokens[0].id)), x + wide / 2 - 1, y + 11, "#fff", 11);
    if (record.first[agent]) {
      context.fillStyle = this.ink.red;
      context.fillRect(x - 1, y, 2, high + 2);
    }
    if (record.reward[agent] !== 0 || record.end[agent]) {
      const good = record.reward[agent] > 0;
      this.label(context, hfShort(this.actionName(record, agent)) + (good ? " ✓" : " ✗"), x + wide / 2 - 1, y + 28, good ? this.ink.good : this.ink.red, 11);
    }
  }

  /* The numbers of an observation over the last steps. */
  drawNumbers(width) {
    const first = this.records[0], size = first.obs ? Math.min(8, first.obs.length / this.count) : 0;
    this.parts["stage-title"].textContent = size ? `${this.header.world}: the observation over time` : `${this.header.world}: images are not stored`;
    const pitch = 34, context = this.canvas("world", width, Math.max(40, size * pitch));
    const from = Math.max(0, this.t - 120), whole = first.obs ? first.obs.length / this.count : 0;
    for (let i = 0; i < size; i++) {
      const values = this.records.slice(from, this.t + 1).map((record) => record.obs[this.agent * whole + i]);
      const low = Math.min(...values), range = Math.max(...values) - low || 1;
      context.fillStyle = this.ink.soft;
      context.fillText(`${i}   ${hfNumber(values[values.length - 1])}`, 0, (i + 0.5) * pitch);
      context.strokeStyle = HF_HUES[i % HF_HUES.length];
      context.lineWidth = 1.5;
      context.beginPath();
      values.forEach((value, k) => context.lineTo(76 + (k / 120) * (width - 80), (i + 1) * pitch - 5 - ((value - low) / range) * (pitch - 10)));
      context.stroke();
    }
  }

  actionName(record, agent) {
    const size = record.action.length / this.count, parts = record.action.subarray(agent * size, (agent + 1) * size);
    if (this.header.actions.length && size === 1) return this.header.actions[parts[0]];
    return Array.from(parts, hfNumber).join(", ");
  }

  returnSoFar() {
    let sum = 0;
    for (let t = this.t; t >= 0; t--) {
      if (t < this.t || !this.pending) sum += this.records[t].reward[this.agent];
      if (this.records[t].first[this.agent]) break;
    }
    return sum;
  }

  drawFacts(record) {
    const facts = [
      ["return", hfNumber(this.returnSoFar())],
      ["reward", this.pending && this.t === this.records.length - 1 ? "…" : hfNumber(record.reward[this.agent])],
      ["value", hfNumber(record.value[this.agent])],
      ["state norm", this.header.memory ? record.norm[this.agent].toFixed(2) : "no memory"],
    ];
    this.parts.facts.replaceChildren(...facts.map(([name, text]) => {
      const box = hfElement("div");
      box.append(hfElement("span", "", name), hfElement("b", "", text));
      return box;
    }));
  }

  drawSees(record) {
    const tokens = this.tokensOf(record, this.agent), [R, C] = this.header.window, size = 9;
    this.parts.window.hidden = !record.tokens;
    this.parts.window.setAttribute("aria-label", `observation window of ${R} by ${C} cells`);
    if (record.tokens) {
      const context = this.canvas("window", C * size + 1, R * size + 1);
      context.fillStyle = this.ink.floor;
      context.fillRect(0, 0, C * size, R * size);
      for (const { place, id } of tokens) {
        if (place === 254) continue;
        context.fillStyle = this.featureColour(id);
        context.fillRect((place & 15) * size + 1, (place >> 4) * size + 1, size - 1, size - 1);
      }
      context.strokeStyle = this.ink.accent;
      context.strokeRect(((C - 1) / 2) * size + 0.5, ((R - 1) / 2) * size + 0.5, size, size);
    }
    const counts = new Map();
    for (const { id } of tokens) counts.set(id, (counts.get(id) || 0) + 1);
    const items = [...counts].slice(0, 8).map(([id, count]) => {
      const item = hfElement("li"), swatch = hfElement("span", "hf-swatch");
      swatch.style.background = this.featureColour(id);
      item.append(swatch, `${this.featureName(id)}${count > 1 ? ` ×${count}` : ""}`);
      return item;
    });
    const numbers = record.obs ? record.obs.length / this.count : 0;
    for (let i = 0; i < Math.min(8, numbers); i++) items.push(hfElement("li", "", `${i}:  ${hfNumber(record.obs[this.agent * numbers + i])}`));
    if (!items.length) items.push(hfElement("li", "hf-hint", record.tokens ? "nothing" : "not stored"));
    this.parts.tokens.replaceChildren(...items);
  }

  drawProbs(record) {
    const name = record.valid[this.agent] ? this.actionName(record, this.agent) : "absent";
    this.parts.does.textContent = `${this.pending && this.t === this.records.length - 1 ? "next action, most likely" : "action"}: ${name}`;
    if (!record.probs) return this.parts.probs.replaceChildren();
    const size = record.probs.length / this.count, probs = record.probs.subarray(this.agent * size, (this.agent + 1) * size);
    const order = Array.from(probs.keys()).sort((a, b) => probs[b] - probs[a]).slice(0, 8).sort((a, b) => a - b);
    this.parts.probs.replaceChildren(...order.flatMap((index) => {
      const bar = hfElement("div", "hf-bar"), fill = bar.appendChild(hfElement("i"));
      fill.style.width = `${(100 * probs[index]) / 255}%`;
      if (this.before) bar.appendChild(hfElement("u")).style.left = `calc(${(98 * this.before[index]) / 255}%)`;
      const chosen = index === record.action[this.agent] ? "hf-chosen" : "";
      return [hfElement("span", chosen, this.header.actions[index] || String(index)), bar, hfElement("span", "", `${Math.round((100 * probs[index]) / 255)} %`)];
    }));
  }

  /* Blue below 0, orange above. */
  unitColour(value) {
    const middle = hfRgb(this.ink.mid), end = hfRgb(value < 0 ? "#1f63a8" : "#d96a00");
    return hfMix(middle, end, Math.min(1, Math.abs(value) / this.largestUnit) ** 0.6);
  }

  drawStrip(record) {
    const count = record.units.length / this.count;
    this.parts["strip-title"].textContent = count ? `hidden units now (${count})` : "no memory";
    const columns = Math.min(count, 32), size = Math.min(14, Math.floor(this.parts.side.clientWidth / Math.max(1, columns)));
    const context = this.canvas("strip", Math.max(1, columns * size), Math.max(1, Math.ceil(count / 32) * size));
    for (let i = 0; i < count; i++) {
      context.fillStyle = `rgb(${this.unitColour(record.units[this.agent * count + i])})`;
      context.fillRect((i % 32) * size, Math.floor(i / 32) * size, size - 1, size - 1);
    }
    context.strokeStyle = this.ink.line;
    context.strokeRect(0.5, 0.5, Math.max(1, columns * size) - 2, Math.max(1, Math.ceil(count / 32) * size) - 2);
  }

  drawRows() {
    const width = this.parts.timeline.clientWidth, left = 62, pitch = 18, gap = 12;
    const units = this.records[0].units.length / this.count, high = units ? Math.max(48, Math.min(128, units)) : 0;
    const top = this.count * pitch + gap, context = this.canvas("rows", width, top + (units ? high + 22 : 0) + 16);
    this.span = this.window || this.records.length;
    this.firstShown = Math.max(0, this.records.length - this.span);
    this.layout = { left, pitch, width: width - left - 1 };
    const step = this.layout.width / this.span, x = (t) => left + (t - this.firstShown) * step;
    const largest = this.records.reduce((most, record) => Math.max(most, ...record.norm), 1e-9);
    for (let agent = 0; agent < this.count; agent++) this.drawRow(context, agent, 4 + agent * pitch, pitch - 5, x, step, largest);
    if (units) this.drawUnits(context, units, top + 16, high, x);
    const bottom = top + (units ? high + 16 : 0), bands = [[0, this.count * pitch + 2], ...(units ? [[top + 16, bottom]] : [])];
    this.drawMarks(context, x, bands);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = this.ink.soft;
    context.fillText("step", 0, bottom + 10);
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((n) => this.span / n <= Math.max(3, width / 110)) || 10000;
    for (const t of this.multiples(every, this.firstShown + this.span)) context.fillText(t + this.offset, x(t), bottom + 10);
    context.fillStyle = this.ink.ink;
    for (const [from, to] of bands) context.fillRect(x(this.t + 0.5) - 0.75, from, 1.5, to - from);
  }

  /* The shown steps whose number is a multiple; records are numbered from the first one that is kept. */
  multiples(every, end) {
    const steps = [];
    for (let t = Math.ceil((this.firstShown + this.offset) / every) * every - this.offset; t < end; t += every) steps.push(t);
    return steps;
  }

  drawRow(context, agent, y, high, x, step, largest) {
    context.font = `${agent === this.agent ? 600 : 400} 12px system-ui, sans-serif`;
    context.fillStyle = agent === this.agent ? this.ink.ink : this.ink.soft;
    context.fillText(`agent ${this.header.agents[agent]}`, 0, y + high / 2);
    for (let t = this.firstShown; t < this.records.length; t++) {
      const record = this.records[t], share = (record.norm[agent] / largest) * (HF_SCALE.length - 1.001), low = Math.floor(share);
      const colour = hfMix(hfRgb(HF_SCALE[low]), hfRgb(HF_SCALE[low + 1]), share - low);
      context.fillStyle = record.valid[agent] ? `rgb(${colour})` : this.ink.empty;
      context.fillRect(x(t), y, step + 0.5, high);
    }
    context.fillStyle = context.strokeStyle = this.ink.red;
    context.lineWidth = 1.25;
    for (let t = this.firstShown; t < this.records.length; t++) {
      if (!this.records[t].first[agent]) continue;
      context.fillRect(x(t) - 0.75, y - 2, 1.5, high + 3);
      const end = t ? this.records[t - 1].end[agent] : 0;
      if (!end || step < 2.2) continue;
      context.beginPath();
      context.arc(x(t), y + high + 1, 2, 0, 7);
      context[end === 2 ? "stroke" : "fill"]();
    }
  }

  drawUnits(context, units, y, high, x) {
    context.fillStyle = this.ink.soft;
    context.font = "12px system-ui, sans-serif";
    const legend = this.layout.width < 320 ? "" : ": blue below 0, orange above";
    context.fillText(`hidden units of agent ${this.header.agents[this.agent]}${legend}`, x(this.firstShown), y - 9);
    const steps = this.records.length - this.firstShown, image = new ImageData(steps, units);
    for (let t = 0; t < steps; t++) {
      const values = this.records[this.firstShown + t].units;
      for (let i = 0; i < units; i++) {
        const [r, g, b] = this.unitColour(values[this.agent * units + i]);
        image.data.set([r, g, b, 255], 4 * (i * steps + t));
      }
    }
    const small = new OffscreenCanvas(steps, units);
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, x(this.firstShown), y, x(this.records.length) - x(this.firstShown), high);
    context.strokeStyle = this.ink.red;
    for (let t = this.firstShown; t < this.records.length; t++)
      if (this.records[t].first[this.agent]) context.strokeRect(x(t), y, 0.01, high);
  }

  /* Segment edges, and what was done to a memory. */
  drawMarks(context, x, bands) {
    context.strokeStyle = this.ink.soft;
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    const every = this.header.horizon;
    for (const t of this.multiples(every, this.records.length)) {
      if (t + this.offset === 0) continue;
      for (const [from, to] of bands) {
        context.beginPath();
        context.moveTo(x(t), from);
        context.lineTo(x(t), to);
        context.stroke();
      }
    }
    context.setLineDash([]);
    for (const { t, agents } of this.marks) {
      if (t < this.firstShown) continue;
      for (const agent of agents) this.label(context, "◆", x(t), 4 + agent * 18 + 6, "#d94fd0", 12);
    }
  }
}
