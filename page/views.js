// What the page shows, part by part, in the order of frame.html. gpt.js computes it, reading.js keeps it, and tools.js
// draws it.
"use strict";

const CAN_BE_WRITTEN = 500; // characters, each time that the button is pressed

let model = null; // none where it is too large for a page
let reading = null; // the text that all parts show
let is_read = false; // to its end: before, there is nothing to choose or to go on from
let surprises = []; // bits of each character; the first one has none
const chosen = { index: 0, is_pinned: false, layer: 0, head: 0 };

const hover = (index) => chosen.is_pinned || choose(index, false);
const pick = (index) => choose(index, !(chosen.is_pinned && chosen.index === index)); // a finger has no Escape key
const move = (index) => choose(index, chosen.is_pinned);
const texts = {
  surprise: new TextView("text", { hover, pick, move }),
  looked: new TextView("looked", { hover: say_weight, pick, move }),
  written: new TextView("written", { hover, pick, move }),
};

function choose(index, is_pinned) { // one character, in all parts
  if (!is_read) return;
  chosen.index = Math.max(0, Math.min(reading.codes.length - 1, index));
  chosen.is_pinned = is_pinned;
  for (const view of Object.values(texts)) view.choose(chosen.index, is_pinned);
  draw_guess();
  draw_attention();
  draw_lens();
}

// ------------------------------------------------------------------------------------------------------- 1. surprise

function draw_surprise() { // what is new
  const { codes } = reading, view = texts.surprise;
  for (const text of Object.values(texts)) text.update(codes);
  surprises.length = Math.min(surprises.length, codes.length);
  for (let i = surprises.length; i < codes.length; i++) {
    surprises[i] = i > 0 ? bits(reading.came(i)) : null;
    if (i > 0) paint(view.spans[i], shade(surprises[i] / 8));
  }
}

function draw_mean() {
  const scored = surprises.slice(1), mean = scored.reduce((a, b) => a + b, 0) / scored.length, guess = Math.log2(V);
  $("mean").textContent = scored.length === 0
    ? "This text has a single character, which is given. There is nothing to guess."
    : `Mean of ${counted(scored.length, "character")}: ${mean.toFixed(2)} bits (${(mean * Math.LN2).toFixed(2)} nats). ` +
      `Guessing evenly among the ${V} characters costs ${guess.toFixed(2)} bits (${Math.log(V).toFixed(2)} nats). ` +
      "The first character is given, so it has no surprise. The next few are hard: there is little to go by." +
      (surprises.length > B ? ` The model sees at most ${B} characters. Further on, it sees ${HALF} to ${B}.` : "");
}

function draw_legends() {
  const steps = [0, 2, 4, 6, 8].map((value) => [value === 8 ? "8 and more" : value, shade(value / 8)]);
  const guess = Math.log2(V);
  const blind = [["guessing evenly:"], [guess.toFixed(1), shade(guess / 8)], ["(1 bit = 0.69 nats)"]];
  legend($("legend"), "bits:", [...steps, ...blind]);
  const times = [["1/16 and less", 1 / 16], ["1/4", 1 / 4], ["1", 1], ["4", 4], ["16 and more", 16]];
  legend($("times"), "times uniform:", times.map(([words, value]) => [words, diverging(value)]));
}

function draw_guess() {
  const { index } = chosen, code = reading.codes[index];
  const pinned = chosen.is_pinned ? ", pinned" : "";
  const place = `Character ${number(index + 1)} of ${number(reading.codes.length)}${pinned}: `;
  if (index === 0) {
    $("chosen").textContent = `${place}${quoted(code)}. It is given, and not guessed.`;
    return $("guess").replaceChildren();
  }
  const { tokens, probabilities, came } = reading.guesses(index)[L];
  const before = reading.codes.slice(Math.max(0, index - 12), index).map(sign).join("");
  $("chosen").textContent =
    `${place}after “${index > 12 ? "…" : ""}${before}” came ${quoted(code)}. The model gave it ${percent(came)}: ` +
    `${bits(came).toFixed(2)} bits of surprise, or ${(bits(came) * Math.LN2).toFixed(2)} nats. The likeliest were:`;
  const shown = tokens.map((token, i) => [token, probabilities[i]]);
  if (!tokens.includes(code)) shown.push([code, came]);
  bars($("guess"), shown.map(([token, p]) => {
    const is_it = token === code;
    return { symbol: sign(token), share: p, words: percent(p) + (is_it ? " ◀ came" : ""), came: is_it };
  }));
}

