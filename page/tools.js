// What the views are made of: elements, colours, texts with a chosen character, tables, bars, PNG pictures. Whatever
// comes from the text, the vocabulary or the run gets into the page as textContent, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const bits = (p) => -Math.log2(p);
const number = (n) => n.toLocaleString("en");
const factor = (n) => (n >= 99.5 ? n.toFixed(0) : n.toPrecision(2));

const counted = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

function percent(p) { // only what is certain is 100 %
  if (p > 0.999 && p < 1) return "over 99.9 %";
  if (p >= 0.1) return (100 * p).toFixed(p > 0.99 && p < 1 ? 1 : 0) + " %";
  return (100 * p).toPrecision(p < 0.001 ? 1 : 2) + " %";
}

function make(tag, parent, text = "", class_name = "") {
  const element = document.createElement(tag);
  Object.assign(element, { textContent: text, className: class_name });
  parent?.append(element);
  return element;
}

function table(parent, header, rows) { // the first cell of each row names it
  const element = make("table"), head = make("tr", make("thead", element)), body = make("tbody", element);
  for (const title of header) make("th", head, title).scope = "col";
  for (const cells of rows) {
    const row = make("tr", body);
    cells.forEach((cell, i) => make(i ? "td" : "th", row, cell));
  }
  parent.replaceChildren(element);
  return body;
}

// Rows: symbol, share of the full width, share at temperature 1 (before), words, whether it came, whether it is cut.
function bars(parent, rows) {
  const grid = make("div", null, "", "bars");
  for (const { symbol, share, before, words, came, is_cut } of rows) {
    make("span", grid, symbol, came ? "symbol came" : "symbol");
    const track = make("span", grid, "", "track");
    make("span", track, "", is_cut ? "bar cut" : "bar").style.width = 100 * share + "%";
    if (before !== undefined) make("span", track, "", "before").style.width = 100 * before + "%";
    make("span", grid, words, came ? "came" : "");
  }
  parent.replaceChildren(grid);
}

function visible(character) { // a sign for every character
  if (character === " ") return "·";
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  if (/\p{M}/u.test(character)) return "◌" + character; // a combining mark needs something to stand on
  if (/[\p{C}\p{Z}]/u.test(character)) return "⟨" + character.codePointAt(0).toString(16) + "⟩";
  return character;
}

const sign = (code) => visible(characters[code]);
const quoted = (code) => "“" + sign(code) + "”";

// ---------------------------------------------------------------------------------------------------------- colours

const dark = matchMedia("(prefers-color-scheme: dark)");
const mix = (from, to, share) => from.map((value, i) => Math.round(value + (to[i] - value) * share));
const neutral = () => (dark.matches ? [30, 35, 43] : [255, 255, 255]);
const shade = (share) => mix(neutral(), dark.matches ? [158, 202, 255] : [8, 48, 107], Math.min(1, Math.max(0, share)));

function diverging(times) { // orange above 1, blue below; both are strongest from a factor of 16 on
  const share = Math.max(-1, Math.min(1, Math.log2(times) / 4));
  const [more, less] = dark.matches ? [[255, 140, 50], [60, 150, 215]] : [[213, 94, 0], [0, 114, 178]];
  return mix(neutral(), share > 0 ? more : less, Math.abs(share));
}

function color_table() { // diverging for 2^-4 ... 2^4 in 256 steps, as pixels: a map has thousands of them
  return Uint32Array.from({ length: 257 }, (_, i) => {
    const [red, green, blue] = diverging(2 ** ((i - 128) / 32));
    return (255 << 24) | (blue << 16) | (green << 8) | red;
  });
}

