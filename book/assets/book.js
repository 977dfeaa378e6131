const article = () => document.querySelector("article.bd-article");

addEventListener("DOMContentLoaded", () => {
  // The theme's download button opens the notebook's JSON in the browser; readers want the file.
  for (const link of document.querySelectorAll("a.btn-download-source-button"))
    link.setAttribute("download", "");
  // Entries of the bibliography have roles that are out of use, and make what holds them no list.
  for (const entry of document.querySelectorAll(".citation-list, [role=doc-biblioentry]"))
    entry.removeAttribute("role");
  // The book's name above the contents belongs to no landmark.
  const home = document.querySelector(".sidebar-primary-item:has(> .navbar-brand)");
  home?.setAttribute("role", "navigation");
  home?.setAttribute("aria-label", "Front page");
  // A name that is not what stands on a button can be said by nobody who sees it.
  for (const button of document.querySelectorAll(".search-button-field, details.hide > summary"))
    button.removeAttribute("aria-label");
  for (const head of document.querySelectorAll(".bd-article th"))
    if (!head.textContent.trim()) head.setAttribute("role", "cell"); // it is the head of nothing
  // Drawn figures get a box of their own, in which they can scroll without their caption.
  for (const image of document.querySelectorAll(".bd-article figure img")) {
    const box = document.createElement("div");
    box.className = "picture";
    image.replaceWith(box);
    box.append(image);
  }
  // The lists of the record fold, so that the contents show the argument.
  for (const caption of document.querySelectorAll(".bd-links p.caption")) {
    if (!/^Record|theory$|itself$/.test(caption.textContent.trim())) continue;
    const list = caption.nextElementSibling;
    const fold = document.createElement("details");
    fold.open = Boolean(list.querySelector(".current"));
    fold.append(document.createElement("summary"), list);
    caption.replaceWith(fold);
    fold.firstElementChild.append(caption);
  }
  if (typeof Search === "object") Search.htmlToText = wordsOf;
});

// What the search page quotes: the words of a page or of a section, without its lists of contents.
function wordsOf(html, anchor) {
  const page = new DOMParser().parseFromString(html, "text/html");
  const found = page.querySelector("article.bd-article") ?? page.body;
  for (const part of found.querySelectorAll(".headerlink, .toctree-wrapper, nav, script, style"))
    part.remove();
  const section = anchor && page.getElementById(decodeURIComponent(anchor.slice(1)));
  return (section || found).textContent.replace(/\\[()[\]]/g, "");
}

// --- What is wider than its box: it fades at the edge where more of it is, and scrolls there ------

const BOXES = `div.math mjx-container, span.math, pre, .output, .picture, .graph, .explored, dt.sig,
  dl.py dd, .pst-scrollable-table-container`;
const PHONE = 600; // pixels
const LEAST = 0.8; // of its size, a formula shrinks before it scrolls
const LEGIBLE = 9 / 20; // the letters of a plot have 20 pixels in the file, and on a phone 9

function shade(box) {
  const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
  box.classList.toggle("more-left", box.scrollLeft > 1);
  box.classList.toggle("more-right", rest > 1);
}

function fit() {
  if (!article()) return;
  for (const image of article().querySelectorAll(".picture > img")) {
    const narrow = article().clientWidth < PHONE;
    image.style.minWidth = narrow ? `${Math.round(LEGIBLE * image.naturalWidth)}px` : "";
  }
  for (const formula of article().querySelectorAll("div.math")) {
    formula.style.fontSize = "";
    const inner = formula.querySelector("mjx-container");
    const part = inner ? inner.clientWidth / inner.scrollWidth : 1;
    if (part < 1) formula.style.fontSize = `${Math.floor(99 * Math.max(part, LEAST))}%`;
    if (inner) inner.tabIndex = inner.scrollWidth > inner.clientWidth ? 0 : -1;
  }
  for (const box of article().querySelectorAll(BOXES)) {
    // What stands beside a formula for screen readers counts in its scrollWidth.
    const inner = box.querySelector(":scope > mjx-container > mjx-math");
    const needed = inner ? inner.getBoundingClientRect().width : box.scrollWidth;
    const wide = box.clientWidth > 0 && needed > box.clientWidth + 1;
    box.classList.toggle("wide", wide);
    if (!wide) continue;
    box.tabIndex = 0; // the arrow keys scroll it, too
    box.onscroll = () => shade(box);
    shade(box);
  }
}