function fill_surprise_table() {
  const header = ["position", "character", "bits", "nats", "probability", "likeliest"];
  table($("surprise-table"), header, reading.codes.map((code, i) => {
    if (i === 0) return [1, sign(code), "given", "", "", ""];
    const { tokens, probabilities, came } = reading.guesses(i)[L], nats = surprises[i] * Math.LN2;
    const likeliest = `${sign(tokens[0])}  ${percent(probabilities[0])}`;
    return [i + 1, sign(code), surprises[i].toFixed(2), nats.toFixed(2), percent(came), likeliest];
  }));
}

// ------------------------------------------------------------------------------------------------------ 2. attention

const map_buttons = []; // one for each head
let drawn_maps = null; // the window whose maps are on the page
let colored = []; // spans of the text that have a colour

function here() { // where the model stands for the guess of the chosen character, and what it sees from there
  const place = Math.max(0, chosen.index - 1), window = reading.window(place);
  return { place, window, row: place - window.start };
}

function weights_of(layer, head) { // of the row there: (row + 1)
  const { window, row } = here();
  return reading.attention(window, layer, row).subarray(head * (row + 1), (head + 1) * (row + 1));
}

function draw_attention() {
  const { index, layer, head } = chosen, { place, window, row } = here(), { spans } = texts.looked;
  for (const span of colored) ["style", "title"].forEach((name) => span.removeAttribute(name));
  colored = index === 0 ? [] : spans.slice(window.start, place + 1);
  texts.looked.mark("stand", index - 1);
  texts.looked.element.classList.toggle("partly", index > 0);
  $("looking").textContent = index === 0
    ? "The first character is given: nothing was guessed, so nothing was looked at. Choose another one."
    : `Before it guessed ${quoted(reading.codes[index])} (framed), it stood on ${quoted(reading.codes[place])} ` +
      `(dashed). From there, head ${head + 1} of block ${layer + 1} looked at:`;
  const weights = weights_of(layer, head), largest = weights.reduce((a, b) => Math.max(a, b));
  colored.forEach((span, s) => {
    paint(span, shade(weights[s] / largest));
    span.title = weight_in_words(s, weights[s], window, row);
  });
  say_weight(window.start + weights.indexOf(largest));
  if (!is_writing) draw_maps();
  const top = (100 * (row + 0.5)) / window.length + "%";
  for (const marker of document.querySelectorAll(".marker")) marker.style.top = top;
  if ($("attention-table").parentElement.open) fill_attention_table();
}

function weight_in_words(s, weight, window, row) {
  const position = window.start + s;
  return `${quoted(reading.codes[position])}, character ${number(position + 1)}: weight ${weight.toPrecision(3)}, ` +
    `${factor(weight * (row + 1))} times uniform`;
}

function say_weight(position) { // one weight of the row
  const { window, row } = here(), s = position - window.start;
  const weights = weights_of(chosen.layer, chosen.head);
  const words = s < 0 ? "This character is too far back: the model couldn't see it."
    : s > row ? "This character comes later: nobody sees what comes later."
      : `At ${weight_in_words(s, weights[s], window, row)}.`;
  $("cell").textContent = chosen.index === 0 ? "" : words;
}

function draw_maps() { // of all heads, if the page doesn't have them yet
  const { window } = here(), key = [reading, window.start, window.length, dark.matches];
  if (key.every((value, i) => value === drawn_maps?.[i])) return draw_large();
  drawn_maps = key;
  const R = window.length, top = window.first - window.start; // the rows above are those of the window before
  const colors = color_table(), compared = R - Math.max(1, top), firsts = []; // on row 0, there is nothing to compare
  let error = 0;
  for (let layer = 0; layer < L; layer++) {
    const images = Array.from({ length: H }, () => new ImageData(R, R)), first = new Array(H).fill(0);
    const pixels = images.map((image) => new Uint32Array(image.data.buffer));
    for (let row = top; row < R; row++) {
      const weights = reading.attention(window, layer, row), S = row + 1;
      for (let head = 0; head < H; head++) {
        let sum = 0;
        for (let s = 0; s < S; s++) {
          const weight = weights[head * S + s], step = Math.round(128 + 32 * Math.log2(weight * S));
          pixels[head][row * R + s] = colors[Math.max(0, Math.min(256, step))];
          sum += weight;
        }
        error = Math.max(error, Math.abs(sum - 1));
        if (row > 0) first[head] += weights[head * S] / compared;
      }
    }
    images.forEach((image, head) => {
      const { canvas, words } = map_buttons[layer * H + head];
      Object.assign(canvas, { width: R, height: R }).getContext("2d").putImageData(image, 0, 0);
      words.textContent = `block ${layer + 1}, head ${head + 1}; first: ${percent(first[head])}`;
    });
    firsts.push(...first);
  }
  say_sums(window, error, firsts);
  draw_large();
}

