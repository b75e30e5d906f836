// The forward pass of model.py and the draw of sampling.py in another language, in their order and with their names.
//
// A tensor is a Float32Array, row after row: (T, C) has T rows of C numbers. There is one sequence, so there is no B;
// nothing is trained, so there is no dropout. `part` holds the weights of a module, by the names of a snapshot.
// Legend: T tokens, S keys that a query can see, C n_embd, nh n_head, hs = C / nh, V vocab_size.
"use strict";

function CausalSelfAttention(x, T, part, nh, cache, start) { // (T, C) -> (T, C); x begins at position `start`
  const C = x.length / T, hs = C / nh, y = new Float32Array(T * C);
  const qkv = linear(x, T, part.c_attn); // (T, 3C): queries, keys and values side by side
  for (let t = 0; t < T; t++) {
    const [q, k, v] = [0, 1, 2].map((i) => qkv.subarray((3 * t + i) * C, (3 * t + i + 1) * C)); // (C) each
    const S = start + t + 1; // later keys aren't in the cache yet, so nothing has to be hidden
    cache.k.set(k, (S - 1) * C);
    cache.v.set(v, (S - 1) * C);
    const weights = (cache.attention[S - 1] = new Float32Array(nh * S)); // (nh, S), kept to be looked at
    for (let h = 0; h < nh; h++) { // softmax(q kᵀ / √hs) v
      const row = weights.subarray(h * S, (h + 1) * S);
      for (let s = 0; s < S; s++) {
        let score = 0;
        for (let i = h * hs; i < (h + 1) * hs; i++) score += q[i] * cache.k[s * C + i];
        row[s] = score / Math.sqrt(hs);
      }
      softmax(row);
      for (let s = 0; s < S; s++)
        for (let i = h * hs; i < (h + 1) * hs; i++) y[t * C + i] += row[s] * cache.v[s * C + i];
    }
  }
  return linear(y, T, part.c_proj);
}

function MLP(x, T, part) { // (T, C) -> (T, C)
  return linear(gelu(linear(x, T, part.c_fc)), T, part.c_proj);
}

function Block(x, T, part, nh, cache, start) { // (T, C) -> (T, C)
  x = add(x, CausalSelfAttention(layer_norm(x, T, part.ln_1), T, part.attn, nh, cache, start));
  return add(x, MLP(layer_norm(x, T, part.ln_2), T, part.mlp));
}

class GPT {
  constructor(config, part) {
    Object.assign(this, { config, part });
  }

  new_cache() { // for each layer, room for keys and values, (block_size, C) each, and a list of attention weights
    const { n_layer, n_embd: C, block_size } = this.config, room = () => new Float32Array(block_size * C);
    return Array.from({ length: n_layer }, () => ({ k: room(), v: room(), attention: [] }));
  }

  // T tokens from position `start` on -> the stream before the first block and after each one, (T, C) each.
  // The cache is filled up to `start`. model.py returns ln_f of the last one.
  hidden_states(idx, cache, start) {
    const T = idx.length, { n_embd: C, n_head: nh } = this.config, { wte, wpe, h } = this.part;
    const embedded = new Float32Array(T * C), streams = [embedded];
    for (let t = 0; t < T; t++)
      for (let i = 0; i < C; i++) embedded[t * C + i] = wte.weight[idx[t] * C + i] + wpe.weight[(start + t) * C + i];
    cache.forEach((keys, layer) => streams.push(Block(streams[layer], T, h[layer], nh, keys, start)));
    return streams;
  }

  lm_head(x, T) { // (T, C) -> logits (T, V), with ln_f before it: for the stream after any block
    return linear(layer_norm(x, T, this.part.ln_f), T, { weight: this.part.wte.weight }); // tied
  }
}

function linear(x, T, { weight, bias }) { // x Wᵀ + bias: (T, I) and W (O, I) -> (T, O)
  const I = x.length / T, O = weight.length / I, y = new Float32Array(T * O);
  for (let t = 0; t < T; t++) {
    for (let o = 0; o < O; o++) {
      let sum = bias ? bias[o] : 0;
      for (let i = 0; i < I; i++) sum += x[t * I + i] * weight[o * I + i];
      y[t * O + o] = sum;
    }
  }
  return y;
}

function layer_norm(x, T, { weight, bias }) { // each row gets mean 0 and variance 1, then weight and bias
  const C = x.length / T, y = new Float32Array(T * C);
  for (let t = 0; t < T; t++) {
    let mean = 0, variance = 0;
    for (let i = 0; i < C; i++) mean += x[t * C + i] / C;
    for (let i = 0; i < C; i++) variance += (x[t * C + i] - mean) ** 2 / C;
    const scale = 1 / Math.sqrt(variance + 1e-5);
    for (let i = 0; i < C; i++) y[t * C + i] = (x[t * C + i] - mean) * scale * weight[i] + (bias ? bias[i] : 0);
  }
  return y;
}

const gelu = (x) => x.map((v) => 0.5 * v * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (v + 0.044715 * v ** 3))));
const add = (x, y) => x.map((v, i) => v + y[i]);

function softmax(row) { // in place; the largest becomes 0 first, so that nothing overflows
  let largest = -Infinity, sum = 0;
  for (const v of row) largest = Math.max(largest, v);
  for (let i = 0; i < row.length; i++) sum += row[i] = Math.exp(row[i] - largest);
  for (let i = 0; i < row.length; i++) row[i] /= sum;
  return row;
}

// ------------------------------------------------------------------------------------------------------- sampling.py

// What choose_token draws from: (V) -> probabilities (V). With null for top_k or top_p, that one cuts nothing.
function probabilities_of(logits, temperature, top_k, top_p) {
  const order = ranked(logits), largest = logits[order[0]];
  // 1. Greedy.
  if (temperature < 1e-30) return Float64Array.from(logits, (_, token) => (token === order[0] ? 1 : 0));
  // 2. Temperature.
  const scores = Float64Array.from(logits, (v) => (v - largest) / temperature);
  // 3. Top-k. What equals the k-th stays.
  const kth = scores[order[Math.min(top_k ?? Infinity, order.length) - 1]];
  const probabilities = softmax(scores.map((v) => (v < kth ? -Infinity : v)));
  // 4. Top-p: a token stays while the likelier ones together haven't reached p.
  let likelier = 0, kept = 0;
  for (const token of order) {
    const p = probabilities[token];
    if (likelier >= Math.max(top_p ?? Infinity, 1e-30)) probabilities[token] = 0;
    likelier += p;
    kept += probabilities[token];
  }
  return probabilities.map((p) => p / kept);
}

// The probabilities stand side by side, the largest first, from 0 to 1; `drawn`, from 0 to below 1, falls on a token.
function choose_token(probabilities, drawn) {
  const order = ranked(probabilities).filter((token) => probabilities[token] > 0);
  let end = 0;
  return order.find((token) => drawn < (end += probabilities[token])) ?? order.at(-1); // sums are rounded
}

const ranked = (values) => Array.from(values.keys()).sort((a, b) => values[b] - values[a]); // tokens, the largest first

function mulberry32(state) { // -> [a number from 0 to below 1, the next state]; integers, so the same in every browser
  const next = (state + 0x6d2b79f5) | 0;
  let z = Math.imul(next ^ (next >>> 15), next | 1);
  z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
  return [((z ^ (z >>> 14)) >>> 0) / 4294967296, next];
}
