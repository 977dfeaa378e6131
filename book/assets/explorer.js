// The explorer of "How many facts fit in my layer": sliders, the bounds at their sizes in a chart, and measured points near them.
// The formulas are those of attnmem.core.bounds and counts; tests/browser compares the two.

// Rank of the derivative of k heads that cancel; m dimensions tell tokens apart, r is the logits' rank.
function group_rank(k, m, d, r) {
  const p = Math.min(k - 1, m);
  const choose2 = (x) => (x > 1 ? (x * (x - 1)) / 2 : 0);
  return p * r * (m + d - r) - choose2(p) * r - choose2(p - m + r) * (d - r) + m;
}

// The largest sum of these ranks over H heads in groups of nearly equal size.
function floor_of(H, m, d, r) {
  const rank = (k) => group_rank(k, m, d, r);
  let best = 0;
  for (let groups = 1; groups <= H; groups++) {
    const small = Math.floor(H / groups);
    const larger = H % groups;
    best = Math.max(best, larger * rank(small + 1) + (groups - larger) * rank(small));
  }
  return best;
}

// Layers with values as wide as heads; s dimensions of what a layer writes are read behind it.
function deep_ceiling(L, H, d_h, d) {
  const r = Math.min(d_h, d);
  let [s, total] = [1, d];
  for (let layer = 0; layer < L; layer++) {
    const v = Math.min(r, s);
    total += H * (r * (2 * d - r) + v * (d + s - v));
    s = Math.min(d, s + H * (v + 2 * r));
  }
  return total;
}

// Every count, or in words the condition that these sizes break.
function counted({ H, n, d_h, d, L, S, N }) {
  const r = Math.min(d_h, d);
  const shared = Math.min(d_h, n - 1); // the logits' rank on one context
  const weights = H * d * (2 * d_h + 1); // with one output
  const units = Math.floor((weights + H) / ((n + 1) * d + 2)); // in a ReLU network of as many parameters
  const mixed = (count) => (n < 2 ? "needs n ≥ 2" : count);
  const narrow = (count) => (d_h > d ? "needs d_h ≤ d" : count); // heads, as Dana et al. have them
  const own_floor = floor_of(H, d, d, r);
  const own_ceiling = H * (r * (2 * d - r) + d);
  const all_layers = deep_ceiling(L, H, d_h, d);
  const linear = n < 2; // softmax has nothing to choose
  return {
    floor: linear ? d : own_floor,
    ceiling: linear ? d : own_ceiling,
    layers_ceiling: linear ? d : all_layers,
    edits: linear ? d : H * d,
    weights,
    mha_parameters: weights + H + 1,
    mha_capacity: n < d ? H * (Math.min(n, d_h) - 1) + 1 : "needs n < d",
    scalar_capacity: d_h >= 2 && n >= 3 && n <= d ? H * (d - 1) : "needs 3 ≤ n ≤ d, d_h ≥ 2",
    affine_rank: H * (d - 1) + 1,
    own_context_rank: mixed(H * d),
    own_context_floor: mixed(own_floor),
    own_context_ceiling: mixed(own_ceiling),
    shared_context_rank: H * (n - 1) + 1,
    shared_context_floor: mixed(n > d ? own_floor : floor_of(H, n - 1, d, shared) + 1),
    shared_context_ceiling: n > d ? "needs n ≤ d" : H * (shared * (n - 1 + d - shared) + n - 1) + 1,
    deep_ceiling: mixed(all_layers),
    aot_capacity: narrow(H * d_h + d),
    previous_aot_capacity: d_h <= n && n <= d ? H * (d_h - 1) + 1 : "needs d_h ≤ n ≤ d",
    aot_parameters: narrow(d * (S + 2 * N + 4 * d_h * H)),
    relu_capacity: units > 0 ? units * (d + 2) + 1 : "not one unit fits",
  };
}

// The price of a label of N classes, between those of the library, a cubic in the logarithm of N.
function class_price(prices, N) {
  const next = prices.findIndex(([classes]) => classes >= N);
  if (prices[next][0] === N) return prices[next][1];
  const first = Math.min(Math.max(next - 2, 0), prices.length - 4);
  const near = prices.slice(first, first + 4);
  const share = (a, b) => Math.log(N / b) / Math.log(a / b);
  const weight = ([a]) => near.reduce((product, [b]) => (a === b ? product : product * share(a, b)), 1);
  return near.reduce((sum, point) => sum + weight(point) * point[1], 0);
}