function say_sums({ start, first, length }, error, firsts) {
  let words = `Measured here: every row adds up to 1 (the largest error is ${error.toExponential(0)}), ` +
    "and nothing is above the diagonal.";
  if (first > start)
    words += " The top of the map is empty: for these places, an earlier map counts, which goes further back.";
  if (length > 1) {
    const top = Math.max(1, first - start);
    let even = 0;
    for (let row = top; row < length; row++) even += 1 / (row + 1) / (length - top);
    const greatest = Math.max(...firsts), which = firsts.indexOf(greatest);
    words += " “First” is the share of its attention that a head gives to the first character, on average. " +
      `If all characters counted alike, it would be ${percent(even)}. A head that finds nothing may look there. ` +
      `The greatest share is ${percent(greatest)}, of head ${(which % H) + 1} in block ${Math.floor(which / H) + 1}.`;
  }
  $("sums").textContent = words;
}

function draw_large() {
  const small = map_buttons[chosen.layer * H + chosen.head], { width, height } = small.canvas;
  for (const { button } of map_buttons) button.setAttribute("aria-pressed", String(button === small.button));
  Object.assign($("large"), { width, height }).getContext("2d").drawImage(small.canvas, 0, 0);
  $("head-title").textContent = `Enlarged: block ${chosen.layer + 1}, head ${chosen.head + 1}`;
  $("large").setAttribute("aria-label", `Attention map: ${small.words.textContent}. Up and down choose the row.`);
}

function make_maps() {
  $("maps").style.gridTemplateColumns = `repeat(${H}, minmax(4.5rem, 1fr))`;
  for (let i = 0; i < L * H; i++) {
    const button = make("button", $("maps")), frame = make("span", button, "", "frame"), canvas = make("canvas", frame);
    make("span", frame, "", "marker");
    map_buttons.push({ button, canvas, words: make("span", button) });
    button.addEventListener("click", () => {
      Object.assign(chosen, { layer: Math.floor(i / H), head: i % H });
      draw_attention();
    });
  }
  $("large").addEventListener("pointermove", (event) => { // a row chooses, a column is told
    const { index, position } = pointed(event);
    hover(index);
    say_weight(position);
  });
  $("large").addEventListener("click", (event) => pick(pointed(event).index));
  $("large").addEventListener("keydown", (event) => {
    if (event.key === "Enter") return pick(chosen.index);
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    move(chosen.index + step);
  });
}

function pointed(event) { // on the enlarged map: the character that this row guesses, and the place of this column
  const { left, top, width, height } = $("large").getBoundingClientRect(), { window } = here();
  const at = (share) => window.start + Math.floor(share * window.length);
  const place = Math.max(window.first, at((event.clientY - top) / height)); // or another window's map would come
  return { index: place + 1, position: at((event.clientX - left) / width) };
}

function fill_attention_table() {
  const { window, row } = here(), header = ["position", "character", "weight", "times uniform"];
  const weights = chosen.index === 0 ? [] : [...weights_of(chosen.layer, chosen.head)];
  table($("attention-table"), header, weights.map((weight, s) => {
    const position = window.start + s;
    return [position + 1, sign(reading.codes[position]), weight.toPrecision(3), factor(weight * (row + 1))];
  }));
}

// --------------------------------------------------------------------------------------------------- 3. layer by layer

const after_block = (i) => (i === 0 ? "before block 1" : `after block ${i}`);

