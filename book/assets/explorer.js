// The page "Explorer": sliders, the bounds at their sizes in a chart, and measured points near them.
// The formulas are those of attnmem.core.bounds; tests/browser compares the two.

// Rank of the derivative of k heads that cancel; m dimensions tell tokens apart, r is the logits' rank.
function group_rank(k, m, d, r) {
  const p = Math.min(k - 1, m);
  const choose2 = (x) => (x > 1 ? (x * (x - 1)) / 2 : 0);
  return p * r * (m + d - r) - choose2(p) * r - choose2(p - m + r) * (d - r) + m;
}

// The largest sum of these ranks over H heads in groups of nearly equal size.
function floor_of(H, m, d, r) {
  let best = 0;
  for (let groups = 1; groups <= H; groups++) {
    const small = Math.floor(H / groups);
    const larger = H % groups;
    const sum =
      larger * group_rank(small + 1, m, d, r) + (groups - larger) * group_rank(small, m, d, r);
    best = Math.max(best, sum);
  }
  return best;
}

const own_floor = ({ H, d_h, d }) => floor_of(H, d, d, Math.min(d_h, d));

const count = {
  mha_capacity: ({ H, n, d_h }) => H * (Math.min(n, d_h) - 1) + 1,
  previous_aot_capacity: ({ H, d_h }) => H * (d_h - 1) + 1,
  aot_capacity: ({ H, d_h, d }) => H * d_h + d,
  own_context_rank: ({ H, d }) => H * d,
  own_context_floor: own_floor,
  // Layers with values as wide as heads; s dimensions of what a layer writes are read behind it.
  deep_ceiling: ({ L, H, d_h, d }) => {
    const r = Math.min(d_h, d);
    let [s, total] = [1, d];
    for (let layer = 0; layer < L; layer++) {
      const v = Math.min(d_h, d, s);
      total += H * (r * (2 * d - r) + v * (d + s - v));
      s = Math.min(d, s + H * (v + 2 * r));
    }
    return total;
  },
  shared_context_floor: (sizes) => {
    const { H, n, d_h, d } = sizes;
    return n > d ? own_floor(sizes) : floor_of(H, n - 1, d, Math.min(d_h, n - 1)) + 1;
  },
  scalar_capacity: ({ H, d }) => H * (d - 1),
  shared_context_rank: ({ H, n }) => H * (n - 1) + 1,
  own_context_ceiling: ({ H, d_h, d }) => {
    const r = Math.min(d_h, d);
    return H * (r * (2 * d - r) + d);
  },
  shared_context_ceiling: ({ H, n, d_h, d }) => {
    const r = Math.min(d_h, n - 1);
    return H * (r * (n - 1 + d - r) + n - 1) + 1;
  },
  affine_rank: ({ H, d }) => H * (d - 1) + 1,
  weights: ({ H, d_h, d }) => H * d * (2 * d_h + 1), // with one output
  relu_capacity: (sizes) => relu_width(sizes) * (sizes.d + 2) + 1,
  mha_parameters: ({ H, d_h, d }) => H * d * (2 * d_h + 1) + H + 1,
  aot_parameters: ({ H, d_h, d, S, N }) => d * (S + 2 * N + 4 * d_h * H),
};

// Hidden units of a ReLU network on n tokens and a query that has no more parameters than the layer.
const relu_width = (sizes) =>
  Math.floor((count.mha_parameters(sizes) - 1) / ((sizes.n + 1) * sizes.d + 2));

const accuracy = (known, N, total) => 1 / N + ((1 - 1 / N) * Math.min(known, total)) / total;

const narrow = ({ d_h, d }) => d_h <= d; // heads, as Dana et al. have them

// What a count is promised for: a test of the sizes, and the same in words.
const needs = {
  mha_capacity: [({ n, d }) => n < d, "needs n < d"],
  previous_aot_capacity: [({ n, d_h, d }) => d_h <= n && n <= d, "needs d_h ≤ n ≤ d"],
  aot_capacity: [narrow, "needs d_h ≤ d"],
  own_context_rank: [({ n }) => n >= 2, "needs n ≥ 2"],
  own_context_floor: [({ n }) => n >= 2, "needs n ≥ 2"],
  shared_context_floor: [({ n }) => n >= 2, "needs n ≥ 2"],
  scalar_capacity: [({ n, d_h, d }) => d_h >= 2 && n >= 3 && n <= d, "needs 3 ≤ n ≤ d, d_h ≥ 2"],
  shared_context_ceiling: [({ n, d }) => n <= d, "needs n ≤ d"],
  relu_capacity: [(sizes) => relu_width(sizes) > 0, "not one unit fits"],
  aot_parameters: [narrow, "needs d_h ≤ d"],
};

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
const put = (name, text) => {
  document.querySelector(`[data-of=${name}]`).textContent = text;
};
const written = (value) => value.toLocaleString("en");

const short = (value, options) => value.toLocaleString("en", { notation: "compact", ...options });

// As one says it.
const spoken = (value, roundingMode) =>
  value < 1e6
    ? written(value)
    : short(value, { compactDisplay: "long", maximumSignificantDigits: 3, roundingMode });