// The point of that kind with the nearest sizes, by their ratios; none is off by more than two.
function nearest(points, kind, sizes) {
  const names = ["H", "d", "d_h", "N", kind === "classes" ? "n" : "S"];
  const off = (point) => names.map((name) => Math.abs(Math.log2(point[name] / sizes[name])));
  const sum = (point) => off(point).reduce((a, b) => a + b);
  return points
    .filter((point) => point.kind === kind && Math.max(...off(point)) <= 1 + 1e-9)
    .sort((a, b) => sum(a) - sum(b))[0];
}

const all = (selector) => [...document.querySelectorAll(selector)];
const put = (name, text) => (all(`[data-of=${name}]`)[0].textContent = text);
const written = (count) => count.toLocaleString("en"); // words stay as they are
const short = (value, options) => value.toLocaleString("en", { notation: "compact", ...options });

// As one says it.
const spoken = (value, roundingMode) =>
  value < 1e6
    ? written(value)
    : short(value, { compactDisplay: "long", maximumSignificantDigits: 3, roundingMode });

// A formula is no better than three digits.
const about = (value) =>
  value < 1e6 ? value.toLocaleString("en", { maximumSignificantDigits: 3 }) : spoken(value);

// How many facts fit, of four kinds.
function answer({ N, n, d }, { floor, ceiling, edits, weights }, prices, model) {
  const price = class_price(prices, N);
  const labels = (rank) => ((N - 1) * rank) / price;
  const least = 4 * price; // so much rank, or four examples for each word, as measured
  const more = floor === ceiling ? "more" : `more than ${spoken(ceiling, "ceil")}`;
  put("numbers", `any ${spoken(floor, "floor")}; of ${more} almost no choice`);
  const evidence = model ? "the floor only compared with ranks" : "both proved";
  put("known-numbers", n < 2 ? "equal with one token" : evidence);
  put("signs", spoken(2 * floor, "floor"));
  put("signs-each", ((2 * floor - 1) / weights).toFixed(2));
  const free = (N - 1) * edits;
  put("words", about(labels(edits)));
  put("words-weights", about(free));
  put("words-each", ((labels(edits) * Math.log2(N)) / free).toFixed(2));
  put("words-behind", about(labels(d)));
  const high = edits < least ? "; both too high" : "; the last is too high";
  put("words-note", N > 2 && d < least ? `${high} for so many words` : "");
  put("known-words", N > 2 ? "a formula, not a theorem" : "proved for two words");
  put("edits", spoken(edits, "floor"));
  put("half", spoken(Math.floor(edits / 2), "floor"));
}

// All bars with their counts, up to the first and on to the last, on an axis that is long enough.
function draw(bars) {
  const largest = Math.max(...bars.flatMap(([, counts]) => counts.filter(Number.isFinite)));
  const decades = Math.max(7, Math.ceil(Math.log10(largest)));
  const place = (value) => `${(100 * Math.log10(Math.max(value, 1))) / decades}%`;
  for (const [bar, counts] of bars) {
    const known = counts.filter(Number.isFinite);
    const from = Number.isFinite(counts[0]) ? counts[0] : 1;
    bar.classList.toggle("idle", !known.length);
    bar.querySelector("output").textContent = [...new Set(counts)]
      .map(written)
      .join(known.length === counts.length ? " to " : "; ceiling ");
    bar.style.setProperty("--from", place(from));
    bar.style.setProperty("--to", place(Math.max(from, ...known)));
  }
  if (all("#chart .axis span").length === decades + 1) return;
  document.documentElement.style.setProperty("--decades", decades);
  const ticks = Array.from({ length: decades + 1 }, (_, k) => (decades > 7 && k % 3 ? "" : short(10 ** k)));
  for (const axis of all(".axis")) axis.innerHTML = ticks.map((tick) => `<span>${tick}</span>`).join("");
}