function draw_lens() {
  const none = "The first character is given, and not guessed.";
  if (chosen.index === 0) return $("lens").replaceChildren(make("p", null, none));
  const guesses = reading.guesses(chosen.index);
  const places = guesses[0].tokens.map((_, i) => (i === 0 ? "likeliest" : `${i + 1}.`));
  const header = ["the stream", ...places, `what came: ${sign(reading.codes[chosen.index])}`];
  const body = table($("lens"), header, guesses.map(({ tokens, probabilities, came }, i) => {
    const cells = tokens.map((token, k) => `${sign(token)}  ${percent(probabilities[k])}`);
    return [after_block(i) + (i === L ? ": its guess" : ""), ...cells, percent(came)];
  }));
  guesses.forEach(({ probabilities, came }, i) =>
    [...probabilities, came].forEach((p, k) => paint(body.rows[i].cells[k + 1], shade(p))));
}

function draw_agreement() {
  const guessed = reading.codes.length - 1, agreed = new Array(L + 1).fill(0);
  const count = (token, layer, all) => (agreed[layer] += token === all[L]);
  for (let i = 1; i <= guessed; i++) reading.likeliest(i).forEach(count);
  const shares = agreed.map((count, i) => `${after_block(i)} ${percent(count / guessed)}`);
  $("agreement").textContent = guessed === 0 ? ""
    : `How often in this text the likeliest character is the final one already: ${shares.join(", ")}.`;
}

// ------------------------------------------------------------------------------------------------------------- 4. live

const SLICE = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 40; // milliseconds between two pictures
let is_writing = false;
let prompt_length = 0;
const origin = data.file === null ? "given to look.py" : `the beginning of the evaluation text, from ${data.file}`;
let source = origin; // of what was read
let random_states = []; // after the prompt and after each written character: a step back takes its random number back

function settings() {
  const [temperature, top_k, top_p] = ["temperature", "top_k", "top_p"].map((id) => Number($(id).value));
  return { temperature, top_k: top_k === V ? null : top_k, top_p: top_p === 1 ? null : top_p };
}

function next_draw() { // the logits and probabilities of the next character, the random number, and what it falls on
  const { temperature, top_k, top_p } = settings(), logits = reading.logits(reading.codes.length)[L];
  const probabilities = probabilities_of(logits, temperature, top_k, top_p);
  const [drawn, state] = mulberry32(random_states.at(-1));
  return { logits, probabilities, drawn, state, token: choose_token(probabilities, drawn) };
}

function step() {
  const { state, token } = next_draw();
  random_states.push(state);
  reading.push(token);
}

function draw_live() {
  if (!is_read) return;
  const { logits, probabilities, drawn, token } = next_draw(), { temperature, top_k, top_p } = settings();
  $("temperature-value").textContent = temperature === 0 ? "0: always the likeliest" : temperature;
  $("top_k-value").textContent = top_k ?? `${V}: all`;
  $("top_p-value").textContent = top_p ?? "1: all";
  draw_candidates(logits, probabilities, token);
  const kept = probabilities.filter((p) => p > 0).length;
  const choices = 2 ** probabilities.reduce((sum, p) => sum + (p > 0 ? p * bits(p) : 0), 0);
  $("choices").textContent =
    `The next character is as open as a choice among ${choices.toFixed(choices < 10 ? 1 : 0)} equally likely ones ` +
    `(2 to the power of the entropy). ${number(kept)} of ${number(V)} characters can be drawn.`;
  draw_wheel(probabilities, drawn, token);
  $("back").disabled = is_writing || reading.codes.length <= prompt_length;
  $("step").disabled = $("read").disabled = is_writing;
  $("write").disabled = false;
  $("write").textContent = is_writing ? "Stop" : `Write ${CAN_BE_WRITTEN} characters`;
}

function draw_candidates(logits, probabilities, token) { // the same five at any temperature, in the same places
  const plain = softmax(Float64Array.from(logits));
  const uncut = probabilities_of(logits, settings().temperature, null, null);
  const order = ranked(plain), five = order.slice(0, 5), others = order.slice(5);
  const rest = (p) => others.reduce((sum, code) => sum + p[code], 0); // 1 minus the five is no 0 where all are cut
  const row = (symbol, shown, whole, before, is_next) => ({
    symbol, before, came: is_next, is_cut: shown === 0, share: shown || whole,
    words: (shown === 0 && whole > 0 ? "cut" : percent(shown)) + (is_next ? " ◀ next" : ""),
  });
  const rows = five.map((code) => row(sign(code), probabilities[code], uncut[code], plain[code], code === token));
  if (V > 5) rows.push(row("others", rest(probabilities), rest(uncut), rest(plain), !five.includes(token)));
  bars($("candidates"), rows);
}

