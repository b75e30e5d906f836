// A text that the model has read: the logits after each block and the attention weights, at each character.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const config = data.config;
const characters = [...data.vocabulary]; // by code points, as Python counts
const code_of = new Map(characters.map((character, code) => [character, code]));
const V = characters.length, L = config.n_layer, H = config.n_head, B = config.block_size;
const HALF = Math.max(1, B >> 1); // of a full context, what moves to the front
const CHUNK = 16; // characters that are read at a time; in between, the browser can draw

const encode = (text) => [...text].map((character) => code_of.get(character));
const pause = () => new Promise((resolve) => setTimeout(resolve));

const float_of_half = Float32Array.from({ length: 65536 }, (_, half) => { // sign, 5 bits of exponent, 10 of fraction
  const sign = half >> 15 ? -1 : 1, exponent = (half >> 10) & 31, fraction = (half & 1023) / 1024;
  return sign * (exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14);
});

function unpack(base64, dtype) { // what data.py's to_base64 has written -> Float32Array
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  if (dtype === "float32") return new Float32Array(bytes.buffer);
  return Float32Array.from(new Uint16Array(bytes.buffer), (half) => float_of_half[half]);
}

function nested(weights) { // {"h.0.ln_1.weight": ...} -> {h: {0: {ln_1: {weight: ...}}}}
  const tree = {};
  for (const [name, packed] of Object.entries(weights)) {
    const path = name.split("."), last = path.pop();
    path.reduce((node, key) => (node[key] ??= {}), tree)[last] = unpack(packed, data.dtype);
  }
  return tree;
}

class Reading { // read in this page, in windows as GPT.stream has them
  constructor(model) {
    this.model = model;
    this.codes = [];
    this.windows = []; // each with its first position, the first that it counts for, its cache, and at each position
    // the logits after each block
    this.owner = []; // for each position, the number of the window that counts
  }

  open_window(start) {
    this.windows.push({ start, first: this.owner.length, cache: this.model.new_cache(), rows: [] });
  }

  extend(codes) { // the last window reads on
    const window = this.windows.at(-1), T = codes.length;
    const streams = this.model.hidden_states(codes, window.cache, window.rows.length);
    const logits = streams.map((x) => this.model.lm_head(x, T)); // (T, V) each
    for (let t = 0; t < T; t++) window.rows.push(logits.map((all) => all.subarray(t * V, (t + 1) * V)));
    while (this.owner.length < window.start + window.rows.length) this.owner.push(this.windows.length - 1);
  }

  // Windows overlap by half, and the last one is the context that GPT.stream has: the writing goes on as it does there.
  async read(codes, progress) { // progress() tells whether to go on
    const starts = [];
    for (let start = codes.length - HALF; codes.length > B && start > 0; start -= B - HALF + 1) starts.unshift(start);
    starts.unshift(0);
    for (const [k, start] of starts.entries()) {
      this.open_window(start);
      const end = k + 1 < starts.length ? starts[k + 1] + HALF - 1 : codes.length;
      for (let from = start; from < end; from += CHUNK) {
        this.extend(codes.slice(from, Math.min(end, from + CHUNK)));
        this.codes = codes.slice(0, this.owner.length);
        if (!progress()) return;
        await pause();
      }
    }
  }

  push(code) { // GPT.stream: when the context is full, its last half is read again
    this.codes.push(code);
    const is_full = this.codes.length - this.windows.at(-1).start > B;
    if (is_full) this.open_window(this.codes.length - HALF);
    this.extend(is_full ? this.codes.slice(-HALF) : [code]);
  }

  pop() {
    this.codes.pop();
    this.owner.pop();
    this.windows.length = this.owner.at(-1) + 1;
    const window = this.windows.at(-1);
    window.rows.length = this.codes.length - window.start; // the cache's later entries will be written over
  }

  window(position) { // what the model saw there: where that begins, where its own places begin, and how long it is
    const { start, first, rows, cache } = this.windows[this.owner[position]];
    return { start, first, length: rows.length, cache };
  }

  attention(window, layer, row) { // (nh, row + 1)
    return window.cache[layer].attention[row];
  }

  logits(index) { // for what follows `index` characters, after each block: (V) each
    const { start, rows } = this.windows[this.owner[index - 1]];
    return rows[index - 1 - start];
  }

  came(index) { // the probability that the character `index` got
    return softmax(Float64Array.from(this.logits(index)[L]))[this.codes[index]];
  }

  guesses(index) { // of the character `index`, after each block: five likeliest, their probabilities, and its own
    return this.logits(index).map((logits) => {
      const p = softmax(Float64Array.from(logits)), tokens = ranked(p).slice(0, 5);
      return { tokens, probabilities: tokens.map((token) => p[token]), came: p[this.codes[index]] };
    });
  }

  likeliest(index) { // after each block
    return this.logits(index).map((logits) => logits.indexOf(logits.reduce((a, b) => Math.max(a, b))));
  }
}

class Computed { // read by data.py, because the model is too large for a page; one window
  constructor({ tokens, probabilities, following, attention }, codes) {
    Object.assign(this, { tokens, probabilities, following, codes, weights: unpack(attention, "float16") });
    this.only_window = { start: 0, first: 0, length: codes.length };
  }

  window() {
    return this.only_window;
  }

  attention(window, layer, row) {
    const offset = H * (row + 1) * ((L * row) / 2 + layer); // L H (1 + 2 + ... + row) before this row
    return this.weights.subarray(offset, offset + H * (row + 1));
  }

  came(index) {
    return this.following[index - 1][L];
  }

  guesses(index) {
    const [probabilities, following] = [this.probabilities[index - 1], this.following[index - 1]];
    return this.tokens[index - 1].map((tokens, i) => ({ tokens, probabilities: probabilities[i], came: following[i] }));
  }

  likeliest(index) {
    return this.tokens[index - 1].map((tokens) => tokens[0]);
  }
}

function greatest_difference(model) { // between torch's logits and this page's
  const { length, logits } = data.check, expected = unpack(logits, "float32");
  const x = model.hidden_states(encode(data.text).slice(0, length), model.new_cache(), 0)[L];
  return model.lm_head(x, length).reduce((most, value, i) => Math.max(most, Math.abs(value - expected[i])), 0);
}