function paint(element, rgb) { // black or white on it, whichever is easier to read
  const linear_light = rgb.map((v) => (v <= 10 ? v / 3294 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear_light[0] + 0.7152 * linear_light[1] + 0.0722 * linear_light[2];
  element.style.backgroundColor = `rgb(${rgb.join(", ")})`;
  element.style.color = luminance > 0.179 ? "#000" : "#fff";
}

function legend(parent, title, keys) { // keys: [words, colour]
  parent.replaceChildren(make("span", null, title));
  for (const [words, rgb] of keys) rgb ? paint(make("span", parent, words, "key"), rgb) : make("span", parent, words);
}

// -------------------------------------------------------------------------------------- a text with a chosen character

class TextView { // `hover(index)`, `pick(index)` and `move(index)` are told what a pointer or a key does
  constructor(id, { hover, pick, move }) {
    Object.assign(this, { element: $(id), spans: [], index: 0, move });
    this.element.addEventListener("pointerover", (event) => event.target.index >= 0 && hover(event.target.index));
    this.element.addEventListener("click", (event) => event.target.index >= 0 && pick(event.target.index));
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Enter") return pick(this.index);
      const ends = { Home: 0, End: this.spans.length }, steps = { ArrowLeft: -1, ArrowRight: 1 };
      const target = ends[event.key] ?? this.index + (steps[event.key] ?? this.to_line(event.key));
      if (Number.isNaN(target)) return;
      event.preventDefault();
      move(target);
      this.spans[this.index]?.scrollIntoView({ block: "nearest" });
    });
  }

  update(codes) { // characters are added or removed at the end
    while (this.spans.length > codes.length) this.spans.pop().remove();
    for (let i = this.spans.length; i < codes.length; i++) {
      const break_after = { "\n": "\n", " ": "\u200b" }[characters[codes[i]]] ?? "";
      this.spans.push(make("span", this.element, sign(codes[i]) + break_after));
      this.spans[i].index = i;
    }
  }

  clear() {
    this.spans = [];
    this.element.replaceChildren();
  }

  mark(name, index) { // one span has this class
    for (const span of this.element.querySelectorAll("." + name)) span.classList.remove(name);
    this.spans[index]?.classList.add(name);
  }

  choose(index, is_pinned) {
    this.index = index;
    this.mark("chosen", index);
    this.mark("pinned", is_pinned ? index : -1);
  }

  to_line(key) { // how far it is to the place above or below; NaN for another key
    const step = { ArrowUp: -1, ArrowDown: 1 }[key], { spans, index } = this;
    if (!step || !spans[index]) return NaN;
    const { offsetTop: top, offsetLeft: left } = spans[index], gap = (i) => Math.abs(spans[i].offsetLeft - left);
    let first = index;
    while (spans[first]?.offsetTop === top) first += step;
    let best = first;
    const line = spans[first]?.offsetTop;
    for (let i = first; spans[i]?.offsetTop === line && spans[i]; i += step) if (gap(i) < gap(best)) best = i;
    return spans[best] ? best - index : 0;
  }
}

// --------------------------------------------------------------------------------------------------- curves and PNGs

// Losses over steps, lists of [step, loss]. `guess` is the loss of guessing; the dot at step `marked` is larger.
function draw_curve(canvas, { training, evaluation }, guess, marked) {
  const context = canvas.getContext("2d");
  const width = Math.min(900, canvas.parentElement.clientWidth), height = 280;
  const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name);
  const points = [...training, ...evaluation], last = points.reduce((most, [step]) => Math.max(most, step), 1);
  const top = 1.08 * points.reduce((most, [, loss]) => Math.max(most, loss), guess);
  const x = (step) => 40 + ((width - 70) * step) / last, y = (loss) => height - 42 - ((height - 70) * loss) / top;
  const line = (name, thickness, dashes, corners) => {
    context.beginPath();
    for (const [step, loss] of corners) context.lineTo(x(step), y(loss));
    Object.assign(context, { strokeStyle: color(name), lineWidth: thickness }).setLineDash(dashes);
    context.stroke();
  };
  Object.assign(canvas, { width: 2 * width, height: 2 * height }).style.maxWidth = width + "px";
  context.scale(2, 2);
  Object.assign(context, { font: "13px system-ui, sans-serif", fillStyle: color("--ink"), textAlign: "center" });
  for (let loss = 0; loss < top; loss++) context.fillText(loss, 25, y(loss) + 4);
  for (let i = 0; i <= 4; i++) context.fillText(number(Math.round((last * i) / 4)), x((last * i) / 4), height - 24);
  context.fillText("optimizer steps", x(last / 2), height - 5);
  context.fillText("thin: training, thick with dots: evaluation, dashed: guessing evenly", width / 2, 14, width);
  line("--line", 1, [], [[0, top], [0, 0], [last, 0]]);
  line("--ink", 1.5, [6, 4], [[0, guess], [last, guess]]);
  line("--quiet", 1, [], training);
  line("--bar", 3, [], evaluation);
  context.fillStyle = color("--bar");
  for (const [step, loss] of evaluation) {
    context.beginPath();
    context.arc(x(step), y(loss), step === marked ? 8 : 4, 0, 7);
    context.fill();
  }
  const end = evaluation.length ? `The last evaluation loss is ${evaluation.at(-1)[1].toFixed(3)} nats.` : "";
  canvas.setAttribute("aria-label", `Losses over ${number(last)} steps. ${end}`);
}