function draw_wheel(probabilities, drawn, token) { // side by side, as choose_token goes through them
  const wheel = $("wheel"), order = ranked(probabilities).filter((code) => probabilities[code] > 0);
  wheel.replaceChildren();
  let end = 0;
  for (const code of order) {
    const p = probabilities[code], is_it = code === token;
    if (p > 0.002 || is_it) { // the others are too narrow to be seen
      const segment = make("span", wheel, p > 0.03 ? sign(code) : "", is_it ? "symbol drawn" : "symbol");
      Object.assign(segment.style, { left: 100 * end + "%", width: 100 * p + "%" });
      paint(segment, shade(0.15 + 0.85 * p));
    }
    end += p;
  }
  make("span", wheel, "▼", "arrow").style.left = 100 * drawn + "%";
  wheel.setAttribute("aria-label", `The next random number is ${drawn.toFixed(4)}. It falls on ${quoted(token)}.`);
}

function follow(are_all = true) { // the end of the text has changed; all parts are drawn, or this one alone
  const { spans, element } = texts.written, known = spans.length;
  texts.written.update(reading.codes);
  say_source();
  for (const span of spans.slice(Math.max(known, prompt_length))) span.className = "new";
  draw_live();
  if (are_all) {
    draw_surprise();
    choose(chosen.is_pinned ? chosen.index : reading.codes.length - 1, chosen.is_pinned);
    if (!is_writing) draw_whole_text();
  }
  element.scrollTop = element.scrollHeight;
}

function say_source() { // at the top of the page
  const written = reading.codes.length - prompt_length;
  $("source").textContent = source + (written > 0 ? `, then ${counted(written, "character")} by the model` : "");
}

function draw_whole_text() { // what takes a while
  draw_mean();
  draw_agreement();
  if ($("surprise-table").parentElement.open) fill_surprise_table();
}

async function write() {
  if (is_writing) return void (is_writing = false);
  is_writing = true;
  const began = performance.now(), before = reading.codes.length, goal = before + CAN_BE_WRITTEN;
  for (let slice = 0; is_writing && reading.codes.length < goal; slice++) {
    const until = performance.now() + SLICE;
    do step(); while (reading.codes.length < goal && performance.now() < until);
    follow(slice % 8 === 0);
    const speed = (reading.codes.length - before) / ((performance.now() - began) / 1000);
    $("speed").textContent = `${speed.toFixed(0)} characters per second`;
    await pause();
  }
  is_writing = false;
  follow();
}

function one_back() {
  random_states.pop();
  reading.pop();
  follow();
}

async function read_prompt() {
  const text = $("prompt").value || (code_of.has("\n") ? "\n" : characters[0]);
  const unknown = [...new Set(text)].filter((character) => !code_of.has(character));
  const listed = unknown.map((character) => "“" + visible(character) + "”").join(", ");
  $("error").textContent = unknown.length ? `${listed}: not in the training text, so the model can't read it.` : "";
  if (unknown.length) return;
  source = text === data.text ? origin : "typed into this page";
  await read(encode(text));
}

function make_live() {
  $("top_k").max = $("top_k").value = V;
  $("prompt").value = data.text;
  $("prompt-form").addEventListener("submit", (event) => {
    event.preventDefault();
    read_prompt();
  });
  for (const id of ["temperature", "top_k", "top_p"]) $(id).addEventListener("input", draw_live);
  $("seed").addEventListener("input", () => { // from here on
    random_states = random_states.fill(Number($("seed").value) | 0);
    draw_live();
  });
  $("write").addEventListener("click", write);
  $("step").addEventListener("click", () => {
    step();
    follow();
  });
  $("back").addEventListener("click", one_back);
}

// --------------------------------------------------------------------------------------------------- 5. how it learned

