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

const LONGEST = 1e7; // the right end of the axis
const NEAR = 2; // no size of a near point is off by a larger factor

// The point of that kind whose sizes are nearest, by the sum of the logarithms of their ratios.
function nearest(points, kind, sizes) {
  const length = kind === "classes" ? "n" : "S";
  const off = (point) =>
    ["H", "d", "d_h", "N", length].map((size) => Math.abs(Math.log(point[size] / sizes[size])));
  const near = points
    .filter((point) => point.kind === kind)
    .map((point) => ({ point, off: off(point) }))
    .filter((each) => Math.max(...each.off) <= Math.log(NEAR) + 1e-9)
    .map(({ point, off }) => ({ point, sum: off.reduce((a, b) => a + b) }));
  return near.length ? near.reduce((a, b) => (b.sum < a.sum ? b : a)).point : null;
}

const written = (value) => value.toLocaleString("en");
const place = (value) => `${((100 * Math.log(Math.max(value, 1))) / Math.log(LONGEST)).toFixed(2)}%`;

// What a count says about these sizes: its value, or null and the condition that they break.
function counted(name, sizes) {
  const [holds, words] = needs[name] ?? [() => true, ""];
  return holds(sizes) ? [count[name](sizes), ""] : [null, words];
}

function fill(row, value, words) {
  row.cells[1].textContent = value === null ? words : written(value);
  row.classList.toggle("idle", value === null);
}

// A bar up to the first count, and on to the second if there is one.
function draw(bar, sizes) {
  const found = bar.dataset.bar.split(" ").map((name) => counted(name, sizes));
  const known = found.map(([value]) => value).filter((value) => value !== null);
  const missing = found.map(([, words]) => words).find(Boolean);
  bar.classList.toggle("idle", !known.length);
  bar.querySelector("output").textContent = [known.map(written).join(" to "), missing]
    .filter(Boolean)
    .join("; ceiling ");
  const [from, to] = [found[0][0] ?? 1, found.at(-1)[0] ?? found[0][0] ?? 1];
  bar.style.setProperty("--from", place(from));
  bar.style.setProperty("--to", place(Math.max(from, to)));
}

function show(sizes, points) {
  for (const row of document.querySelectorAll("[data-count]"))
    fill(row, ...counted(row.dataset.count, sizes));
  for (const bar of document.querySelectorAll("[data-bar]")) draw(bar, sizes);
  for (const bar of document.querySelectorAll("[data-nearest]")) {
    const point = nearest(points, bar.dataset.nearest, sizes);
    bar.classList.toggle("idle", !point);
    bar.querySelector("output").textContent = point ? written(point.known) : "none near";
    bar.querySelector("small").textContent = point?.label ?? "";
    bar.style.setProperty("--from", place(point?.known ?? 1));
  }
  const total = sizes.N ** sizes.S;
  const known = narrow(sizes) ? count.aot_capacity(sizes) : 0;
  const words = {
    total: total < 1e9 ? written(total) : `${sizes.N}^${sizes.S}`,
    accuracy: accuracy(known, sizes.N, total).toPrecision(3),
    chance: (1 / sizes.N).toPrecision(3),
  };
  for (const [name, text] of Object.entries(words))
    document.querySelector(`#guaranteed [data-of=${name}]`).textContent = text;
}

// The sizes that an address asks for and no slider has, in words.
const beyond = (asked, sliders) =>
  sliders
    .filter(({ name }) => asked.has(name))
    .filter(({ name, min, max }) => {
      const value = Number(asked.get(name));
      return !(Number.isInteger(value) && value >= min && value <= max);
    })
    .map(({ name, min, max }) => `${name} = ${asked.get(name)} (its slider: ${min} to ${max})`);

// Instead of counts at other sizes than the address asks for.
function refuse(words) {
  document.querySelector("#refused output").textContent = words.join(", ");
  document.getElementById("refused").hidden = !words.length;
  document.getElementById("chart").hidden = words.length > 0;
  document.querySelector(".explored").hidden = words.length > 0;
}

function start(form) {
  const points = JSON.parse(document.getElementById("measured").textContent);
  const sliders = [...form.querySelectorAll("input")];
  const presets = [...form.querySelectorAll("[data-sizes]")];
  const named = () => new URLSearchParams(new FormData(form)).toString();
  const set = (asked) => {
    for (const slider of sliders) if (asked.has(slider.name)) slider.value = asked.get(slider.name);
  };
  const update = () => {
    refuse([]);
    for (const slider of sliders) slider.nextElementSibling.value = slider.value;
    for (const preset of presets)
      preset.setAttribute("aria-pressed", preset.dataset.sizes === named());
    show(Object.fromEntries(sliders.map((s) => [s.name, s.valueAsNumber])), points);
  };
  const remember = () => history.replaceState(null, "", `#${named()}`);
  const follow = () => {
    const asked = new URLSearchParams(location.hash.slice(1)); // a link may name sizes
    const words = beyond(asked, sliders);
    if (!words.length) set(asked);
    update();
    refuse(words);
  };
  for (const preset of presets)
    preset.addEventListener("click", () => {
      set(new URLSearchParams(preset.dataset.sizes));
      update();
      remember();
    });
  form.addEventListener("input", update);
  form.addEventListener("change", remember);
  addEventListener("hashchange", follow);
  follow();
}

start(document.getElementById("explorer"));