// The value of a count, or null and the condition that these sizes break.
function counted(name, sizes) {
  const [holds, words] = needs[name] ?? [() => true, ""];
  return holds(sizes) ? [count[name](sizes), ""] : [null, words];
}

// A bar with its words, up to the first count, and on to the second if there is one.
function bar_of(bar, counts) {
  const known = counts.map(([value]) => value).filter((value) => value !== null);
  const missing = counts.map(([, words]) => words).find(Boolean);
  const words = [known.map(written).join(" to "), missing].filter(Boolean).join("; ceiling ");
  return { bar, words, from: counts[0][0] ?? 1, to: known.at(-1) ?? 1, idle: !known.length };
}

// All bars, on an axis that is long enough for each.
function draw(bars) {
  const decades = Math.max(7, ...bars.map(({ from, to }) => Math.ceil(Math.log10(Math.max(from, to)))));
  const place = (value) => `${(100 * Math.log10(Math.max(value, 1))) / decades}%`;
  for (const { bar, words, from, to, idle } of bars) {
    bar.classList.toggle("idle", idle);
    bar.querySelector("output").textContent = words;
    bar.style.setProperty("--from", place(from));
    bar.style.setProperty("--to", place(Math.max(from, to)));
  }
  if (all("#chart .axis span").length === decades + 1) return;
  document.documentElement.style.setProperty("--decades", decades);
  const ticks = Array.from({ length: decades + 1 }, (_, k) => (decades > 7 && k % 3 ? "" : short(10 ** k)));
  for (const axis of all(".axis")) axis.innerHTML = ticks.map((tick) => `<span>${tick}</span>`).join("");
}

// Counts of a plain layer, or those that the library has of a model's layer.
function show(sizes, points, model) {
  for (const row of all("[data-count]")) {
    const [value, words] = counted(row.dataset.count, sizes);
    row.cells[1].textContent = value === null ? words : written(value);
    row.classList.toggle("idle", value === null);
  }
  const plain = (name) => counted(name, sizes);
  const here = (name) => (model?.[name] ? [model[name], ""] : plain(name));
  const bars = all("[data-bar]").map((bar) => {
    const names = bar.dataset.bar.split(" ");
    return bar_of(bar, names.map(bar.closest("#chart") ? here : plain));
  });
  const near = all("[data-nearest]").map((bar) => {
    const point = nearest(points, bar.dataset.nearest, sizes);
    bar.querySelector("small").textContent = point?.label ?? "";
    return bar_of(bar, [point ? [point.known, ""] : [null, "none near"]]);
  });
  draw([...bars, ...near]);
  put("name", model?.name ?? "Your layer");
  put("least", spoken(here("own_context_floor")[0] ?? 0, "floor"));
  put("most", spoken(here("own_context_ceiling")[0], "ceil"));
  put("weights", spoken(here("weights")[0]));
  put("unit", model ? "parameters" : "weights with one output");
  put("scope", model?.scope ?? "Both counts are proved for almost all data.");
  const total = sizes.N ** sizes.S;
  const known = narrow(sizes) ? count.aot_capacity(sizes) : 0;
  put("total", written(total < 1e9 ? total : sizes.N));
  put("power", total < 1e9 ? "" : sizes.S);
  put("accuracy", accuracy(known, sizes.N, total).toPrecision(3));
  put("chance", (1 / sizes.N).toPrecision(3));
}

// Where a slider stops: at each number up to 128, then at 64 of each octave.
function stops({ min, max }) {
  const found = [];
  for (let x = +min; x <= max; x += 2 ** Math.max(0, Math.floor(Math.log2(x)) - 6)) found.push(x);
  return found;
}

// Sizes that no slider has, in words.
const beyond = (asked, fields) =>
  fields
    .map(({ name, min, max }) => [asked.get(name), name, +min, +max])
    .filter(([x, , min, max]) => x !== null && !(/^\d+$/.test(x) && x >= min && x <= max))
    .map(([x, name, min, max]) => `${name} = ${x} (its slider: ${min} to ${max})`);

function refuse(words) {
  put("refused", words.join(", "));
  for (const part of all("#chart, .others, .explored")) part.hidden = words.length > 0;
  document.getElementById("refused").hidden = !words.length;
}

function start(form) {
  const { points, models } = JSON.parse(document.getElementById("measured").textContent);
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
    if (form.checkValidity()) show(sizes, points, models[chosen?.textContent]);
  };
  const choose = (sizes) => {
    const asked = new URLSearchParams(sizes);
    for (const field of fields) field.value = asked.get(field.name) ?? field.value;
    update();
  };
  const follow = () => {
    const asked = new URLSearchParams(location.hash.slice(1)); // a link may name sizes
    yours.hidden = !fields.some(({ name }) => asked.has(name));
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
      remember();
    };
  for (const part of all(".explorer")) Object.assign(part, { oninput: update, onchange: remember });
  addEventListener("hashchange", follow);
  follow();
}

start(document.getElementById("explorer"));
