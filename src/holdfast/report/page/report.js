"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    // A spreadsheet would compute a text that begins with one of these signs.
    const text = /^[=+@\t\r-]/.test(value) ? `'${value}` : value;
    return `"${text.replace(/"/g, '""')}"`;
  };
  const csv = (columns) => {
    const names = Object.keys(columns);
    const count = Math.max(0, ...names.map((name) => columns[name].length));
    const lines = [names.map(cell).join(",")];
    for (let row = 0; row < count; row++) lines.push(names.map((name) => cell(columns[name][row])).join(","));
    return lines.join("\r\n") + "\r\n";
  };
  const png = (figure, name) => {
    const svg = figure.querySelector("svg"), copy = svg.cloneNode(true);
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number), scale = 3;
    const style = getComputedStyle(document.documentElement);
    for (let i = 0; style.getPropertyValue(`--plot${i}`); i++) {
      copy.style.setProperty(`--plot${i}`, style.getPropertyValue(`--plot${i}`));
    }
    copy.setAttribute("width", width * scale);
    copy.setAttribute("height", height * scale);
    const url = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = width * scale;
      canvas.height = height * scale;
      canvas.getContext("2d").drawImage(image, 0, 0);
      URL.revokeObjectURL(url);
      canvas.toBlob((blob) => save(blob, `${name}.png`));
    };
    image.src = url;
  };
  for (const figure of document.querySelectorAll("figure[data-name]")) {
    const name = figure.dataset.name, box = document.createElement("span");
    box.className = "save";
    const add = (label, title, action) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = label;
      button.title = title;
      button.addEventListener("click", action);
      box.append(button);
    };
    add("PNG", "Save this plot as a picture", () => png(figure, name));
    if (data[name]) {
      add("CSV", "Save the numbers of this plot", () => save(new Blob([csv(data[name])], { type: "text/csv" }), `${name}.csv`));
    }
    figure.querySelector("figcaption").prepend(box);
  }
})();