function draw_learned() {
  const { samples, evaluation } = data.learned;
  const [step, text] = samples[Number($("moment").value)] ?? [];
  draw_curve($("curve"), data.learned, Math.log(V), step);
  if (step === undefined) return;
  const loss = evaluation.find(([at]) => at === step)?.[1];
  const words = loss === undefined ? "" : `: loss ${loss.toFixed(3)} nats, or ${(loss / Math.LN2).toFixed(3)} bits`;
  $("moment-value").textContent = `at step ${number(step)}${words}`;
  $("sample").textContent = text;
}

function make_learned() {
  $(data.learned ? "no-curve" : "curves").hidden = true;
  if (!data.learned) return;
  const { samples, evaluation } = data.learned, max = Math.max(0, samples.length - 1);
  const mine = samples.findLastIndex(([step]) => step <= (data.step ?? Infinity)); // of the model that the page carries
  Object.assign($("moment"), { max, value: Math.max(0, mine) }).addEventListener("input", draw_learned);
  $("samples").hidden = samples.length === 0;
  const rows = evaluation.map(([step, loss]) => [number(step), loss.toFixed(4), (loss / Math.LN2).toFixed(4)]);
  table($("losses"), ["step", "evaluation loss, nats", "bits"], rows);
  draw_learned();
}

// ------------------------------------------------------------------------------------------------- the whole page

function check() {
  const difference = greatest_difference(model), is_right = difference <= 1e-4; // what isn't a number isn't right
  $("check").textContent = is_right
    ? `✓ Checked: for the first ${data.check.length} characters of the text, this browser computes what PyTorch did. ` +
      `A logit here differs from PyTorch's by at most ${difference.toExponential(0)} (0.0001 is allowed).`
    : `✗ Don't trust this page: its logits differ from PyTorch's by up to ${difference}. The file was changed, or ` +
      "this browser computes otherwise. Make the page again with look.py.";
  $("check").classList.toggle("wrong", !is_right);
}

async function read(codes) {
  const mine = new Reading(model);
  is_writing = is_read = false;
  for (const id of ["write", "step", "back"]) $(id).disabled = true;
  for (const view of Object.values(texts)) view.clear();
  [reading, surprises, colored, prompt_length] = [mine, [], [], codes.length];
  random_states = [Number($("seed").value) | 0];
  await mine.read(codes, () => reading === mine && (draw_surprise(), true));
  if (reading === mine) show();
}

function show() { // a text that has been read
  is_read = true;
  say_source();
  draw_whole_text();
  choose(surprises.indexOf(surprises.reduce((a, b) => Math.max(a, b), 0)), false); // the most surprising one
  if (model) draw_live();
}

function redraw() { // in other colours
  surprises = [];
  draw_legends();
  draw_surprise();
  choose(chosen.index, chosen.is_pinned);
  if (model) draw_live();
  if (data.learned) draw_learned();
}

async function start() {
  const trained = data.step ? ` It was trained for ${counted(data.step, "step")}.` : "";
  const blocks = `${counted(L, "block")} of ${counted(H, "head")}`;
  $("run").textContent = data.run || "not known";
  $("snapshot").textContent = data.snapshot;
  $("model").textContent = `It is a GPT with ${number(data.parameters)} parameters in ${blocks}. ` +
    `It knows ${number(V)} characters, and sees up to ${number(B)} at a time.${trained}`;
  draw_legends();
  make_maps();
  make_learned();
  make_save_buttons();
  $("surprise-table").parentElement.addEventListener("toggle", fill_surprise_table);
  $("attention-table").parentElement.addEventListener("toggle", fill_attention_table);
  document.addEventListener("keydown", (event) => event.key === "Escape" && choose(chosen.index, false));
  dark.addEventListener("change", redraw);
  if (data.weights) {
    model = new GPT(config, nested(data.weights));
    check();
    make_live();
    await read(encode(data.text));
  } else {
    $("check").textContent = "This model is too large for a page. What parts 1, 2 and 3 show was computed by PyTorch " +
      "when the page was made, for this one text.";
    const how = "Only a model of at most 10 million parameters can write in a page. For this one: python generate.py";
    $("live-body").replaceChildren(make("p", null, how));
    reading = new Computed(data.computed, encode(data.text));
    prompt_length = reading.codes.length;
    draw_surprise();
    show();
  }
  document.body.dataset.ready = "yes";
}

start();