// Counts of a plain layer, or those that the library has of a model's layer.
function show(sizes, { points, prices }, model) {
  const plain = counted(sizes);
  const here = { ...plain, ...model };
  for (const row of all("[data-count]")) {
    const count = plain[row.dataset.count];
    row.cells[1].textContent = written(count);
    row.classList.toggle("idle", !Number.isFinite(count));
  }
  const bars = all("[data-bar]").map((bar) => {
    const counts = bar.closest("#chart") ? here : plain;
    return [bar, bar.dataset.bar.split(" ").map((name) => counts[name])];
  });
  const near = all("[data-nearest]").map((bar) => {
    const point = nearest(points, bar.dataset.nearest, sizes);
    bar.querySelector("small").textContent = point?.label ?? "";
    return [bar, [point?.known ?? "none near"]];
  });
  draw([...bars, ...near]);
  put("name", model?.name ?? (sizes.L > 1 ? `Each of your ${sizes.L} layers, alone` : "Your layer"));
  const ends = [spoken(here.floor, "floor"), spoken(here.ceiling, "ceil")];
  const linear = `with one token the layer is linear, so d = ${ends[0]} numbers`;
  put("ends", sizes.n < 2 ? linear : `at least ${ends[0]} numbers, at most ${ends[1]}`);
  answer(sizes, here, prices, model);
  put("weights", spoken(here.weights));
  put("unit", model ? "parameters" : "weights with one output");
  put("scope", model?.scope ?? "A plain layer, without biases, norms or shared keys: both counts are proved for almost all data.");
  const { N, S } = sizes;
  const total = N ** S;
  const known = Math.min(Number(plain.aot_capacity) || 0, total);
  put("total", written(total < 1e9 ? total : N));
  put("power", total < 1e9 ? "" : S);
  put("accuracy", (1 / N + ((1 - 1 / N) * known) / total).toPrecision(3));
  put("chance", (1 / N).toPrecision(3));
}

// Where a slider stops: at each number up to 128, then at 64 of each octave.
function stops({ min, max }) {
  const found = [];
  for (let x = +min; x <= max; x += 2 ** Math.max(0, Math.floor(Math.log2(x)) - 6)) found.push(x);
  return found;
}

// Sizes that no slider has, in words.
const beyond = (asked, fields) =>
  fields.flatMap(({ name, min, max }) => {
    const x = asked.get(name);
    const fits = x === null || (/^\d+$/.test(x) && +x >= min && +x <= max);
    return fits ? [] : `${name} = ${x || "nothing"} (its slider: ${min} to ${max})`;
  });

function refuse(words) {
  put("refused", words.join(", "));
  for (const part of all("#answers, #chart, .others, .explored")) part.hidden = words.length > 0;
  document.getElementById("refused").hidden = !words.length;
}

function start(form) {
  const records = JSON.parse(document.getElementById("measured").textContent);
  const fields = [...form.elements].filter(({ name }) => name);
  const buttons = all(".presets button");
  const yours = buttons.at(-1);
  const named = () => new URLSearchParams(new FormData(form)).toString();
  const remember = () => history.replaceState(null, "", `#${named()}`);
  const update = () => {
    refuse(beyond(new FormData(form), fields));
    const chosen = buttons.find(({ dataset }) => dataset.sizes === named());
    for (const button of buttons) button.setAttribute("aria-pressed", button === chosen);
    for (const { value, range } of fields) {
      range.value = range.stops.findLastIndex((stop) => stop <= value);
      range.setAttribute("aria-valuetext", value);
    }
    const sizes = Object.fromEntries(fields.map(({ name, value }) => [name, +value]));
    if (form.checkValidity()) show(sizes, records, records.models[chosen?.textContent]);
  };
  const choose = (sizes) => {
    const asked = new URLSearchParams(sizes);
    for (const field of fields) field.value = asked.get(field.name) ?? field.value;
  };
  const linked = () => new URLSearchParams(location.hash.slice(1)); // a link may name sizes
  const sized = (asked) => fields.some(({ name }) => asked.has(name));
  const follow = () => {
    const asked = linked();
    yours.hidden = !sized(asked);
    choose(yours.hidden ? buttons[0].dataset.sizes : beyond(asked, fields).length ? "" : asked);
    yours.dataset.sizes = named();
    update();
    refuse(beyond(asked, fields));
  };
  for (const field of fields) {
    const range = (field.range = field.previousElementSibling);
    range.stops = stops(field);
    range.max = range.stops.length - 1;
    range.oninput = () => (field.value = range.stops[range.value]);
  }
  for (const button of buttons)
    button.onclick = () => {
      choose(button.dataset.sizes);
      update();
      remember();
    };
  for (const part of all(".explorer")) Object.assign(part, { oninput: update, onchange: remember });
  addEventListener("hashchange", () => {
    if (sized(linked()) || !location.hash) follow(); // another link leads down the page, and sizes stay
  });
  follow();
}

start(document.getElementById("explorer"));