addEventListener("load", async () => {
  await window.MathJax?.startup?.promise;
  fit();
  if (article()) new ResizeObserver(fit).observe(article()); // a fold that opens makes it longer
  document.body.dataset.fitted = "";
});

// --- Points of a plot say what they are, where the mouse rests or a finger taps -------------------

const NEAR = 12; // pixels from a point

addEventListener("DOMContentLoaded", () => {
  for (const stored of document.querySelectorAll("script.points")) {
    const points = JSON.parse(stored.textContent);
    let cell = stored.closest(".cell"); // the picture is in one before
    while (!cell.querySelector(".picture")) cell = cell.previousElementSibling;
    const picture = cell.querySelector(".picture");
    const words = Object.assign(document.createElement("span"), { className: "point", hidden: true });
    picture.append(words);
    const image = picture.querySelector("img");
    const away = ({ at }, x, y) => Math.hypot(at[0] * image.width - x, at[1] * image.height - y);
    const say = ({ offsetX: x, offsetY: y }) => {
      const distances = points.map((point) => away(point, x, y));
      const least = Math.min(...distances);
      words.hidden = least > NEAR;
      if (words.hidden) return;
      const { at, says } = points[distances.indexOf(least)];
      words.textContent = says;
      words.style.top = `${image.offsetTop + at[1] * image.height}px`;
      const right = at[0] > 1 / 2; // the words stand on the side with more room
      const left = image.offsetLeft + at[0] * image.width - (right ? words.offsetWidth : 0);
      words.style.left = `${left}px`;
    };
    image.addEventListener("pointermove", say);
    image.addEventListener("pointerdown", say);
    image.addEventListener("pointerleave", () => (words.hidden = true));
  }
});

// --- Exercises: a field for an answer, judged by what the check said when the chapter ran ---------

window.exercises ??= {}; // a picture may judge answers, too: a function from a text to true or words

function judged(text, known) {
  if (typeof known === "string") {
    const said = window.exercises[known](text);
    return said === true ? "right" : `not yet: ${said}`;
  }
  if (typeof known[0][0] === "string") {
    const word = text.replace(/[^\w.-]/g, "").toLowerCase();
    const found = known.find(([from]) => from.toLowerCase() === word);
    return found?.[2] ?? `not yet: the answer looks like ${known[0][0]}`;
  }
  const parts = text.trim().replace(/−/g, "-").replace(/(\d),(?=\d{3}\b)/g, "$1").split("/");
  const numbers = parts.map((part) => (part.endsWith("%") ? part.slice(0, -1) / 100 : Number(part)));
  const value = numbers.reduce((a, b) => a / b);
  const [least, most] = [known[0][0], known.at(-1)[1]];
  if (!text.trim() || !Number.isFinite(value)) return "not yet: the answer is a number, such as 12";
  if (value < least || value > most)
    return `not yet: the answer lies between ${least.toLocaleString("en")} and ${most.toLocaleString("en")}`;
  const after = known.findLastIndex(([from]) => from <= value + 1e-9);
  if (known[after][1] >= value - 1e-9) return known[after][2];
  const near = known[after][2] === "right" ? known[after + 1][2] : known[after][2];
  return near.replace("not yet: ", "not yet; near your answer, ");
}

addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".attempt[data-answers]")) {
    const known = JSON.parse(place.dataset.answers);
    place.innerHTML = `<form><label>Your answer <input autocomplete="off" spellcheck="false"></label>
      <button>Check</button><output aria-live="polite"></output></form>`;
    const form = place.firstElementChild;
    const [field, , said] = form.elements;
    form.onsubmit = (event) => {
      event.preventDefault();
      const verdict = judged(field.value, known);
      form.dataset.right = verdict === "right";
      said.value = verdict === "right" ? "Right." : verdict.replace("not yet", "Not yet");
    };
    place.hidden = false;
    for (const stream of place.closest(".cell").querySelectorAll(".output.stream"))
      stream.hidden = /^no answer yet\s*$/.test(stream.querySelector("pre").textContent);
  }
});