function picture_of(element) { // a canvas with what an element shows: backgrounds, borders, canvases and words
  element.classList.add("whole"); // what is scrolled away, too
  const frame = element.getBoundingClientRect(), margin = 24;
  const canvas = make("canvas"), context = canvas.getContext("2d");
  const [width, height] = [Math.max(frame.width, element.scrollWidth), frame.height].map((size) => size + 2 * margin);
  Object.assign(canvas, { width: 2 * width, height: 2 * height });
  Object.assign(context, { imageSmoothingEnabled: false, fillStyle: getComputedStyle(document.body).backgroundColor });
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.setTransform(2, 0, 0, 2, 2 * (margin - frame.left), 2 * (margin - frame.top));
  draw_element(context, element);
  element.classList.remove("whole");
  return canvas;
}

function draw_element(context, element) {
  const style = getComputedStyle(element), line = parseFloat(style.borderTopWidth), range = document.createRange();
  for (const box of element.getClientRects()) {
    const area = [box.left, box.top, box.width, box.height];
    Object.assign(context, { fillStyle: style.backgroundColor, strokeStyle: style.borderTopColor, lineWidth: line });
    context.fillRect(...area);
    if (style.backgroundImage !== "none") draw_hatch(context, box);
    if (line > 0) context.strokeRect(...area);
    if (element.tagName === "CANVAS") context.drawImage(element, ...area);
  }
  for (const child of element.childNodes) {
    if (child.nodeType === Node.ELEMENT_NODE) draw_element(context, child);
    for (const word of child.nodeType === Node.TEXT_NODE ? child.data.matchAll(/[^\s\u200b]+/g) : []) {
      range.setStart(child, word.index);
      range.setEnd(child, word.index + word[0].length);
      const box = range.getBoundingClientRect();
      Object.assign(context, { font: style.font, fillStyle: style.color, textBaseline: "middle" });
      context.fillText(word[0], box.left, (box.top + box.bottom) / 2);
    }
  }
}

function draw_hatch(context, { left, top, right, bottom }) {
  context.save();
  context.beginPath();
  context.rect(left, top, right - left, bottom - top);
  context.clip();
  Object.assign(context, { strokeStyle: getComputedStyle(document.body).color, lineWidth: 0.5 });
  context.beginPath();
  for (let x = left - (bottom - top); x < right; x += 6) {
    context.moveTo(x, bottom);
    context.lineTo(x + bottom - top, top);
  }
  context.stroke();
  context.restore();
}

function make_save_buttons() {
  for (const [i, element] of document.querySelectorAll(".picture").entries()) {
    const button = make("button", null, "Save as PNG", "save");
    button.type = "button";
    button.addEventListener("click", () => picture_of(element).toBlob((blob) => {
      const link = make("a");
      link.href = URL.createObjectURL(blob);
      link.download = `${element.closest("section").id}-${i + 1}.png`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    }));
    element.after(button);
  }
}
